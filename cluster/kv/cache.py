"""Page ownership. A lease holds the pages of one running request: pages of the radix tree, and pages of its own.

    tokens   0 ..... full pages ..... | ..... committed ..... committed + W
    owner    tree pages, which the    | the lease's own pages
             lease locks              | (W: the slots of the next step's window)

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
from cluster.kv.radix import Key, Node, RadixTree, common_prefix_length
from cluster.kv.window_pages import WindowPages, WindowSpan


class NextPages(NamedTuple):
    """The pages that a request will compute next: their `parent` node in the radix tree (or the salt, if they are the
    first pages of the request), the index of the first of them in the request, and their tokens with the token after
    them. If two requests have equal values, these pages would be equal.
    """

    parent: Node | int
    first_index: int
    tokens: Key


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one running request, in token order: the tree pages of `locked_nodes`, then `own_pages`. `row` is
    the request's row of the page table.

    `cached_tokens` counts the tokens found in the cache when the lease was opened. `copy_source` is a node whose cells
    (a cell is the KV of one token) the next step copies into the first own page; the node is locked until then.
    `tokens` and `committed` are those of the last `publish`: the first `committed` tokens have their KV. A lease reads
    and shares only pages of its own `salt`. `span` says which pages have a page in the window pools, if there are any.
    """

    row: int
    locked_nodes: list[Node]
    own_pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    copy_source: Node | None = None
    tokens: Sequence[int] = ()
    committed: int = 0
    salt: int = 0
    span: WindowSpan = field(default_factory=WindowSpan)

    @property
    def page_count(self) -> int:
        """The number of pages that the request can read."""
        return len(self.locked_nodes) + len(self.own_pages)


class KVCache:
    """Pages, page table and radix tree of one rank. It holds indices only; the KV tensors are in the runners' pools."""

    def __init__(self, pages: int, table: PageTable, radix: bool, window: WindowPages | None = None) -> None:
        """Manage `pages` pages for at most `table.idle_row` requests. Each has one row of `table`; the last row,
        `idle_row`, is for padding. Without `radix`, requests share no pages. `window` are the pages of the window
        pools; None if there are no such pools.
        """
        self.window = window
        self.page_size, self.table = table.page_size, table
        self._allocator = PageAllocator(pages)
        self._tree = RadixTree(table.page_size)
        self._radix = radix
        self._rows = list(range(table.idle_row - 1, -1, -1))
        self._leases: dict[int, Lease] = {}
        self._copies: list[PageCopy] = []

    @property
    def total_pages(self) -> int:
        """All pages, without the sink page."""
        return self._allocator.count

    @property
    def free_pages(self) -> int:
        """Pages with no owner."""
        return self._allocator.free_count

    @property
    def evictable_pages(self) -> int:
        """Pages in the tree that no lease locks; eviction can free them."""
        return self._tree.evictable

    @property
    def used_pages(self) -> int:
        """Pages that running requests lock or own."""
        return self.total_pages - self.free_pages - self.evictable_pages

    @property
    def free_rows(self) -> int:
        """Unused rows of the page table: the number of requests that could still be admitted."""
        return len(self._rows)

    def pages_for(self, tokens: int) -> int:
        """The number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def max_cached_tokens(self, tokens: Sequence[int], salt: int = 0, max_tokens: int | None = None) -> int:
        """Return an upper bound of the tokens that `open` would find cached, at most `max_tokens`.

        The bound is the tokens of the matching whole pages plus `page_size` - 1, because `open` may have the KV of up
        to that many tokens of the next page copied.
        """
        if not self._radix:
            return 0
        cached_tokens = min(len(self._match(tokens, salt)) * self.page_size + self.page_size, len(tokens)) - 1
        return cached_tokens if max_tokens is None else min(cached_tokens, max_tokens)

    def open(
        self,
        tokens: Sequence[int],
        needed_tokens: int,
        reserved_pages: int = 0,
        salt: int = 0,
        max_cached_tokens: int | None = None,
        most_tokens: int | None = None,
    ) -> Lease | None:
        """Return a lease for a request with the known `tokens`, with pages for its first `needed_tokens` tokens.

        Locks the longest prefix cached under `salt`, as far as window pools keep what the next row sees, and
        takes pages for the rest. At least one token is left to compute. If another page already holds the KV of
        the first tokens of the first new page, the next step copies this KV, unless the other page must be
        evicted to make room for the request. If `max_cached_tokens` is given, at most that many cached tokens
        are used, in whole pages, and no KV is copied. The request never has more than `most_tokens` tokens (None: any
        number), so window pools keep no more pages for it.

        Returns None, and changes no page, if no row of the page table is unused, if there are too few pages, or if
        fewer than `reserved_pages` pages would stay free or evictable.
        """
        if not self._rows or reserved_pages >= self.free_pages + self.evictable_pages:
            return None
        if self.window is not None and not self.window.can_admit(most_tokens):
            return None
        path = self._match(tokens, salt, max_cached_tokens)
        self._tree.lock(path)
        lease = Lease(self._rows[-1], path, cached_tokens=len(path) * self.page_size, salt=salt)
        copy = self._shared_cells(lease, tokens) if self._radix and max_cached_tokens is None else None
        new_pages = self.pages_for(needed_tokens) - len(path)
        if new_pages + reserved_pages > self.free_pages + self.evictable_pages and lease.copy_source is not None:
            # Without the copy its source is not locked, and one more page can be evicted for this request.
            self._release_source(lease)
            copy = None
        if new_pages + reserved_pages > self.free_pages + self.evictable_pages or not self.grow(
            [lease], [needed_tokens]
        ):
            self._unlock(lease)
            return None
        self._rows.pop()
        self._leases[lease.row] = lease
        self.table.write([lease.row] * len(path), range(len(path)), [node.page for node in path])
        if self.window is not None:
            self.window.admit(lease.span, path, lease.cached_tokens, most_tokens)
        if copy is not None:
            page, cells = copy
            self._copies.append(self._page_copy(lease, page, cells))
            lease.cached_tokens += cells
        return lease

    def cover(self, lease: Lease, tokens: int) -> None:
        """Give a lease pages in the window pools, if there are any, for the tokens up to number `tokens` - 1 that are
        not computed yet. The lease must have pages for them.
        """
        if self.window is not None:
            first = lease.span.stop - len(lease.locked_nodes)
            self.window.cover(lease.span, lease.own_pages[first:], self.pages_for(tokens))

    def grow(self, leases: Sequence[Lease], needed_tokens: Sequence[int]) -> bool:
        """Give each lease i pages for its first `needed_tokens[i]` tokens, and evict cached pages if needed.

        Returns False and changes nothing if free and evictable pages do not suffice for all leases.
        """
        new_pages = [
            max(0, self.pages_for(needed) - lease.page_count)
            for lease, needed in zip(leases, needed_tokens, strict=True)
        ]
        total_new_pages = sum(new_pages)
        if total_new_pages == 0:
            return True
        if total_new_pages > self.free_pages + self._tree.evictable:
            return False
        if total_new_pages > self.free_pages:
            evicted = self._tree.evict(total_new_pages - self.free_pages)
            if self.window is not None:
                for node in evicted:
                    self.window.drop(node)
            self._allocator.release([node.page for node in evicted])
        pages = self._allocator.allocate(total_new_pages)
        rows: list[int] = []
        indices: list[int] = []
        start = 0
        for lease, page_count in zip(leases, new_pages, strict=True):
            rows += [lease.row] * page_count
            indices += range(lease.page_count, lease.page_count + page_count)
            lease.own_pages += pages[start : start + page_count]
            start += page_count
        self.table.write(rows, indices, pages)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], committed: int) -> None:
        """Move full pages of the lease into the tree. A page is full if all its tokens are among the first `committed`
        of `tokens`. The scheduler calls this for each running request before it plans a step.

        A page enters the tree only when `tokens` also has the token after the page, which is part of the page's key.
        Pages that no later row sees are given up in the window pools.
        """
        if self._radix:
            self._publish(lease, tokens, committed)
        if self.window is not None:
            self.window.advance(lease.span, lease.locked_nodes, lease.own_pages, committed)

    def _publish(self, lease: Lease, tokens: Sequence[int], committed: int) -> None:
        self._release_source(lease)
        lease.tokens, lease.committed = tokens, committed
        if min(committed, len(tokens) - 1) < (len(lease.locked_nodes) + 1) * self.page_size:  # no further page is full
            return
        duplicate_pages, replaced_indices = self._move_to_tree(lease, tokens, committed)
        self._allocator.release(duplicate_pages)
        self.table.write(
            [lease.row] * len(replaced_indices),
            replaced_indices,
            [lease.locked_nodes[index].page for index in replaced_indices],
        )

    def close(self, lease: Lease, tokens: Sequence[int], committed: int) -> None:
        """End a lease. Full pages of the first `committed` tokens go to the tree as in `publish`; other own pages are
        freed.

        Raises:
            ValueError: the lease is already closed.
        """
        if self._leases.pop(lease.row, None) is not lease:
            raise ValueError(f"row {lease.row} is closed twice")
        duplicate_pages, _ = self._move_to_tree(lease, tokens, committed) if self._radix else ([], [])
        if self.window is not None:
            self.window.close(lease.span, lease.locked_nodes, lease.own_pages)
        self._unlock(lease)
        self._allocator.release(duplicate_pages + lease.own_pages)
        self.table.clear(lease.row)
        self._rows.append(lease.row)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return, and forget, the page copies that the next step must begin with."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def next_pages(
        self, tokens: Sequence[int], page_count: int, lease: Lease | None = None, salt: int = 0
    ) -> NextPages | None:
        """Describe the next `page_count` pages of `tokens`. They come after the locked pages of `lease` or, without a
        `lease`, after the longest prefix that is cached under `salt`. No page is allocated.

        Returns None without `radix`, or if `tokens` ends before the token that follows these pages. If the values
        returned for two requests are equal, both would compute the same pages, so the scheduler lets one of them wait.
        """
        if not self._radix:
            return None
        path = self._match(tokens, salt) if lease is None else lease.locked_nodes
        start = len(path) * self.page_size
        end = start + page_count * self.page_size
        if len(tokens) <= end:
            return None
        return NextPages(path[-1] if path else salt, len(path), tuple(tokens[start : end + 1]))

    def _move_to_tree(self, lease: Lease, tokens: Sequence[int], committed: int) -> tuple[list[int], list[int]]:
        """Turn full own pages into locked tree pages.

        Returns the own pages that the tree did not take because it had equal pages, and their indices in the page
        table. At these indices the caller must write the tree's pages.
        """
        first_own_index = len(lease.locked_nodes)
        count = min(committed, len(tokens) - 1) // self.page_size - first_own_index
        if count < 1:
            return [], []
        nodes = self._tree.insert(tokens, lease.own_pages[:count], lease.locked_nodes, lease.salt)
        self._tree.lock(nodes)
        if self.window is not None:
            for offset, node in enumerate(nodes):
                self.window.move_to_tree(lease.span, first_own_index + offset, lease.own_pages[offset], node)
        replaced = [offset for offset, node in enumerate(nodes) if node.page != lease.own_pages[offset]]
        duplicate_pages = [lease.own_pages[offset] for offset in replaced]
        lease.locked_nodes += nodes
        del lease.own_pages[:count]
        return duplicate_pages, [first_own_index + offset for offset in replaced]

    def _shared_cells(self, lease: Lease, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the page that already holds the most cells (a cell is the KV of one token) of the lease's first own
        page, and the number of these cells. Return None if no page holds any of them.

        A page of the tree is locked here, as the lease's `copy_source`. An own page of a running request needs no lock:
        if that request ends, the copy still runs first, at the start of the next step.
        """
        nearest = self._tree.nearest(tokens, lease.locked_nodes, lease.salt)
        page, cells = (nearest[0].page, nearest[1]) if nearest else (0, 0)
        start = len(lease.locked_nodes) * self.page_size
        page_tokens = tuple(tokens[start : start + self.page_size + 1])
        last_locked = lease.locked_nodes[-1:]
        for other in self._leases.values():
            if other.own_pages and other.salt == lease.salt and other.locked_nodes[-1:] == last_locked:
                # Cell p depends on token p + 1 too (the EAGLE shift), so n common tokens are n - 1 equal cells.
                other_tokens = tuple(other.tokens[start : min(start + self.page_size, other.committed) + 1])
                shared = common_prefix_length(other_tokens, page_tokens) - 1
                if shared > cells:
                    page, cells, nearest = other.own_pages[0], shared, None
        if self.window is not None and cells and not self.window.map.host_pages[page]:
            return None
        if nearest is not None:
            lease.copy_source = nearest[0]
            self._tree.lock([lease.copy_source])
        return (page, cells) if cells else None

    def _match(self, tokens: Sequence[int], salt: int, max_tokens: int | None = None) -> list[Node]:
        """Return the nodes of the longest prefix of `tokens` that is cached under `salt` and that a request can reuse:
        at most `max_tokens` tokens, and only as far as window pools keep what the next row sees.
        """
        path = self._tree.match(tokens, salt) if self._radix else []
        path = path if max_tokens is None else path[: max_tokens // self.page_size]
        return path if self.window is None else self.window.usable(path)

    def _page_copy(self, lease: Lease, page: int, cells: int) -> PageCopy:
        """Return the copy of the first `cells` slots of `page` to the first own page of a lease."""
        if self.window is None:
            return PageCopy(page, lease.own_pages[0], cells)
        pages = self.window.map.host_pages
        # `cover` may give the lease this very window page. What it holds stays there until the copy is made.
        window_source = pages[page]
        self.cover(lease, len(lease.locked_nodes) * self.page_size + cells)
        return PageCopy(page, lease.own_pages[0], cells, window_source, pages[lease.own_pages[0]])

    def _unlock(self, lease: Lease) -> None:
        self._release_source(lease)
        self._tree.unlock(lease.locked_nodes)

    def _release_source(self, lease: Lease) -> None:
        if lease.copy_source is not None:
            self._tree.unlock([lease.copy_source])
            lease.copy_source = None

    def check(self) -> None:
        """Check that every page is free, or in the tree, or owned by exactly one lease. Check also that each page of
        the tree has one lock for each lease that reads it or copies from it, and that the page table has the pages of
        every lease.

        Raises:
            AssertionError: a page is lost or owned twice, or a lock or a page table entry is wrong.
        """
        self._tree.check()
        own_pages = [page for lease in self._leases.values() for page in lease.own_pages]
        tree_nodes = {node.page: node for node in self._tree.nodes()}
        assert len(tree_nodes) == self._tree.pages, "the tree has a page twice"
        assert len(set(own_pages) | tree_nodes.keys()) == len(own_pages) + len(tree_nodes), "a page has two owners"
        assert len(own_pages) + len(tree_nodes) + self.free_pages == self.total_pages, "a page has no owner"
        expected_locks: Counter[Node] = Counter()
        for lease in self._leases.values():
            expected_locks.update(
                lease.locked_nodes if lease.copy_source is None else [*lease.locked_nodes, lease.copy_source]
            )
            expected_parents = [self._tree.root(lease.salt), *lease.locked_nodes]
            assert all(
                node.parent is expected_parent
                for node, expected_parent in zip(lease.locked_nodes, expected_parents, strict=False)
            ), "no path"
            pages = [node.page for node in lease.locked_nodes] + lease.own_pages
            assert self.table.host_pages[lease.row, : len(pages)].tolist() == pages, f"row {lease.row} has other pages"
        for node in tree_nodes.values():
            assert node.locks == expected_locks.pop(node, 0), f"page {node.page} has {node.locks} locks"
        assert not expected_locks, "a request reads pages that are not in the tree"
        if self.window is not None:
            spans = [(lease.span, lease.locked_nodes, lease.own_pages) for lease in self._leases.values()]
            self.window.check(spans, list(tree_nodes.values()))
