"""All-reduces of few bytes in one kernel over NVLink, by torch's symmetric memory; the ordinary all-reduce is the twin.

Every rank reads the peers' rows out of their memory and adds them up, with one barrier before and one behind. That
saves NCCL's rounds where rows are few. It has never run here on several GPUs, so it is off unless asked for, and at
start it is held to its twin on the devices themselves. A rank whose peer is gone waits in the kernel until its process
ends: no abort reaches it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 1 << 19  # above, NCCL is about as fast
MOST_RANKS = 8  # of one node, each with NVLink to all others
DTYPES = (torch.float32, torch.bfloat16)  # that the kernel adds
ALIGNED = 16  # bytes that it reads at once


class WrongSumError(RuntimeError):
    """The kernel's sums are not those of the twin, or not the same on every rank."""


class OneShot:
    """The symmetric buffers of one axis, one for each dtype, made by all of its ranks together."""

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        """Raises RuntimeError where the ranks cannot read each other's memory."""
        if size > MOST_RANKS:
            raise RuntimeError(f"{size} ranks are more than {MOST_RANKS}")
        symmetric: Any = import_module("torch.distributed._symmetric_memory")  # slow, and rarely asked for
        self._name = group.group_name
        self._buffers: dict[torch.dtype, Tensor] = {}
        for dtype in DTYPES:
            buffer = symmetric.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
            symmetric.rendezvous(buffer, self._name)
            self._buffers[dtype] = buffer

    @staticmethod
    def takes(rows: Tensor) -> bool:
        """Whether rows are summed like this: the same on every rank, since shapes and dtypes are."""
        size = rows.numel() * rows.element_size()
        return rows.dtype in DTYPES and 0 < size <= MOST_BYTES and size % ALIGNED == 0

    def __call__(self, rows: Tensor) -> Tensor:
        """Partial sums of the same rows -> their sum."""
        buffer = self._buffers[rows.dtype][: rows.numel()].view(rows.shape)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, rows.contiguous(), "sum", self._name)
        return summed


def check_against_reference(
    one_shot: "OneShot",
    rank: int,
    twin: Callable[[Tensor], Tensor],
    every: Callable[[Tensor], Tensor],
    device: torch.device,
) -> None:
    """Compare sums of made-up rows with the twin's, and with those of the ranks that `every` gathers; all call this.

    Raises:
        WrongSumError: they differ.
    """
    source = torch.Generator().manual_seed(rank)
    for dtype in DTYPES:
        for numbers in (8, 4096, MOST_BYTES // dtype.itemsize):
            rows = torch.randn(1, numbers, generator=source).to(device, dtype)
            summed, expected = one_shot(rows), twin(rows.clone())
            if not torch.allclose(summed.float(), expected.float(), rtol=0.05, atol=0.05):
                raise WrongSumError(f"sums of {numbers} numbers in {dtype} are not those of the ordinary all-reduce")
            if not bool((every(summed) == summed).all()):
                raise WrongSumError(f"ranks get different sums of {numbers} numbers in {dtype}")
