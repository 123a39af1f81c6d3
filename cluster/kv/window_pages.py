"""Which pages of the cache have a page in the window pools, and which requests need it.

Layers with a sliding window are in window pools, which have fewer pages than the other pools (`WindowMap`). A running
request has window pages for its pages `first` to `stop` - 1 (`WindowSpan`): from the first token that a later row may
still see, up to the last token that the next steps may write. It gives up the pages before these while it runs.

A page of the radix tree keeps its window page after requests have given it up, until another page needs it. Then the
cached prefix is still there, but a request can reuse it only up to a token before which the whole window is still kept
(`WindowPages.usable`). So window pages that are not at the end of a cached prefix are taken first: the end of a request
that has finished, or of a prefix that a request has reused.

Each running request reserves the most pages that it may need: those of a window, or of all its tokens if it is shorter.
So a window page is always found, and no request is ever retracted for lack of one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kv.pages import PageAllocator
from cluster.kv.pool_sizes import WindowNeeds
from cluster.kv.radix import Node
from cluster.kv.window_map import WindowMap


@dataclass(slots=True)
class WindowSpan:
    """The pages of a request that have a window page for it: numbers `first` to `stop` - 1 in token order. The first
    `reused` pages of the request are those of a cached prefix. It has reserved `reserved` window pages.
    """

    first: int = 0
    stop: int = 0
    reused: int = 0
    reserved: int = 0


class WindowPages:
    """The pages of the window pools of one rank. Page numbers of the cache are called pages, those of the window pools
    window pages.
    """

    def __init__(self, needs: WindowNeeds, count: int, window_map: WindowMap) -> None:
        """Manage `count` window pages, besides their sink page, for a cache with the pages of `window_map`."""
        self.needs, self.map = needs, window_map
        self._allocator = PageAllocator(count)
        self._reserved = 0  # by running requests
        # Unused nodes of the tree that have a window page, least recently used first: those at the ends of cached
        # prefixes, and the others.
        self._ends: OrderedDict[Node, None] = OrderedDict()
        self._others: OrderedDict[Node, None] = OrderedDict()

    @property
    def total(self) -> int:
        """All window pages, without the sink page."""
        return self._allocator.count

    @property
    def free(self) -> int:
        """Window pages that hold nothing."""
        return self._allocator.free_count

    @property
    def evictable(self) -> int:
        """Window pages of cached prefixes that no running request needs."""
        return len(self._ends) + len(self._others)

    @property
    def used(self) -> int:
        """Window pages that running requests need."""
        return self.total - self.free - self.evictable

    def can_admit(self, most_tokens: int | None) -> bool:
        """Return whether one more request may run that never has more than `most_tokens` tokens (None: any number)."""
        needs, page_size = self.needs, self.map.page_size
        # A page has at most one window page. So if there is one for each page, they cannot run out.
        is_plenty = self.total >= len(self.map.host_pages) - 1
        reserved = self._reserved + needs.reserved_pages(most_tokens, page_size)
        return is_plenty or reserved + needs.chunk_pages <= self.total

    def usable(self, path: list[Node]) -> list[Node]:
        """Return the longest beginning of `path` after which a request can go on: the window pages of all tokens that
        the next row sees are there.
        """
        pages, count = self.map.host_pages, len(path)
        while count:
            first = self.first_needed(count * self.map.page_size)
            gap = next((i for i in reversed(range(first, count)) if not pages[path[i].page]), None)
            if gap is None:
                break
            count = gap  # each longer beginning needs this page, too
        return path[:count]

    def first_needed(self, committed: int) -> int:
        """Return the number of the first page that rows may still see, if `committed` tokens are committed."""
        return max(0, committed - self.needs.reach) // self.map.page_size

    def admit(self, span: WindowSpan, path: Sequence[Node], committed: int, most_tokens: int | None) -> None:
        """Begin a request whose first pages are those of `path`; `committed` tokens of it are computed. For
        `most_tokens` see `can_admit`.
        """
        span.reserved = self.needs.reserved_pages(most_tokens, self.map.page_size)
        self._reserved += span.reserved
        span.first, span.stop, span.reused = self.first_needed(committed), len(path), len(path)
        for node in path[span.first :]:
            self._lock(node)

    def cover(self, span: WindowSpan, pages: Sequence[int], stop: int) -> None:
        """Give window pages to the pages of a request up to number `stop` - 1. `pages[i]` is its page `span.stop` + i.

        Raises:
            MemoryError: there are no more window pages. Running requests have reserved theirs, so this is a defect.
        """
        count = stop - span.stop
        if count < 1:
            return
        while self.free < count and self.evictable:
            node, _ = (self._others or self._ends).popitem(last=False)
            self._release(node.page)
        self.map.write(pages[:count], self._allocator.allocate(count))
        span.stop = stop

    def advance(self, span: WindowSpan, nodes: Sequence[Node], own_pages: Sequence[int], committed: int) -> None:
        """Give up the pages that no later row sees. The first pages of the request are those of `nodes`, in the tree;
        then come its `own_pages`.
        """
        first = min(self.first_needed(committed), span.stop)
        for number in range(span.first, first):
            if number < len(nodes):
                self._unlock(nodes[number], self._ends if number < span.reused else self._others)
            else:
                self._release(own_pages[number - len(nodes)])
        span.first = max(span.first, first)

    def move_to_tree(self, span: WindowSpan, number: int, own_page: int, node: Node) -> None:
        """The page with this `number` of a request is now that of `node` in the tree, which may be another page with
        the same tokens than `own_page`. Then the window page of one of the two is given up.
        """
        pages = self.map.host_pages
        if node.page != own_page and pages[own_page]:
            if pages[node.page]:
                self._release(own_page)
            else:
                self.map.write([node.page, own_page], [pages[own_page], 0])
        if span.first <= number < span.stop:
            self._lock(node)

    def close(self, span: WindowSpan, nodes: Sequence[Node], own_pages: Sequence[int]) -> None:
        """End a request. Its last pages in the tree are the end of a cached prefix."""
        self._reserved -= span.reserved
        for number in range(span.first, span.stop):
            if number < len(nodes):
                self._unlock(nodes[number], self._ends)
            else:
                self._release(own_pages[number - len(nodes)])

    def drop(self, node: Node) -> None:
        """A node that no request uses leaves the tree: free its window page, if it has one."""
        self._ends.pop(node, None)
        self._others.pop(node, None)
        self._release(node.page)

    def lend(self, pages: Sequence[int]) -> None:
        """Map `pages` of a trial request to all window pages in turn, also if others use them. Only for steps with
        made-up tokens, which run before the first request.
        """
        self.map.write(pages, [1 + index % self.total for index in range(len(pages))])

    def take_back(self, pages: Sequence[int]) -> None:
        """End a `lend`."""
        self.map.write(pages, [0] * len(pages))

    def check(self, spans: Sequence[tuple[WindowSpan, Sequence[Node], Sequence[int]]], nodes: Sequence[Node]) -> None:
        """Check that each window page is free or belongs to one page, that requests have those that they need, and that
        nodes have one lock for each request. `spans` are those of all running requests, with their nodes and own pages;
        `nodes` are all nodes of the tree.

        Raises:
            AssertionError: they do not.
        """
        pages, locks, owners = self.map.host_pages, dict.fromkeys(nodes, 0), {node.page for node in nodes}
        for span, own_nodes, own_pages in spans:
            for number in range(span.first, span.stop):
                in_tree = number < len(own_nodes)
                page = own_nodes[number].page if in_tree else own_pages[number - len(own_nodes)]
                assert pages[page], f"page {page} has no window page"
                owners.add(page)
                if in_tree:
                    locks[own_nodes[number]] += 1
        used = [window_page for window_page in pages if window_page]
        assert len(used) == len(set(used)), "a window page belongs to two pages"
        assert len(used) + self.free == self.total, "a window page is lost"
        assert all(page in owners for page, window_page in enumerate(pages) if window_page), "a free page has one"
        for node, count in locks.items():
            is_listed = node in self._ends or node in self._others
            assert node.window_locks == count, f"page {node.page} has {node.window_locks} window locks, not {count}"
            assert is_listed == (count == 0 and pages[node.page] > 0), f"page {node.page} is listed wrongly"
        assert self._reserved == sum(span.reserved for span, *_ in spans), "reservations are miscounted"

    def _lock(self, node: Node) -> None:
        if not node.window_locks:
            self._ends.pop(node, None)
            self._others.pop(node, None)
        node.window_locks += 1

    def _unlock(self, node: Node, unused: OrderedDict[Node, None]) -> None:
        node.window_locks -= 1
        if not node.window_locks:
            unused[node] = None

    def _release(self, page: int) -> None:
        window_page = self.map.host_pages[page]
        if window_page:
            self.map.write([page], [0])
            self._allocator.release([window_page])
