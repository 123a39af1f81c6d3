"""Page ownership: the lease of each running request on pages of the radix tree and on pages of its own.

    tokens   0 ........ full pages ........ | ..... committed ........ committed + W
    owner    | tree pages, locked by the lease | the lease's own pages (window at the end) |

A lease owns a page while the page fills. When all tokens of the page are committed and the token after them is known,
`publish` moves the page into the tree, while the request still runs. From then on other requests can read the page, and
the lease keeps it locked. If the tree already has a page with the same tokens, the request switches to that page and
frees its own.

Every page is free, in the tree, or owned by exactly one lease; `check` verifies this.
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
    """The pages that a request will compute next: the node before them (or the salt, if no node is before them), the
    index of the first page, and the tokens of the pages plus the token after them. Two equal values mean that the pages
    would be equal.
    """

    after: Node | int
    entry: int
    tokens: Key


@dataclass(slots=True, eq=False)
class Lease:
    """Pages of one running request, in token order: `len(locked)` tree pages, then `own` pages.

    `cached` counts the tokens found in the cache when the lease was opened. `source` is a node whose cells the next
    step copies into the first own page; the node is locked until then. The first `committed` of the request's `tokens`
    have their KV cells. A lease reads and shares only pages of its own `salt`.
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
        """The number of pages that the request can read."""
        return len(self.locked) + len(self.own)


class KVCache:
    """Pages, page table and radix tree of one rank. It holds indices only; the KV tensors are in the runners' pools."""

    def __init__(self, pages: int, table: PageTable, radix: bool) -> None:
        """Manage `pages` pages for at most `table.idle_row` requests. Without `radix`, requests share no pages."""
        self.page_size, self.table = table.page_size, table
        self._allocator = PageAllocator(pages)
        self._tree = RadixTree(table.page_size)
        self._radix = radix
        self._rows = list(range(table.idle_row - 1, -1, -1))
        self._leases: dict[int, Lease] = {}
        self._copies: list[PageCopy] = []

    @property
    def total(self) -> int:
        """All pages, without the sink page."""
        return self._allocator.count

    @property
    def free(self) -> int:
        """Pages with no owner."""
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Pages in the tree that no lease locks; eviction can free them."""
        return self._tree.evictable

    @property
    def used(self) -> int:
        """Pages that running requests lock or own."""
        return self.total - self.free - self.cached

    @property
    def free_rows(self) -> int:
        """Unused rows of the page table: the number of requests that could still be admitted."""
        return len(self._rows)

    def pages_for(self, tokens: int) -> int:
        """The number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def most_cached(self, tokens: Sequence[int], salt: int = 0, most: int | None = None) -> int:
        """Return an upper bound of the tokens that `open` would find cached, at most `most`.

        The bound is the tokens of the matching whole pages, plus all but one cell of the next page, which `open` may
        copy.
        """
        if not self._radix:
            return 0
        found = min(len(self._tree.match(tokens, salt)) * self.page_size + self.page_size, len(tokens)) - 1
        return found if most is None else min(found, most)

    def open(
        self, tokens: Sequence[int], reach: int, spare: int = 0, salt: int = 0, most: int | None = None
    ) -> Lease | None:
        """Return a lease for a request with the known `tokens`, with pages for its first `reach` tokens.

        Locks the longest prefix cached under `salt`, and takes pages for the rest. At least one token is left to
        compute. If another page already holds the first cells of the first new page, the next step copies these cells,
        unless the other page must be evicted. If `most` is given, at most `most` cached tokens are used, in whole
        pages, and no cells are copied.

        Returns None, and changes no page, if rows or pages are too few, or if fewer than `spare` pages would stay free
        or evictable.
        """
        if not self._rows or spare >= self.free + self.cached:
            return None
        path = self._tree.match(tokens, salt) if self._radix else []
        path = path if most is None else path[: most // self.page_size]
        self._tree.lock(path)
        lease = Lease(self._rows[-1], path, cached=len(path) * self.page_size, salt=salt)
        copy = self._shared_cells(lease, tokens) if self._radix and most is None else None
        wanted = self.pages_for(reach) - len(path)
        if wanted + spare > self.free + self.cached and lease.source is not None:
            # The lock on the source keeps one page from eviction. Give up the copy rather than the request.
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
        """Give each lease i pages for its first `reaches[i]` tokens, and evict cached pages if needed.

        Returns False and changes nothing if free and evictable pages do not suffice for all leases.
        """
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
        """Move the lease's full pages of the first `committed` tokens into the tree; called after each step.

        A page enters the tree only when the token after it is in `tokens`, since that token is part of its key.
        """
        if not self._radix:
            return
        self._release_source(lease)
        lease.tokens, lease.committed = tokens, committed
        if min(committed, len(tokens) - 1) < (len(lease.locked) + 1) * self.page_size:  # no further page is full
            return
        surplus, swapped = self._hand_over(lease, tokens, committed)
        self._allocator.give(surplus)
        self.table.write([lease.row] * len(swapped), swapped, [lease.locked[index].page for index in swapped])

    def close(self, lease: Lease, tokens: Sequence[int], committed: int) -> None:
        """End a lease. Full pages of the first `committed` tokens go to the tree as in `publish`; other own pages are
        freed.

        Raises:
            ValueError: the lease is already closed.
        """
        if self._leases.pop(lease.row, None) is not lease:
            raise ValueError(f"row {lease.row} is closed twice")
        surplus, _ = self._hand_over(lease, tokens, committed) if self._radix else ([], [])
        self._unlock(lease)
        self._allocator.give(surplus + lease.own)
        self.table.clear(lease.row)
        self._rows.append(lease.row)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return, and forget, the page copies that the next step must begin with."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def next(self, tokens: Sequence[int], count: int, lease: Lease | None = None, salt: int = 0) -> Next | None:
        """Return the `count` pages of `tokens` after the pages cached under `salt`, or after the locked pages of
        `lease`.

        Returns None without `radix`, or if `tokens` do not contain the token after the `count` pages. Two requests with
        equal results would compute the same pages, so the scheduler lets one of them wait.
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
        """Turn full own pages into locked tree pages.

        Returns the own pages that the tree did not take because it had equal pages, and their indices in the page
        table. At these indices the caller must write the tree's pages.
        """
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
        """Return the page that already holds most cells of the lease's first own page, and their number, or None
        without such a page.

        A page of the tree is locked here, as the lease's `source`. An own page of a running request needs no lock: if
        that request ends, the copy still runs before any later step writes to the page.
        """
        nearest = self._tree.nearest(tokens, lease.locked, lease.salt)
        page, cells = (nearest[0].page, nearest[1]) if nearest else (0, 0)
        begin = len(lease.locked) * self.page_size
        rest = tuple(tokens[begin : begin + self.page_size + 1])
        last = lease.locked[-1:]
        for other in self._leases.values():
            if other.own and other.salt == lease.salt and other.locked[-1:] == last:
                # Cell p depends on token p + 1 too (the EAGLE shift), so n common tokens are n - 1 equal cells.
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
        """Check that every page has exactly one owner, one lock for each lease that reads it, and the right page table
        entry.

        Raises:
            AssertionError: a page is lost or owned twice, or a lock or a page table entry is wrong.
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
