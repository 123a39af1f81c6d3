"""The simulated device of FlashInfer's stand-in: it copies plans to device memory, and runs the kernels that read them.

The device copies a plan from pinned memory when it reaches the copy. A kernel reads the plan that is in device memory
when it runs; in a graph that is long after the launch was recorded. Each plan carries its number. So the stand-in's
kernel can check that the plan belongs to the current step and to the numbers that the kernel was launched with. A real
GPU would compute a wrong result without an error.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cluster.capture import recorder
from cluster.capture.cuda_graph import Graph
from cluster.capture.tape import _Recorder

WORKSPACE_SIZE = 1 << 14  # int32 values in an int workspace


class Device:
    """Counters of the simulated device.

    `begun` counts the steps that the host has begun, `read` those whose results it has read. The device may still have
    to make the copies of the steps between them. `sent` counts the steps whose input was sent to the device; `running`
    is the number of the step that the device runs. `plans` counts plans, `runs` kernel runs, and `repeated` launches by
    wrappers for graphs.
    """

    def __init__(self) -> None:
        self.begun = self.read = 0
        self.sent = self.running = 0
        self.plans = self.runs = 0
        self.repeated = 0  # launches by wrappers for graphs
        self.host: Callable[[], AbstractContextManager[None]] = _disable_current_modes
        """Makes the context in which a plan is made. Planning is work of the host: no simulated stream may queue it."""

    def begin(self) -> None:
        self.begun += 1

    def finish(self) -> None:
        self.read += 1

    def send(self) -> None:
        """The host sends the input of a step. When the device gets there, this step is the running one."""
        self.sent += 1
        recorder.native(setattr, self, "running", self.sent)


DEVICE = Device()
PLANNED: list["Planned"] = []
"""All plans. The index of a plan is the number that is stored with it in device memory."""


@dataclass(frozen=True)
class Planned:
    """A plan: the step for which it was made, and the numbers with which its kernels must be launched."""

    step: int
    launch_numbers: tuple[Any, ...]


def is_capturing() -> bool:
    """Return whether a program is being recorded. Every launch in it will be repeated at each replay."""
    return isinstance(recorder._recorder.get(), (Graph, _Recorder))


def stage_plan(
    pinned: Tensor, device_workspace: Tensor, plan_lists: list[Tensor], launch_numbers: tuple[Any, ...]
) -> None:
    """Write a plan into `pinned`. The device copies it to `device_workspace` when it reaches the copy."""
    assert not is_capturing(), "a plan is copied from host memory, and such a copy must not be part of a graph"
    PLANNED.append(Planned(DEVICE.sent, launch_numbers))
    plan_words = torch.cat([torch.tensor([len(PLANNED) - 1], dtype=torch.int32), *plan_lists])
    pinned[: len(plan_words)] = plan_words
    recorder.native(copy_on_device, device_workspace, pinned, len(plan_words))
    DEVICE.plans += 1


def copy_on_device(destination: Tensor, source: Tensor, count: int) -> None:
    """The device makes a copy that the host has queued."""
    destination[:count] = source[:count]


@dataclass(frozen=True)
class Launch:
    """The launch arguments of a kernel: the plan's `launch_numbers`, the tensors that it reads, and the attention
    options. `buffers` hold qo_indptr, kv_indptr and the lengths of the last pages, if the kernel reads them.
    `page_list` holds the page ids of all requests.
    """

    launch_numbers: tuple[Any, ...]
    workspace: Tensor
    buffers: tuple[Tensor, ...]
    page_list: Tensor
    requests: int
    causal: bool
    window: int
    scale: float


def kernel(launch: Launch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor) -> None:
    """Compute the attention of q `[T, nh, d]` over keys and values `[pages, page_size, nkv, ..]`. Write `out`, and the
    log-sum-exp to base 2 into `lse`. The plan and the page list are those in memory when the kernel runs.
    """
    plan = PLANNED[int(launch.workspace[0])]
    assert plan.step == DEVICE.running, "a stale plan: it was made for another step"
    assert plan.launch_numbers == launch.launch_numbers, "a plan with other numbers than it was launched with"
    sizes = [launch.requests + 1, launch.requests + 1, launch.requests]
    qo_indptr, kv_indptr, kv_lens = launch.workspace[1 : 1 + sum(sizes)].split(sizes)
    for own, buffer in zip((qo_indptr, kv_indptr, (kv_lens - 1) % keys.shape[1] + 1), launch.buffers, strict=False):
        assert torch.equal(own, buffer), "the buffers hold another plan than the workspace"
    assert q.shape[0] == qo_indptr[-1], "the number of rows is not the planned one"
    lse.fill_(math.nan)
    repeat = q.shape[1] // keys.shape[2]
    for i in range(launch.requests):
        length, own = int(kv_lens[i]), slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
        page_ids = launch.page_list[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        k = keys[page_ids].flatten(0, 1)[:length].double().repeat_interleave(repeat, 1)
        v = values[page_ids].flatten(0, 1)[:length].double().repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k) * launch.scale
        key_positions = torch.arange(length)
        query_positions = key_positions[-1] - (own.stop - own.start - 1) + torch.arange(own.stop - own.start)
        is_masked = torch.zeros(scores.shape[1:], dtype=torch.bool)
        if launch.causal:
            assert query_positions[0] >= 0, "causal rows must be the last rows of their text"
            is_masked |= key_positions > query_positions[:, None]
        if launch.window >= 0:
            is_masked |= key_positions < query_positions[:, None] - launch.window
        scores = scores.masked_fill(is_masked, -math.inf)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
        lse[own] = (scores.logsumexp(-1) / math.log(2)).t().to(lse.dtype)
    DEVICE.runs += 1
