"""The radix tree over whole pages: who cached which prefix.

A page is keyed by its own tokens *and the token after it*: the draft's cell at position p is made of token p + 1, so a
page is reusable by the draft only where the following token matched too (the EAGLE shift).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One cached page. `locks` counts running requests that read it; only unlocked leaves may go."""

    key: Key
    page: int
    parent: "Node | None"
    children: dict[Key, "Node"] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0


class RadixTree:
    """Match, insert, lock and evict page-aligned prefixes. Pages in the tree are immutable."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node((), -1, None)
        self.pages = 0
        self._clock = 0
        self._evictable = 0

    @property
    def evictable(self) -> int:
        """Pages that eviction could free now."""
        return self._evictable

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        size = self.page_size
        return [tuple(tokens[i : i + size + 1]) for i in range(0, len(tokens) - size, size)]

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """The nodes of the longest cached prefix of `tokens`, root excluded; at least one token stays unmatched."""
        self._clock += 1
        node, path = self.root, []
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            child.last_used = self._clock
            path.append(child)
            node = child
        return path

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Hand over the pages that hold `tokens`; returns those the tree did not take, for the caller to free.

        `tokens` includes the token after the last full page. Pages already in the tree under the same number stay.
        """
        self._clock += 1
        node, left = self.root, list(pages)
        for index, key in enumerate(self._keys(tokens)[: len(pages)]):
            child = node.children.get(key)
            if child is None:
                child = Node(key, pages[index], node)
                node.children[key] = child
                self.pages += 1
                self._evictable += 1
            if child.page == pages[index]:
                left.remove(child.page)
            child.last_used = self._clock
            node = child
        return left

    def lock(self, path: Sequence[Node]) -> None:
        """Keep these nodes until `unlock`."""
        for node in path:
            self._evictable -= node.locks == 0
            node.locks += 1

    def unlock(self, path: Sequence[Node]) -> None:
        """Undo one `lock`.

        Raises:
            ValueError: a node that is not locked.
        """
        for node in path:
            if node.locks == 0:
                raise ValueError(f"page {node.page} is unlocked twice")
            node.locks -= 1
            self._evictable += node.locks == 0

    def evict(self, count: int) -> list[int]:
        """Drop least recently used unlocked leaves until `count` pages are freed or none is left; returns them."""
        freed: list[int] = []
        while len(freed) < count:
            leaves = sorted((n for n in self._leaves() if n.locks == 0), key=lambda n: n.last_used)
            if not leaves:
                break
            for node in leaves[: count - len(freed)]:
                assert node.parent is not None
                del node.parent.children[node.key]
                freed.append(node.page)
        self.pages -= len(freed)
        self._evictable -= len(freed)
        return freed

    def _leaves(self) -> list[Node]:
        leaves, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                leaves.append(node)
        return leaves
