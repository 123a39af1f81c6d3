"""FlashInfer plans of one runner. Before a step runs, the host plans the kinds of forward that the last step made.

FlashInfer's fa3 kernels, and all kernels for latents, take lengths from the plan, not from the device. So a plan must
not hold an upper bound of a length. For a tree it holds the tokens that are certainly committed (`HostBounds.least`);
Triton, which reads the window anyway, also reads the tokens that a step under way commits. Lengths of prompts are
known.

A captured program holds its wrapper's launch arguments. So it has CUDA-graph wrappers with fixed buffers. Before each
replay the host plans them again and compares the launch arguments (`Repeated`). Prompts have no such wrappers, since
the number of chunks is not part of a program's key: in captured programs Triton attends them.
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
from cluster.kernels.join.gpu import ListPagesArguments, list_pages
from cluster.kernels.launch import launch
from cluster.kv.page_table import PageTable

LISTING = 128  # pages of a request that one program lists
KEPT = 16  # the most plans of a set; it has more only if the current step needs more


class ForwardKey(NamedTuple):
    """A kind of forward. `each` is the number of tree rows per request, or 0 for prompts. `window` is the sliding
    window of prompts as FlashInfer counts it, -1 for none. `requests` is the number of requests of a captured program;
    it is 0 outside captured programs.
    """

    each: int
    window: int = -1
    requests: int = 0


@dataclass(slots=True)
class WrapperPlan:
    """The plan of a `wrapper` in step `step`: `requests` requests with `rows` rows in all. A request has at most
    `pages` pages. The pages of request i are written to `listed` from `starts[i]` on; the wrapper reads its first
    `until[i]` tokens. `listed`, `starts` and `until` are int32 on the device. If `buffers` is set (captured programs),
    their addresses never change.
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
    """The plans of one runner. Two sets of wrappers alternate from step to step: a wrapper copies its plan to the
    device asynchronously, and its next plan would overwrite the host memory of a copy that is still under way.
    """

    def __init__(self, reader: CellReader, table: PageTable) -> None:
        self.reader = reader
        self._table, self._bounds, self._step = table, HostBounds(), 0
        # Plans by buffer set (`HostBounds.turn`): those of eager steps, and those of captured programs.
        self._sets: tuple[dict[ForwardKey, WrapperPlan], dict[ForwardKey, WrapperPlan]] = ({}, {})
        self._stay: tuple[dict[ForwardKey, WrapperPlan], dict[ForwardKey, WrapperPlan]] = ({}, {})
        self._asked: list[ForwardKey] = []

    def begin(self, bounds: HostBounds) -> None:
        """Begin a step within these bounds: plan the kinds of forward that the last step had, as this step probably has
        them too.
        """
        self._step, self._bounds = self._step + 1, bounds
        asked, self._asked = self._asked, []
        for key in asked:
            self._planned(key)

    def tree(self, tree: TreeRows) -> WrapperPlan | None:
        """Return the plan that reads a tree's certainly committed tokens. Returns None if there are none, if the bounds
        do not say how many there are, or if a plan has no room for the rows.
        """
        requests, each = tree.rows.shape[0], tree.bits.shape[1]
        if not requests or requests != len(self._bounds.least):
            return None
        plan = self._repeated(ForwardKey(each, requests=requests)) if repeats() else self._asked_for(ForwardKey(each))
        if plan is not None:
            self._list(plan, tree.rows)
        return plan

    def text(self, text: PromptRows, window: int) -> WrapperPlan | None:
        """Return the plan for prompts, in layers with a sliding `window` (0: none). Returns None in a program that may
        be captured, if the bounds have no chunks, or if a plan has no room for the rows.
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
        """Return the plan of a program that may be captured. The plan is made in the program's first, eager run."""
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
        """Plan the current step for captured programs with this key and buffer set (`turn`); return the launch
        arguments. Returns None if the step has another buffer set or another number of requests.
        """
        least = self._bounds.least
        if turn != self._bounds.turn or len(least) != key.requests:
            return None
        plan = self._stay[turn][key]
        if plan.step != self._step:
            self._plan(plan, key, [key.each] * key.requests, least)
        return self.reader.launched(plan.wrapper)

    def _plan(self, plan: WrapperPlan, key: ForwardKey, rows: Sequence[int], lens: Sequence[int]) -> None:
        """Plan requests with `rows` rows and `lens` tokens each.

        A length of 0 is planned as 1 token, because not all of FlashInfer's kernels document what they do with empty
        requests. The merge ignores that token, because `until` is 0.
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
        """Write the current pages of the plan's requests to `listed`. Their table rows are the first of `rows`."""
        pages = self._table.device_pages
        grid = plan.requests, -(-plan.pages // LISTING)
        assert plan.starts is not None and plan.listed is not None
        arguments = ListPagesArguments(pages, rows, plan.starts, plan.listed, pages.stride(0))
        launch(list_pages, grid, arguments, BLOCK=LISTING)


@dataclass(slots=True)
class Repeated:
    """A check before each run of a captured program: plan the current step, and return whether the launch arguments
    equal `first`, those of the program's first plan.
    """

    plans: RunnerPlans
    key: ForwardKey
    turn: int
    first: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __call__(self) -> bool:
        """Plan the step; return False if the program does not fit the step and must run eagerly (`recorder.ahead`)."""
        launched = self.plans.again(self.key, self.turn)
        if self.first is None:
            self.first = launched
        return launched is not None and launched == self.first
