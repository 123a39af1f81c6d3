"""An engine on paper: it runs requests on a `KVCache` as a scheduler does, and notes for each slot of both kinds of
pool which tokens its cell was computed from, as if steps wrote, copied and moved cells.

A cell depends on all tokens up to the one after its own (the EAGLE shift), and on the salt. After each step the slots
of pages that nobody owns are poisoned: no request may ever read them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cluster.batch import PageCopy
from cluster.kv.cache import KVCache, Lease
from cluster.kv.page_table import PageTable
from cluster.kv.pool_sizes import WindowNeeds
from cluster.kv.window_map import WindowMap
from cluster.kv.window_pages import WindowPages

REACH, WRITTEN, DEPTH = 7, 6, 3
"""Rows of window layers see at most `REACH` committed tokens. A step writes `WRITTEN` tree nodes of a request, of which
at most `DEPTH` + 1 are on the accepted path.
"""
MAX_TOKENS = 60
Cell = tuple[int, tuple[int, ...]]
REFUSED: Cell = (-1, ())
"""What a node holds that was not accepted."""


@dataclass
class RunningRequest:
    """A running request: its lease, its tokens so far, how many of them are in the pools, and the most it may have."""

    lease: Lease
    tokens: list[int]
    committed: int
    most: int

    @property
    def prompt_left(self) -> int:
        """How many tokens must be read before the next one can be drawn."""
        return len(self.tokens) - self.committed - (self.committed > 0 and len(self.tokens) - self.committed == 1)


@dataclass
class Counts:
    """What has happened so far."""

    steps: int = 0
    reused_pages: int = 0
    copies: int = 0
    retractions: int = 0
    refused_nodes: int = 0


class PaperEngine:
    """See the module's docstring."""

    def __init__(self, pages: int, page_size: int, window_pages: int | None, rows: int = 4, radix: bool = True) -> None:
        """`window_pages` is the number of pages of window pools; None: there are none."""
        self.page_size, device = page_size, torch.device("cpu")
        window_map = None if window_pages is None else WindowMap(pages, page_size, device)
        table = PageTable(rows, MAX_TOKENS + 2 * WRITTEN, page_size, device, window_map)
        self.window: WindowPages | None = None
        if window_pages is not None and window_map is not None:
            request_pages = -(-(REACH + WRITTEN) // page_size) + 2
            needs = WindowNeeds(REACH, WRITTEN, request_pages, -(-WRITTEN // page_size), rows)
            self.window = WindowPages(needs, min(pages, max(needs.least_pages, window_pages)), window_map)
        self.cache = KVCache(pages, table, radix, self.window)
        self.running: list[RunningRequest] = []
        self.waiting: list[tuple[list[int], int, int]] = []
        self.cells: dict[int, Cell] = {}
        self.window_cells: dict[int, Cell] = {}
        self.counts = Counts()
        self._copies: list[PageCopy] = []

    def start(self, tokens: Sequence[int], salt: int, most: int) -> bool:
        """Open a request with these tokens. Return whether there was room."""
        lease = self.cache.open(tokens, len(tokens) + 1, salt=salt, most_tokens=most)
        if lease is None:
            return False
        self.counts.reused_pages += len(lease.locked_nodes)
        self._copies += self.cache.take_copies()
        self.running.append(RunningRequest(lease, list(tokens), lease.cached_tokens, most))
        return True

    def resume(self) -> bool:
        """Open the request that has waited longest since it was retracted. Return whether there was room."""
        tokens, salt, most = self.waiting[0]
        if not self.start(tokens, salt, most):
            return False
        del self.waiting[0]
        return True

    def step(self, numbers: Sequence[int], rows: int, accepted: Sequence[int], new_tokens: Sequence[int]) -> None:
        """Run a step with the running requests at `numbers`: each reads up to `rows` prompt tokens, or decodes and
        accepts `accepted[i]` nodes. The tokens drawn are taken from `new_tokens` in turn. A request without room is
        retracted.
        """
        self.counts.steps += 1
        draw = iter([*new_tokens] * (len(numbers) * (DEPTH + 2)))
        for request in self.running:
            self.cache.publish(request.lease, request.tokens, request.committed)
        chosen = [self.running[number] for number in dict.fromkeys(numbers)]
        planned = [(request, self._plan(request, rows)) for request in chosen]
        planned = [(request, stop) for request, stop in planned if stop is not None and request in self.running]
        self._run_copies()
        for (request, stop), count in zip(planned, accepted, strict=False):
            if request.prompt_left:
                self._read(request, stop)
                if request.committed == len(request.tokens):
                    request.tokens.append(next(draw))
                    self._write(request, request.committed - 1, request.committed)
            else:
                self._decode(request, 1 + min(count, DEPTH, request.most - len(request.tokens)), draw)
        self._poison()

    def end(self, number: int, retract: bool = False) -> None:
        """End the running request at `number`. If `retract`, it waits to be opened again."""
        request = self.running.pop(number)
        salt = request.lease.salt
        self.cache.close(request.lease, request.tokens, request.committed)
        if retract:
            self.counts.retractions += 1
            self.waiting.append((request.tokens, salt, request.most))
        self._poison()

    def check(self) -> None:
        """Check the ledgers, and that all running requests would read the cells of their own tokens."""
        self.cache.check()
        pending = {copy.target for copy in self._copies}
        for request in self.running:
            lease, committed = request.lease, request.committed
            if lease.own_pages and lease.own_pages[0] in pending:
                committed = min(committed, len(lease.locked_nodes) * self.page_size)
            for index in range(committed):
                assert self.cells.get(self._slot(lease, index)) == self._cell(request, index), f"cell of token {index}"
            if self.window is not None:
                for index in range(max(0, committed - REACH), committed):
                    held = self.window_cells.get(self._window_slot(lease, index))
                    assert held == self._cell(request, index), f"cell of token {index} in a window pool"

    def _plan(self, request: RunningRequest, rows: int) -> int | None:
        """Return the number after the last token that the request will compute, once it has room; None if it was
        retracted for lack of room.
        """
        is_prompt = request.prompt_left > 0
        stop = request.committed + (min(rows, request.prompt_left) if is_prompt else WRITTEN)
        if not self.cache.grow([request.lease], [max(stop, len(request.tokens) + 1)]):
            self.end(self.running.index(request), retract=True)
            return None
        self.cache.cover(request.lease, stop)
        return stop

    def _read(self, request: RunningRequest, stop: int) -> None:
        start, request.committed = request.committed, stop
        self._write(request, start, stop)

    def _decode(self, request: RunningRequest, count: int, draw: Iterator[int]) -> None:
        for offset in range(WRITTEN):
            self._set(request.lease, request.committed + offset, REFUSED)
        start = request.committed
        request.tokens += [next(draw) for _ in range(count)]
        request.committed += count
        self.counts.refused_nodes += WRITTEN - count
        self._write(request, start, request.committed)

    def _write(self, request: RunningRequest, start: int, stop: int) -> None:
        for index in range(start, stop):
            self._set(request.lease, index, self._cell(request, index))

    def _set(self, lease: Lease, index: int, cell: Cell) -> None:
        self.cells[self._slot(lease, index)] = cell
        if self.window is not None:
            self.window_cells[self._window_slot(lease, index)] = cell

    def _cell(self, request: RunningRequest, index: int) -> Cell:
        return request.lease.salt, tuple(request.tokens[: index + 2])

    def _slot(self, lease: Lease, index: int) -> int:
        page, cell = divmod(index, self.page_size)
        return int(self.cache.table.host_pages[lease.row, page]) * self.page_size + cell

    def _window_slot(self, lease: Lease, index: int) -> int:
        assert self.window is not None
        page, cell = divmod(self._slot(lease, index), self.page_size)
        window_page = self.window.map.host_pages[page]
        assert window_page, f"token {index} has no window page"
        return window_page * self.page_size + cell

    def _run_copies(self) -> None:
        for copy in self._copies:
            for cell in range(copy.tokens):
                _copy(self.cells, copy.source * self.page_size + cell, copy.target * self.page_size + cell)
                if self.window is not None:
                    source, target = copy.window_source * self.page_size, copy.window_target * self.page_size
                    _copy(self.window_cells, source + cell, target + cell)
        self.counts.copies += len(self._copies)
        self._copies = []

    def _poison(self) -> None:
        """Forget the cells of pages that nobody owns, except those that the next step copies."""
        owned = {node.page for node in self.cache._tree.nodes()}
        owned |= {page for request in self.running for page in request.lease.own_pages}
        owned |= {copy.source for copy in self._copies}
        for slot in [slot for slot in self.cells if slot // self.page_size not in owned]:
            del self.cells[slot]
        if self.window is not None:
            window_owned = {self.window.map.host_pages[page] for page in owned}
            window_owned |= {copy.window_source for copy in self._copies}
            for slot in [slot for slot in self.window_cells if slot // self.page_size not in window_owned]:
                del self.window_cells[slot]


def _copy(cells: dict[int, Cell], source: int, target: int) -> None:
    if source in cells:
        cells[target] = cells[source]
    else:
        cells.pop(target, None)
