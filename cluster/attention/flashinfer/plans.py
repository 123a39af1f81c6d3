"""What FlashInfer is planned for: of each step the forwards that the last one made, before it runs.

Its kernels take lengths from the plan, not from the device: those of family fa3, and all that read latents. So a plan
never has a bound for a length. Of a tree it has the tokens that are committed for certain (`HostBounds.least`), and
what a step under way has committed since is left to the program that reads the window anyway. A text's are known.

A program that is repeated holds what its wrapper launched with, so it has wrappers for graphs, with buffers that stay;
before each run the host plans them anew, and compares (`Repeated`). Texts, whose number is no part of a program's key,
have none: in such a program Triton attends them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.attention.flashinfer.readers import AttentionWork, CellReader, GraphBuffers
from cluster.batch import HostBounds, PromptRows, TreeRows
from cluster.capture.recorder import ahead, repeats
from cluster.device.transfers import brought
from cluster.kernels.attend import gpu
from cluster.kernels.launch import launch
from cluster.kv.page_table import PageTable

LISTING = 128  # pages of a request, for one program
KEPT = 16


class ForwardKey(NamedTuple):
    """A kind of forward: trees of `each` rows a request, or with 0 the texts, seen back to `window` tokens before; in
    programs that are repeated, of so many `requests`.
    """

    each: int
    window: int = -1
    requests: int = 0


@dataclass(slots=True)
class WrapperPlan:
    """Work that a `wrapper` is planned for, in step `step`, of `requests` with `rows` rows in all, the longest of which
    has `pages` at most. The requests' pages are to be `listed` by `starts`; the first `until` `[n]` tokens are read.
    All three are int32 on the device, and stay where they are if the wrapper has `buffers`.
    """

    wrapper: Any
    step: int
    buffers: GraphBuffers | None = None
    requests: int = 0
    rows: int = 0
    pages: int = 0
    listed: Tensor | None = None
    starts: Tensor | None = None
    until: Tensor | None = None


class RunnerPlans:
    """The plans of one runner. There are two sets of wrappers, which take turns from step to step: while a step is
    under way, its plan may be on its way to the device, out of memory that the wrapper's next plan is written to.
    """

    def __init__(self, reader: CellReader, table: PageTable) -> None:
        self.reader = reader
        self._table, self._bounds, self._step = table, HostBounds(), 0
        self._sets: tuple[dict[ForwardKey, WrapperPlan], dict[ForwardKey, WrapperPlan]] = ({}, {})
        self._stay: tuple[dict[ForwardKey, WrapperPlan], dict[ForwardKey, WrapperPlan]] = ({}, {})
        self._asked: list[ForwardKey] = []

    def begin(self, bounds: HostBounds) -> None:
        """A step within these bounds begins; it probably asks for what the last one asked for."""
        self._step, self._bounds = self._step + 1, bounds
        asked, self._asked = self._asked, []
        for key in asked:
            self._planned(key)

    def tree(self, tree: TreeRows) -> WrapperPlan | None:
        """What reads the tokens that are committed for certain; None where none are known, or nobody decodes."""
        requests, each = tree.rows.shape[0], tree.bits.shape[1]
        if not requests or requests != len(self._bounds.least):
            return None
        plan = self._repeated(ForwardKey(each, requests=requests)) if repeats() else self._asked_for(ForwardKey(each))
        if plan is not None:
            self._list(plan, tree.rows)
        return plan

    def text(self, text: PromptRows, window: int) -> WrapperPlan | None:
        """What reads these texts, whose layers have a sliding window if `window` is not 0; None where the step was not
        announced, or is repeated.
        """
        plan = None if repeats() else self._asked_for(ForwardKey(0, window - 1))
        if plan is not None:
            self._list(plan, text.rows)
        return plan

    def _asked_for(self, key: ForwardKey) -> WrapperPlan | None:
        if key not in self._asked:
            self._asked.append(key)
        return self._planned(key)

    @torch.inference_mode()  # wrappers write to what they made in an earlier call
    def _planned(self, key: ForwardKey) -> WrapperPlan | None:
        held = self._sets[self._bounds.turn]
        plan = held.get(key)
        if plan is not None and plan.step == self._step:
            return plan
        chunks, least = self._bounds.chunks, self._bounds.least
        rows = [key.each] * len(least) if key.each else [stop - start for start, stop in chunks]
        lens = least if key.each else [stop for _, stop in chunks]
        if not any(lens) or not self.reader.fits(sum(rows)):
            return None
        if plan is None:
            unused = [old for old, other in held.items() if other.step < self._step]
            for old in unused[: max(0, len(held) + 1 - KEPT)]:
                del held[old]
            plan = held[key] = WrapperPlan(self.reader.wrapper(), self._step)
        self._plan(plan, key, rows, lens)
        return plan

    @torch.inference_mode()
    def _repeated(self, key: ForwardKey) -> WrapperPlan | None:
        """The plan of a program that is repeated, made in this step, before the program is recorded."""
        if not self.reader.fits(key.each * key.requests):
            return None
        held = self._stay[self._bounds.turn]
        if key not in held:
            longest, device = self._table.device_pages.shape[1], self._table.device_pages.device
            buffers = GraphBuffers.of(key.requests, longest, device)
            held[key] = plan = WrapperPlan(self.reader.wrapper(buffers), 0, buffers, pages=longest)
            plan.listed, plan.starts = buffers.listed, buffers.starts
            plan.until = torch.zeros(key.requests, dtype=torch.int32, device=device)
        ahead(Repeated(self, key, self._bounds.turn))
        return held[key]

    @torch.inference_mode()
    def again(self, key: ForwardKey, turn: int) -> dict[str, Any] | None:
        """Plan for the step at hand what programs repeat; what that launches with, None if the step is another's."""
        least = self._bounds.least
        if turn != self._bounds.turn or len(least) != key.requests:
            return None
        plan = self._stay[turn][key]
        if plan.step != self._step:
            self._plan(plan, key, [key.each] * key.requests, least)
        return self.reader.launched(plan.wrapper)

    def _plan(self, plan: WrapperPlan, key: ForwardKey, rows: Sequence[int], lens: Sequence[int]) -> None:
        """Requests of which nothing is known are planned with one token, which `until` says not to count: what becomes
        of requests without any is not said of all kernels.
        """
        device, size = self._table.device_pages.device, self._table.page_size
        pages = [-(-max(1, count) // size) for count in lens]
        starts = [0, *accumulate(pages)]
        plan.step, plan.requests, plan.rows = self._step, len(rows), sum(rows)
        if plan.buffers is None:
            plan.pages = max(pages)
            plan.listed = torch.zeros(starts[-1], dtype=torch.int32, device=device)
            told = brought(torch.tensor([*starts, *lens], dtype=torch.int32), device)
            plan.starts, plan.until = told.split_with_sizes([len(starts), len(lens)])
        else:
            assert plan.until is not None
            plan.until.copy_(brought(torch.tensor(lens, dtype=torch.int32), device))
        assert plan.listed is not None
        seen = [max(1, count) for count in lens]
        uniform = None if plan.buffers is None else (key.each, self._table.length)
        work = AttentionWork(
            [0, *accumulate(rows)], starts, seen, plan.listed[: starts[-1]], not key.each, key.window, uniform
        )
        self.reader.plan(plan.wrapper, work)

    def _list(self, plan: WrapperPlan, rows: Tensor) -> None:
        """List the pages of `rows`, the first of which are the plan's requests, as they are now on the device."""
        pages = self._table.device_pages
        grid = plan.requests, -(-plan.pages // LISTING)
        launch(gpu.list_pages, grid, pages, rows, plan.starts, plan.listed, pages.stride(0), BLOCK=LISTING)


@dataclass(slots=True)
class Repeated:
    """A plan that a program repeats: called, the host plans it for the step at hand, and says whether that launches
    with what the `first` plan of the program did.
    """

    plans: RunnerPlans
    key: ForwardKey
    turn: int
    first: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __call__(self) -> bool:
        """See `recorder.ahead`."""
        launched = self.plans.again(self.key, self.turn)
        if self.first is None:
            self.first = launched
        return launched is not None and launched == self.first
