"""The radix tree over whole pages: who cached which prefix.

A page is keyed by its own tokens *and the token after it*: the draft's cell at position p is made of token p + 1, so a
page is reusable by the draft only where the following token matched too (the EAGLE shift).

Each salt has a tree of its own: pages under different salts never match, so nobody can tell from the speed of an answer
what was sent under another salt. Salt 0 is that of requests without one.

The next page to evict is the head of one list, the unlocked pages in order of last use. Using a page also uses all its
ancestors, which are put behind it in the list; so the head never has a child: it is the least recently used leaf.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One cached page. `children` are in order of their keys; `locks` counts running requests that read it.

    The root of a salt has no page and no parent, and the salt for a key.
    """

    key: Key
    page: int
    parent: "Node | None"
    children: list["Node"] = field(default_factory=list)
    locks: int = 0

    def find(self, key: Key) -> tuple[int, "Node | None"]:
        """The index at which a child with `key` is or would be, and the child, if there is one."""
        at = bisect_left(self.children, key, key=_key_of)
        found = at < len(self.children) and self.children[at].key == key
        return at, self.children[at] if found else None


_key_of = attrgetter("key")


class RadixTree:
    """Match, insert, lock and evict page-aligned prefixes. Pages in the tree are immutable.

    The cost of an operation depends on its pages, not on the size of the tree, except for a search among siblings.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages = 0
        self._roots: dict[int, Node] = {}  # by salt, those with children
        self._unlocked: OrderedDict[Node, None] = OrderedDict()  # least recently used first, children before parents

    @property
    def evictable(self) -> int:
        """Pages that eviction could free now."""
        return len(self._unlocked)

    def _keys(self, tokens: Sequence[int], start: int = 0) -> Iterator[Key]:
        """The keys of the whole pages of `tokens` from page `start` on, those whose following token is known."""
        size = self.page_size
        for i in range(start * size, len(tokens) - size, size):
            yield tuple(tokens[i : i + size + 1])

    def match(self, tokens: Sequence[int], salt: int = 0) -> list[Node]:
        """The nodes of the longest prefix of `tokens` cached under `salt`, root excluded; at least one token stays
        unmatched.
        """
        path: list[Node] = []
        node = self._roots.get(salt)
        if node is None:
            return path
        for key in self._keys(tokens):
            _, child = node.find(key)
            if child is None:
                break
            path.append(child)
            node = child
        self._use(node)
        return path

    def nearest(self, tokens: Sequence[int], path: Sequence[Node], salt: int = 0) -> tuple[Node, int] | None:
        """The child of `path`, or of the salt's root, that shares most cells with `tokens`, and how many; None when no
        cell is shared.

        A cell is shared only if the token after it is the same too, so n common tokens are n - 1 cells.
        """
        node, start = path[-1] if path else self._roots.get(salt), len(path) * self.page_size
        if node is None:
            return None
        rest = tuple(tokens[start : start + self.page_size + 1])
        at, _ = node.find(rest)
        siblings = node.children[max(0, at - 1) : at + 1]  # the longest common prefix is with a neighbour
        shared, best = max(((common(child.key, rest) - 1, child) for child in siblings), key=_first, default=(0, node))
        if shared < 1:
            return None
        self._use(best)
        return best, shared

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], after: Sequence[Node] = (), salt: int = 0
    ) -> list[Node]:
        """Add `pages`, which hold the `tokens` that follow those of the nodes `after`, all under `salt`.

        Returns the node of every page whose following token is in `tokens`. Where the tree had those tokens
        already, the node has another page; pages that the tree did not take are the caller's to free.
        """
        node = after[-1] if after else self._roots.get(salt) or Node((salt,), -1, None)
        nodes: list[Node] = []
        for key, page in zip(self._keys(tokens, len(after)), pages, strict=False):
            at, child = node.find(key)
            if child is None:
                child = Node(key, page, node)
                node.children.insert(at, child)
                self.pages += 1
                self._unlocked[child] = None
                if node.parent is None:
                    self._roots[salt] = node
            nodes.append(child)
            node = child
        self._use(node)
        return nodes

    def lock(self, path: Sequence[Node]) -> None:
        """Keep these nodes until `unlock`. A caller that locks a node must hold locks on all its ancestors."""
        for node in path:
            if node.locks == 0:
                del self._unlocked[node]
            node.locks += 1

    def unlock(self, path: Sequence[Node]) -> None:
        """Undo one `lock` of these nodes, given parents first; they count as used now.

        Raises:
            ValueError: a node is not locked.
        """
        for node in reversed(path):
            if node.locks == 0:
                raise ValueError(f"page {node.page} is unlocked twice")
            node.locks -= 1
            if node.locks == 0:
                self._unlocked[node] = None

    def root(self, salt: int) -> Node | None:
        """The node before the first pages of a salt; None while no page is cached under it."""
        return self._roots.get(salt)

    def evict(self, count: int) -> list[int]:
        """Drop the least recently used unlocked leaf, `count` times or until none is left; returns their pages."""
        freed: list[int] = []
        while len(freed) < count and self._unlocked:
            node, _ = self._unlocked.popitem(last=False)
            assert node.parent is not None and not node.children, "a page goes after those that follow it"
            siblings = node.parent.children
            del siblings[node.parent.find(node.key)[0] if len(siblings) > 1 else 0]
            if not siblings and node.parent.parent is None:
                del self._roots[node.parent.key[0]]
            freed.append(node.page)
        self.pages -= len(freed)
        return freed

    def nodes(self) -> Iterator[Node]:
        """All nodes of all salts, roots excluded, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def check(self) -> None:
        """Check that the list of unlocked nodes agrees with the tree.

        Raises:
            AssertionError: it does not; the message names the page.
        """
        order = {node: at for at, node in enumerate(self._unlocked)}
        count = 0
        for node in self.nodes():
            count += 1
            assert (node in order) == (node.locks == 0), f"page {node.page} has {node.locks} locks"
            parent = node.parent
            if parent is not None and parent.parent is not None:
                assert node.locks <= parent.locks, f"page {node.page} is locked and its parent is not"
                if parent in order:
                    assert order[node] < order[parent], f"page {parent.page} would go before one that follows it"
        assert count == self.pages and len(order) <= count, "the tree miscounts its pages"
        assert all(root.children and root.key == (salt,) for salt, root in self._roots.items()), "a salt has no page"

    def _use(self, node: Node) -> None:
        """Mark `node` and its ancestors as used now, but not locked ones: unlocking marks those."""
        while node.locks == 0 and node.parent is not None:
            self._unlocked.move_to_end(node)
            node = node.parent


def common(one: Key, other: Key) -> int:
    """Length of the common prefix of two keys."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def _first(pair: tuple[int, Node]) -> int:
    return pair[0]
