"""The device of FlashInfer's stand-in: where its plans are put, what its kernels find there, and when.

A plan goes from pinned memory to the device when the device comes to the copy, and kernels read what lies there when
they run, which in a graph is long after they were told where. Each plan carries its number, so a kernel knows whether
it meets the plan of the step at hand, made for what it was launched with: a GPU would compute something, and say
nothing.
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

ROOM = 1 << 14  # numbers of an int workspace


class Device:
    """The steps that the host has begun and whose results it has not read: their copies may be still to come. `sent`
    counts those of an engine that were told to the device, and `running` is the one to which it has come.
    """

    def __init__(self) -> None:
        self.begun = self.read = 0
        self.sent = self.running = 0
        self.plans = self.runs = 0
        self.repeated = 0  # runs of wrappers for graphs
        self.host: Callable[[], AbstractContextManager[None]] = _disable_current_modes
        """In which a plan is made: it is the host's own work."""

    def begin(self) -> None:
        self.begun += 1

    def finish(self) -> None:
        self.read += 1

    def send(self) -> None:
        """The host begins to tell a step."""
        self.sent += 1
        recorder.native(setattr, self, "running", self.sent)


DEVICE = Device()
PLANNED: list["Planned"] = []
"""All plans, by the number that lies in memory with them."""


@dataclass(frozen=True)
class Planned:
    """What a plan was made for: a step, and the numbers that its kernels are launched with."""

    step: int
    launched: tuple[Any, ...]


def captured() -> bool:
    """Whether a program is being recorded, so that whatever is launched will be launched again."""
    return isinstance(recorder._recorder.get(), (Graph, _Recorder))


def staged(pinned: Tensor, there: Tensor, parts: list[Tensor], launched: tuple[Any, ...]) -> None:
    """Put a plan into `pinned`, from where the device copies it `there` when it comes to that."""
    assert not captured(), "a plan is copied out of memory of the host, which no graph is to hold"
    PLANNED.append(Planned(DEVICE.sent, launched))
    words = torch.cat([torch.tensor([len(PLANNED) - 1], dtype=torch.int32), *parts])
    pinned[: len(words)] = words
    recorder.native(arrive, there, pinned, len(words))
    DEVICE.plans += 1


def arrive(there: Tensor, sent: Tensor, count: int) -> None:
    """The device has come to a copy."""
    there[:count] = sent[:count]


@dataclass(frozen=True)
class Launch:
    """What a kernel is told by value: `numbers` of the plan, the places of its lists, and how it attends. `buffers` are
    those that hold the ends of rows, the starts of pages, and how full last pages are, where it reads such.
    """

    numbers: tuple[Any, ...]
    workspace: Tensor
    buffers: tuple[Tensor, ...]
    listed: Tensor
    requests: int
    causal: bool
    window: int
    scale: float


def kernel(told: Launch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor) -> None:
    """q `[T, nh, d]` over keys and values `[pages, page_size, nkv, ..]` -> `out`, and logarithms to base 2, by what
    lies in memory now.
    """
    plan = PLANNED[int(told.workspace[0])]
    assert plan.step == DEVICE.running, "a stale plan: it was made for another step"
    assert plan.launched == told.numbers, "a plan with other numbers than it was launched with"
    sizes = [told.requests + 1, told.requests + 1, told.requests]
    rows, pages, lens = told.workspace[1 : 1 + sum(sizes)].split(sizes)
    for own, kept in zip((rows, pages, (lens - 1) % keys.shape[1] + 1), told.buffers, strict=False):
        assert torch.equal(own, kept), "the buffers hold another plan than the workspace"
    assert q.shape[0] == rows[-1], "as many rows as were planned"
    lse.fill_(math.nan)
    repeat = q.shape[1] // keys.shape[2]
    for i in range(told.requests):
        length, own = int(lens[i]), slice(int(rows[i]), int(rows[i + 1]))
        at = told.listed[int(pages[i]) : int(pages[i + 1])].long()
        k = keys[at].flatten(0, 1)[:length].double().repeat_interleave(repeat, 1)
        v = values[at].flatten(0, 1)[:length].double().repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k) * told.scale
        label = torch.arange(length)
        last = label[-1] - (own.stop - own.start - 1) + torch.arange(own.stop - own.start)
        hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
        if told.causal:
            assert last[0] >= 0, "causal rows are the last of their text"
            hidden |= label > last[:, None]
        if told.window >= 0:
            hidden |= label < last[:, None] - told.window
        scores = scores.masked_fill(hidden, -math.inf)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
        lse[own] = (scores.logsumexp(-1) / math.log(2)).t().to(lse.dtype)
    DEVICE.runs += 1
