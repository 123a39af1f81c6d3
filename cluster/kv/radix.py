"""The radix tree: cached prefixes, one node for each whole page.

The key of a page is its own tokens *and the token after it*, so it has page_size + 1 tokens. The draft's cell at
position p is computed from token p + 1 (the EAGLE shift), so the draft can reuse a page only if the next token matches.

Each salt has its own tree. Pages under different salts never match, so response times reveal nothing about prompts that
were sent under another salt. Requests without a salt use salt 0.

A node is locked while a lease reads its page, and unlocked otherwise. All unlocked nodes are in one list, least
recently used first; eviction takes the head. When a node is used, it moves to the end of the list, and then each of its
ancestors moves behind it. So children come before their parents, and the head is always the least recently used leaf.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One cached page. `children` are sorted by key; `locks` counts the leases that read the page, and `window_locks`
    those that read its tokens in the window pools (`WindowPages`).

    The root of a salt has page -1, no parent, and the key `(salt,)`.
    """

    key: Key
    page: int
    parent: "Node | None"
    children: list["Node"] = field(default_factory=list)
    locks: int = 0
    window_locks: int = 0

    def find(self, key: Key) -> tuple[int, "Node | None"]:
        """Return the index where a child with `key` is or would be inserted, and the child, or None."""
        index = bisect_left(self.children, key, key=_key_of)
        is_match = index < len(self.children) and self.children[index].key == key
        return index, self.children[index] if is_match else None


_key_of = attrgetter("key")


class RadixTree:
    """Matches, inserts, locks and evicts page-aligned prefixes. Pages in the tree are immutable.

    The cost of an operation grows with its pages, not with the tree, except for a binary search among siblings.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages = 0
        self._roots: dict[int, Node] = {}  # by salt; only roots that have children
        self._unlocked: OrderedDict[Node, None] = OrderedDict()  # least recently used first, children before parents

    @property
    def evictable(self) -> int:
        """Pages that eviction could free now."""
        return len(self._unlocked)

    def _keys(self, tokens: Sequence[int], start: int = 0) -> Iterator[Key]:
        """Yield the key of each whole page of `tokens`, from page `start` on. A last page with no token after it has no
        key.
        """
        size = self.page_size
        # The last page starts at most at len(tokens) - size - 1: `size` tokens and the one after it must exist.
        for i in range(start * size, len(tokens) - size, size):
            yield tuple(tokens[i : i + size + 1])

    def match(self, tokens: Sequence[int], salt: int = 0) -> list[Node]:
        """Return the nodes, without the root, of the longest prefix of `tokens` cached under `salt`.

        At least one token stays unmatched, because a key includes the token after its page. This call marks the
        returned nodes as used.
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
        self._mark_used(node)
        return path

    def nearest(self, tokens: Sequence[int], path: Sequence[Node], salt: int = 0) -> tuple[Node, int] | None:
        """Search the children of the last node of `path` (of the salt's root if `path` is empty). Return the child
        whose page shares the most cells with the `tokens` after `path`, and the number of these cells. Return None if
        no cell is shared.

        A cell (the KV entry of one token) depends on the token after it too, so n common tokens are n - 1 shared cells.
        """
        node, start = path[-1] if path else self._roots.get(salt), len(path) * self.page_size
        if node is None:
            return None
        page_tokens = tuple(tokens[start : start + self.page_size + 1])
        index, _ = node.find(page_tokens)
        # Children are sorted, so the child with the longest common prefix is next to the place of `page_tokens`.
        siblings = node.children[max(0, index - 1) : index + 1]
        shared_cells, best_node = max(
            ((common_prefix_length(child.key, page_tokens) - 1, child) for child in siblings),
            key=_shared_count,
            default=(0, node),
        )
        if shared_cells < 1:
            return None
        self._mark_used(best_node)
        return best_node, shared_cells

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], prefix_nodes: Sequence[Node] = (), salt: int = 0
    ) -> list[Node]:
        """Add `pages` under `salt`. `tokens` are all tokens of the sequence. The pages of `prefix_nodes` hold its first
        tokens, and `pages` hold the tokens after them.

        Returns one node for each page, as long as `tokens` has the token after the page. If the tree already had a node
        with the same key, that node is returned. Its page is then not the given page, and the caller frees the given
        page.
        """
        node = prefix_nodes[-1] if prefix_nodes else self._roots.get(salt) or Node((salt,), -1, None)
        nodes: list[Node] = []
        for key, page in zip(self._keys(tokens, len(prefix_nodes)), pages, strict=False):
            index, child = node.find(key)
            if child is None:
                child = Node(key, page, node)
                node.children.insert(index, child)
                self.pages += 1
                self._unlocked[child] = None
                if node.parent is None:  # a new root is kept from its first child on
                    self._roots[salt] = node
            nodes.append(child)
            node = child
        self._mark_used(node)
        return nodes

    def lock(self, path: Sequence[Node]) -> None:
        """Protect the nodes of `path` from eviction until `unlock`. Precondition: the caller has locked every ancestor
        of these nodes, or the ancestor is in `path` too.
        """
        for node in path:
            if node.locks == 0:
                del self._unlocked[node]
            node.locks += 1

    def unlock(self, path: Sequence[Node]) -> None:
        """Undo one `lock` of each node of `path`, in which parents come first, and mark the nodes as used.

        Raises:
            ValueError: a node is not locked.
        """
        for node in reversed(path):  # children first, as they must come before their parents in `_unlocked`
            if node.locks == 0:
                raise ValueError(f"page {node.page} is unlocked twice")
            node.locks -= 1
            if node.locks == 0:
                self._unlocked[node] = None

    def root(self, salt: int) -> Node | None:
        """Return the root of a salt's tree; None while no page is cached under the salt."""
        return self._roots.get(salt)

    def evict(self, count: int) -> list[Node]:
        """Remove the least recently used unlocked leaf, `count` times or until none is left; return these nodes."""
        freed: list[Node] = []
        while len(freed) < count and self._unlocked:
            node, _ = self._unlocked.popitem(last=False)
            assert node.parent is not None and not node.children, "children are evicted before their parents"
            siblings = node.parent.children
            del siblings[node.parent.find(node.key)[0] if len(siblings) > 1 else 0]
            if not siblings and node.parent.parent is None:
                del self._roots[node.parent.key[0]]
            freed.append(node)
        self.pages -= len(freed)
        return freed

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of all salts without the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def check(self) -> None:
        """Check that the list of unlocked nodes, the page count and the roots agree with the tree.

        Raises:
            AssertionError: they do not.
        """
        list_positions = {node: index for index, node in enumerate(self._unlocked)}
        count = 0
        for node in self.nodes():
            count += 1
            assert (node in list_positions) == (node.locks == 0), f"page {node.page} has {node.locks} locks"
            parent = node.parent
            if parent is not None and parent.parent is not None:
                assert node.locks <= parent.locks, f"page {node.page} is locked and its parent is not"
                if parent in list_positions:
                    assert list_positions[node] < list_positions[parent], (
                        f"page {parent.page} would be evicted before a child"
                    )
        assert count == self.pages and len(list_positions) <= count, "the tree miscounts its pages"
        assert all(root.children and root.key == (salt,) for salt, root in self._roots.items()), "a salt has no page"

    def _mark_used(self, node: Node) -> None:
        """Mark `node` and its unlocked ancestors as used now.

        The loop stops at the first locked node: by the precondition of `lock` all ancestors of a locked node are
        locked, and `unlock` will mark them. A child moves before its parent, so children stay before parents in the
        list.
        """
        while node.locks == 0 and node.parent is not None:
            self._unlocked.move_to_end(node)
            node = node.parent


def common_prefix_length(first: Key, second: Key) -> int:
    """Return the length of the common prefix of two keys."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def _shared_count(pair: tuple[int, Node]) -> int:
    return pair[0]
