"""Who owns which page: a request's lease on cached prefix pages and on pages of its own.

    tokens   0 ........ cached ........ committed ........ committed + W
    owner    | tree (locked) | the lease's own pages (window at the end) |

Every page is free, in the tree, or owned by exactly one lease; `check` says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cluster.kv.pages import PageAllocator
from cluster.kv.radix import Node, RadixTree
from cluster.kv.slots import SlotTable


@dataclass(slots=True, eq=False)
class Lease:
    """Pages of one running request, in token order: `len(locked)` tree pages, then `own` pages."""

    row: int
    locked: list[Node]
    own: list[int] = field(default_factory=list)

    @property
    def pages(self) -> int:
        """Pages readable by the request."""
        return len(self.locked) + len(self.own)


class KVCache:
    """Pages, slot table and radix tree of one rank. Indices only: the tensors are the runners' pools."""

    def __init__(
        self, pages: int, page_size: int, rows: int, row_tokens: int, radix: bool, device: torch.device
    ) -> None:
        """`rows` running requests of at most `row_tokens` tokens, window included, share `pages` pages."""
        self.page_size = page_size
        self.table = SlotTable(rows, row_tokens, page_size, device)
        self._allocator = PageAllocator(pages)
        self._tree = RadixTree(page_size)
        self._radix = radix
        self._rows = list(range(rows - 1, -1, -1))
        self._leases: dict[int, Lease] = {}

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

    def open(self, tokens: Sequence[int], reach: int) -> Lease | None:
        """A lease for a request whose known tokens are `tokens` and which will write up to index `reach`.

        Locks the longest cached prefix (which leaves at least one token to compute) and takes pages for the rest.
        None when rows or pages do not suffice; nothing is changed then.
        """
        if not self._rows:
            return None
        path = self._tree.match(tokens) if self._radix else []
        self._tree.lock(path)
        lease = Lease(self._rows[-1], path)
        if not self.grow([lease], [reach]):
            self._tree.unlock(path)
            return None
        self._rows.pop()
        self._leases[lease.row] = lease
        self.table.write([lease.row] * len(path), range(len(path)), [node.page for node in path])
        return lease

    def cached_tokens(self, lease: Lease) -> int:
        """Tokens of the request's prefix that were in the tree when it was opened."""
        return len(lease.locked) * self.page_size

    def grow(self, leases: Sequence[Lease], reaches: Sequence[int]) -> bool:
        """Give every lease pages up to index `reaches[i]`, evicting cached pages if need be; all or nothing."""
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

    def close(self, lease: Lease, tokens: Sequence[int], committed: int) -> None:
        """End a lease: full pages of the first `committed` tokens go to the tree, the rest is free.

        A page enters the tree only when the token after it is in `tokens`.
        """
        if self._leases.pop(lease.row, None) is not lease:
            raise ValueError(f"row {lease.row} is closed twice")
        pages = [node.page for node in lease.locked] + lease.own
        surplus = lease.own
        if self._radix:
            keep = min(committed // self.page_size, (len(tokens) - 1) // self.page_size)
            left = self._tree.insert(tokens[: keep * self.page_size + 1], pages[:keep])
            surplus = [page for page in left if page in set(lease.own)] + pages[max(keep, len(lease.locked)) :]
        self._tree.unlock(lease.locked)
        self._allocator.give(surplus)
        self.table.clear(lease.row)
        self._rows.append(lease.row)

    def check(self) -> None:
        """Every page has exactly one owner.

        Raises:
            AssertionError: pages are lost or owned twice.
        """
        own = [page for lease in self._leases.values() for page in lease.own]
        tree, stack = [], list(self._tree.root.children.values())
        while stack:
            node = stack.pop()
            tree.append(node.page)
            stack.extend(node.children.values())
        assert len(set(own + tree)) == len(own) + len(tree), "a page has two owners"
        assert len(own) + len(tree) + self.free == self.total, "a page has no owner"
        assert len(tree) == self._tree.pages, "the tree miscounts its pages"
