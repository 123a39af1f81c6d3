"""The FlashInfer plans of the layers in one KV pool. Before a step runs, the host plans the kinds of forward that the
last step made.

FlashInfer's fa3 kernels, and all its kernels for latents, take lengths from the plan, not from the device. So a plan
must not hold an upper bound of a length. For a tree it holds the number of tokens that are certainly committed
(`HostBounds.min_seq_lens`). Triton reads the nodes of the tree, and also the tokens that an earlier step, which is
still running, commits. Lengths of prompts are known.

A captured program holds the launch arguments of its wrappers. So it has CUDA-graph wrappers with fixed buffers. Before
each replay the host plans these wrappers again and compares the launch arguments (`ReplannedForward`). Prompts have no
such wrappers, because the number of chunks is not part of a program's key: in captured programs Triton attends prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.attention.flashinfer.readers import AttentionWork, CellReader, GraphBuffers
from cluster.batch import HostBounds, PromptRows, TreeRows
from cluster.capture.recorder import is_replayable, run_before_replays
from cluster.device.transfers import copy_to_device
from cluster.kernels.join.gpu import ListPagesArguments, list_pages
from cluster.kernels.launch import launch
from cluster.kv.page_table import PageTable

PAGES_PER_PROGRAM = 128  # pages of a request that one program lists
MAX_PLANS = 16  # eager plans kept for each buffer set; there are more only if the current step needs more


class ForwardKey(NamedTuple):
    """A kind of forward. `rows_per_request` is the number of tree rows per request, or 0 for prompts. `window` is the
    sliding window of prompts as FlashInfer counts it, without the row itself; -1 means no window. `requests` is the
    number of requests of a captured program; it is 0 in all other programs.
    """

    rows_per_request: int
    window: int = -1
    requests: int = 0


@dataclass(slots=True)
class WrapperPlan:
    """The plan of a `wrapper` in step `step`: `requests` requests with `rows` rows in all. A request has at most
    `pages` pages. The page numbers of request i are written to `page_list` from `starts[i]` on; the wrapper reads the
    first `prefix_lens[i]` tokens of request i. `page_list`, `starts` and `prefix_lens` are int32 on the device. If
    `buffers` is set (captured programs), the addresses of these three never change.
    """

    wrapper: Any
    step: int
    buffers: GraphBuffers | None = None
    requests: int = 0
    rows: int = 0
    pages: int = 0
    page_list: Tensor | None = None
    starts: Tensor | None = None
    prefix_lens: Tensor | None = None


class RunnerPlans:
    """The plans of the layers in one KV pool. Two sets of wrappers alternate from step to step, because a wrapper
    copies its plan to the device asynchronously: its next plan would overwrite the host memory of a copy that is still
    under way.
    """

    def __init__(self, reader: CellReader, table: PageTable) -> None:
        self.reader = reader
        self._table, self._bounds, self._step = table, HostBounds(), 0
        # Plans by buffer set (`HostBounds.buffer_set`): those of eager steps, and those of captured programs.
        self._eager_plans: tuple[dict[ForwardKey, WrapperPlan], dict[ForwardKey, WrapperPlan]] = ({}, {})
        self._captured_plans: tuple[dict[ForwardKey, WrapperPlan], dict[ForwardKey, WrapperPlan]] = ({}, {})
        self._requested: list[ForwardKey] = []

    def begin(self, bounds: HostBounds) -> None:
        """Begin a step within `bounds`. Plan the kinds of forward that the last step made, as this step will probably
        make the same ones.
        """
        self._step, self._bounds = self._step + 1, bounds
        requested, self._requested = self._requested, []
        for key in requested:
            self._plan_for_step(key)

    def tree(self, tree: TreeRows) -> WrapperPlan | None:
        """Return the plan that reads, for tree rows, the tokens that are certainly committed. Return None if no request
        has such tokens (in an eager step), if the bounds do not say how many there are, or if a plan has no room for
        the rows.
        """
        requests, rows_per_request = tree.rows.shape[0], tree.bits.shape[1]
        if not requests or requests != len(self._bounds.min_seq_lens):
            return None
        plan = (
            self._captured_plan(ForwardKey(rows_per_request, requests=requests))
            if is_replayable()
            else self._request_plan(ForwardKey(rows_per_request))
        )
        if plan is not None:
            self._list_pages(plan, tree.rows)
        return plan

    def text(self, text: PromptRows, window: int) -> WrapperPlan | None:
        """Return the plan for prompts, in layers with a sliding `window` (0: none). Return None if the program may be
        captured, if the bounds have no chunks, or if a plan has no room for the rows.
        """
        plan = None if is_replayable() else self._request_plan(ForwardKey(0, window - 1))
        if plan is not None:
            self._list_pages(plan, text.rows)
        return plan

    def _request_plan(self, key: ForwardKey) -> WrapperPlan | None:
        if key not in self._requested:
            self._requested.append(key)
        return self._plan_for_step(key)

    @torch.inference_mode()  # wrappers write in place to inference tensors that they created in an earlier call
    def _plan_for_step(self, key: ForwardKey) -> WrapperPlan | None:
        plans = self._eager_plans[self._bounds.buffer_set]
        plan = plans.get(key)
        if plan is not None and plan.step == self._step:
            return plan
        chunks, certain_lens = self._bounds.chunks, self._bounds.min_seq_lens
        rows = (
            [key.rows_per_request] * len(certain_lens)
            if key.rows_per_request
            else [stop - start for start, stop in chunks]
        )
        lens = certain_lens if key.rows_per_request else [stop for _, stop in chunks]
        if not any(lens) or not self.reader.fits(sum(rows)):
            return None
        if plan is None:
            unused = [old_key for old_key, old_plan in plans.items() if old_plan.step < self._step]
            for old_key in unused[: max(0, len(plans) + 1 - MAX_PLANS)]:
                del plans[old_key]
            plan = plans[key] = WrapperPlan(self.reader.wrapper(), self._step)
        self._plan(plan, key, rows, lens)
        return plan

    @torch.inference_mode()
    def _captured_plan(self, key: ForwardKey) -> WrapperPlan | None:
        """Return the plan for a program that may be captured; None if a plan has no room for the rows. It is made in
        the first run of the program, which is eager.
        """
        if not self.reader.fits(key.rows_per_request * key.requests):
            return None
        plans = self._captured_plans[self._bounds.buffer_set]
        if key not in plans:
            max_pages, device = self._table.device_pages.shape[1], self._table.device_pages.device
            buffers = GraphBuffers.of(key.requests, max_pages, device)
            plans[key] = plan = WrapperPlan(self.reader.wrapper(buffers), 0, buffers, pages=max_pages)
            plan.page_list, plan.starts = buffers.page_list, buffers.starts
            plan.prefix_lens = torch.zeros(key.requests, dtype=torch.int32, device=device)
        run_before_replays(ReplannedForward(self, key, self._bounds.buffer_set))
        return plans[key]

    @torch.inference_mode()
    def plan_again(self, key: ForwardKey, buffer_set: int) -> dict[str, Any] | None:
        """Plan the current step for the captured programs with `key` and `buffer_set`, and return the launch arguments.
        Return None if the step has another buffer set or another number of requests.
        """
        certain_lens = self._bounds.min_seq_lens
        if buffer_set != self._bounds.buffer_set or len(certain_lens) != key.requests:
            return None
        plan = self._captured_plans[buffer_set][key]
        if plan.step != self._step:
            self._plan(plan, key, [key.rows_per_request] * key.requests, certain_lens)
        return self.reader.launch_arguments(plan.wrapper)

    def _plan(self, plan: WrapperPlan, key: ForwardKey, rows: Sequence[int], lens: Sequence[int]) -> None:
        """Make `plan` the plan of the current step. Request i has `rows[i]` rows and `lens[i]` tokens.

        A length of 0 is planned as 1 token, because not all of FlashInfer's kernels document what they do with empty
        requests. The kernel `join`, which merges FlashInfer's result of trees with Triton's, ignores that token,
        because the `prefix_lens` of the request is 0.
        """
        device, page_size = self._table.device_pages.device, self._table.page_size
        page_counts = [-(-max(1, count) // page_size) for count in lens]
        starts = [0, *accumulate(page_counts)]
        plan.step, plan.requests, plan.rows = self._step, len(rows), sum(rows)
        if plan.buffers is None:
            plan.pages = max(page_counts)
            plan.page_list = torch.zeros(starts[-1], dtype=torch.int32, device=device)
            lens_on_device = copy_to_device(torch.tensor([*starts, *lens], dtype=torch.int32), device)
            plan.starts, plan.prefix_lens = lens_on_device.split_with_sizes([len(starts), len(lens)])
        else:
            assert plan.prefix_lens is not None
            plan.prefix_lens.copy_(copy_to_device(torch.tensor(lens, dtype=torch.int32), device))
        assert plan.page_list is not None
        token_counts = [max(1, count) for count in lens]
        graph_shape = None if plan.buffers is None else (key.rows_per_request, self._table.length)
        work = AttentionWork(
            [0, *accumulate(rows)],
            starts,
            token_counts,
            plan.page_list[: starts[-1]],
            not key.rows_per_request,
            key.window,
            graph_shape,
        )
        self.reader.plan(plan.wrapper, work)

    def _list_pages(self, plan: WrapperPlan, rows: Tensor) -> None:
        """Write the current page numbers of the plan's requests to `plan.page_list`. Request i is in table row
        `rows[i]`; entries of `rows` beyond the plan's requests are not used.
        """
        pages = self._table.device_pages
        grid = plan.requests, -(-plan.pages // PAGES_PER_PROGRAM)
        assert plan.starts is not None and plan.page_list is not None
        arguments = ListPagesArguments(pages, rows, plan.starts, plan.page_list, pages.stride(0))
        launch(list_pages, grid, arguments, BLOCK=PAGES_PER_PROGRAM)


@dataclass(slots=True)
class ReplannedForward:
    """A function that is called before each run of a captured program. It plans the current step, and returns whether
    the launch arguments equal `first_arguments`, the launch arguments of the program's first plan.
    """

    plans: RunnerPlans
    key: ForwardKey
    buffer_set: int
    first_arguments: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __call__(self) -> bool:
        """Plan the current step. Return False if the program does not fit the step, which then runs eagerly
        (`recorder.run_before_replays`).
        """
        launch_arguments = self.plans.plan_again(self.key, self.buffer_set)
        if self.first_arguments is None:
            self.first_arguments = launch_arguments
        return launch_arguments is not None and launch_arguments == self.first_arguments
