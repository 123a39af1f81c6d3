"""Who owns which page: a request's lease on pages of the tree and on pages of its own.

    tokens   0 ........ full pages ........ | ..... committed ........ committed + W
    owner    | the tree's, locked by the lease | the lease's own (window at the end)  |

A page is the lease's own while it fills. As soon as all of its tokens are committed and the token after it is known, it
becomes the tree's, while the request still runs, and others can read it; the lease keeps it locked. Where the tree has
the same tokens already, the request goes on with the tree's page and frees its own.

Every page is free, in the tree, or owned by exactly one lease; `check` verifies it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.batch import PageCopy
from cluster.kv.page_table import PageTable
from cluster.kv.pages import PageAllocator
from cluster.kv.radix import Key, Node, RadixTree, common


class Next(NamedTuple):
    """Pages that a request needs next: the node before them (the salt where none is), the index of the first, their
    tokens and the one after.
    """

    after: Node | int
    entry: int
    tokens: Key


@dataclass(slots=True, eq=False)
class Lease:
    """Pages of one running request, in token order: `len(locked)` tree pages, then `own` pages.

    `cached` tokens were found in the cache when it was opened. `source` is a node whose cells the next step copies into
    the first own page, locked until then. Of the request's `tokens`, the first `committed` have their cells. It reads
    and shares pages of its `salt` only.
    """

    row: int
    locked: list[Node]
    own: list[int] = field(default_factory=list)
    cached: int = 0
    source: Node | None = None
    tokens: Sequence[int] = ()
    committed: int = 0
    salt: int = 0

    @property
    def pages(self) -> int:
        """Pages readable by the request."""
        return len(self.locked) + len(self.own)


class KVCache:
    """Pages, page table and radix tree of one rank. Indices only: the tensors are the runners' pools."""

    def __init__(self, pages: int, table: PageTable, radix: bool) -> None:
        """`pages` pages for as many running requests as `table` has rows; without `radix` requests share none."""
        self.page_size, self.table = table.page_size, table
        self._allocator = PageAllocator(pages)
        self._tree = RadixTree(table.page_size)
        self._radix = radix
        self._rows = list(range(table.idle_row - 1, -1, -1))
        self._leases: dict[int, Lease] = {}
        self._copies: list[PageCopy] = []

    @property
    def total(self) -> int:
        """All pages, the sink not counted."""
        return self._allocator.count

    @property
    def free(self) -> int:
        """Pages with no owner."""
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Pages that only the tree holds: eviction can free them."""
        return self._tree.evictable

    @property
    def used(self) -> int:
        """Pages that running requests read or own."""
        return self.total - self.free - self.cached

    @property
    def free_rows(self) -> int:
        """Requests that could still be admitted."""
        return len(self._rows)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def most_cached(self, tokens: Sequence[int], salt: int = 0, most: int | None = None) -> int:
        """Upper bound of the tokens that `open` would find cached: whole pages that match, and less than one more."""
        if not self._radix:
            return 0
        found = min(len(self._tree.match(tokens, salt)) * self.page_size + self.page_size, len(tokens)) - 1
        return found if most is None else min(found, most)

    def open(
        self, tokens: Sequence[int], reach: int, spare: int = 0, salt: int = 0, most: int | None = None
    ) -> Lease | None:
        """A lease for a request whose known tokens are `tokens` and which will write up to index `reach`.

        Locks the longest prefix cached under `salt` (which leaves at least one token to compute), takes pages for the
        rest. Cells of the first of those that another page has already are copied in the next step, unless that other
        page must be evicted. With `most` no more tokens than that are taken from the cache, in whole pages. None, with
        no page changed, when rows or pages do not suffice, or fewer than `spare` pages would stay free or evictable.
        """
        if not self._rows or spare >= self.free + self.cached:
            return None
        path = self._tree.match(tokens, salt) if self._radix else []
        path = path if most is None else path[: most // self.page_size]
        self._tree.lock(path)
        lease = Lease(self._rows[-1], path, cached=len(path) * self.page_size, salt=salt)
        copy = self._shared_cells(lease, tokens) if self._radix and most is None else None
        wanted = self.pages_for(reach) - len(path)
        if wanted + spare > self.free + self.cached and lease.source is not None:  # its page itself may be needed
            self._release_source(lease)
            copy = None
        if wanted + spare > self.free + self.cached or not self.grow([lease], [reach]):
            self._unlock(lease)
            return None
        self._rows.pop()
        self._leases[lease.row] = lease
        self.table.write([lease.row] * len(path), range(len(path)), [node.page for node in path])
        if copy is not None:
            page, cells = copy
            self._copies.append(PageCopy(page, lease.own[0], cells))
            lease.cached += cells
        return lease

    def grow(self, leases: Sequence[Lease], reaches: Sequence[int]) -> bool:
        """Give every lease pages up to index `reaches[i]`, evicting cached pages if needed; all or nothing."""
        wanted = [max(0, self.pages_for(reach) - lease.pages) for lease, reach in zip(leases, reaches, strict=True)]
        total = sum(wanted)
        if total == 0:
            return True
        if total > self.free + self._tree.evictable:
            return False
        if total > self.free:
            self._allocator.give(self._tree.evict(total - self.free))
        pages = self._allocator.take(total)
        rows: list[int] = []
        indices: list[int] = []
        start = 0
        for lease, count in zip(leases, wanted, strict=True):
            rows += [lease.row] * count
            indices += range(lease.pages, lease.pages + count)
            lease.own += pages[start : start + count]
            start += count
        self.table.write(rows, indices, pages)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], committed: int) -> None:
        """After a step: the full pages of the first `committed` tokens are the tree's from now on.

        A page enters the tree only when the token after it is in `tokens`.
        """
        if not self._radix:
            return
        self._release_source(lease)
        lease.tokens, lease.committed = tokens, committed
        if min(committed, len(tokens) - 1) < (len(lease.locked) + 1) * self.page_size:  # no page more is full
            return
        surplus, swapped = self._hand_over(lease, tokens, committed)
        self._allocator.give(surplus)
        self.table.write([lease.row] * len(swapped), swapped, [lease.locked[index].page for index in swapped])

    def close(self, lease: Lease, tokens: Sequence[int], committed: int) -> None:
        """End a lease: full pages of the first `committed` tokens go to the tree as in `publish`, others are freed."""
        if self._leases.pop(lease.row, None) is not lease:
            raise ValueError(f"row {lease.row} is closed twice")
        surplus, _ = self._hand_over(lease, tokens, committed) if self._radix else ([], [])
        self._unlock(lease)
        self._allocator.give(surplus + lease.own)
        self.table.clear(lease.row)
        self._rows.append(lease.row)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """The copies that the next step begins with."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def next(self, tokens: Sequence[int], count: int, lease: Lease | None = None, salt: int = 0) -> Next | None:
        """The `count` pages of `tokens` after those cached under `salt` (of a running request: after its lease's).

        None when `tokens` end before the token after those pages, or without `radix`. Two requests with equal results
        would compute the same pages.
        """
        if not self._radix:
            return None
        path = self._tree.match(tokens, salt) if lease is None else lease.locked
        begin = len(path) * self.page_size
        end = begin + count * self.page_size
        if len(tokens) <= end:
            return None
        return Next(path[-1] if path else salt, len(path), tuple(tokens[begin : end + 1]))

    def _hand_over(self, lease: Lease, tokens: Sequence[int], committed: int) -> tuple[list[int], list[int]]:
        """Turn full own pages into locked tree pages; returns surplus pages, and the indices where the page changed."""
        first = len(lease.locked)
        count = min(committed, len(tokens) - 1) // self.page_size - first
        if count < 1:
            return [], []
        nodes = self._tree.insert(tokens, lease.own[:count], lease.locked, lease.salt)
        self._tree.lock(nodes)
        swapped = [at for at, node in enumerate(nodes) if node.page != lease.own[at]]
        surplus = [lease.own[at] for at in swapped]
        lease.locked += nodes
        del lease.own[:count]
        return surplus, [first + at for at in swapped]

    def _shared_cells(self, lease: Lease, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The page that has most cells of the lease's first own page already, and how many, if any.

        It is a page of the tree, which is locked here, or one that a running request is still filling.
        """
        nearest = self._tree.nearest(tokens, lease.locked, lease.salt)
        page, cells = (nearest[0].page, nearest[1]) if nearest else (0, 0)
        begin = len(lease.locked) * self.page_size
        rest = tuple(tokens[begin : begin + self.page_size + 1])
        last = lease.locked[-1:]
        for other in self._leases.values():
            if other.own and other.salt == lease.salt and other.locked[-1:] == last:
                tail = tuple(other.tokens[begin : min(begin + self.page_size, other.committed) + 1])
                shared = common(tail, rest) - 1
                if shared > cells:
                    page, cells, nearest = other.own[0], shared, None
        if nearest is not None:
            lease.source = nearest[0]
            self._tree.lock([lease.source])
        return (page, cells) if cells else None

    def _unlock(self, lease: Lease) -> None:
        self._release_source(lease)
        self._tree.unlock(lease.locked)

    def _release_source(self, lease: Lease) -> None:
        if lease.source is not None:
            self._tree.unlock([lease.source])
            lease.source = None

    def check(self) -> None:
        """Every page has exactly one owner, is locked by those who read it, and lies where the page table says.

        Raises:
            AssertionError: pages are lost or owned twice, or a lock or an entry is wrong.
        """
        self._tree.check()
        own = [page for lease in self._leases.values() for page in lease.own]
        tree = {node.page: node for node in self._tree.nodes()}
        assert len(tree) == self._tree.pages, "the tree has a page twice"
        assert len(set(own) | tree.keys()) == len(own) + len(tree), "a page has two owners"
        assert len(own) + len(tree) + self.free == self.total, "a page has no owner"
        locks: Counter[Node] = Counter()
        for lease in self._leases.values():
            locks.update(lease.locked if lease.source is None else [*lease.locked, lease.source])
            parents = [self._tree.root(lease.salt), *lease.locked]
            assert all(node.parent is before for node, before in zip(lease.locked, parents, strict=False)), "no path"
            pages = [node.page for node in lease.locked] + lease.own
            assert self.table.held[lease.row, : len(pages)].tolist() == pages, f"row {lease.row} has other pages"
        for node in tree.values():
            assert node.locks == locks.pop(node, 0), f"page {node.page} has {node.locks} locks"
        assert not locks, "a request reads pages that are not in the tree"
