"""All-reduce of few bytes in one kernel over NVLink, by torch's symmetric memory. Its reference is NCCL's all-reduce.

Every rank reads the rows of its peers from their memory and adds them, with a barrier before and after. For small
tensors this saves the communication rounds of NCCL. The kernel has not been run on several GPUs. So it is off by
default, and at start it is compared with the reference on the real devices. If a peer is gone, a rank waits in the
kernel until its own process ends: an abort does not reach the kernel.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 1 << 19  # above this size NCCL is about as fast
MAX_RANKS = 8  # on one node, each with NVLink to all others
DTYPES = (torch.float32, torch.bfloat16)  # dtypes that the kernel can add
ALIGNMENT_BYTES = 16  # bytes that the kernel reads at once


class WrongSumError(RuntimeError):
    """The kernel's sums differ from the reference, or between ranks."""


class OneShot:
    """The kernel on one axis, with a symmetric buffer per dtype. All ranks of the axis create it together."""

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        """Raises RuntimeError if there are more than `MAX_RANKS` ranks, or if they cannot read each other's memory."""
        if size > MAX_RANKS:
            raise RuntimeError(f"{size} ranks are more than {MAX_RANKS}")
        symmetric: Any = import_module("torch.distributed._symmetric_memory")  # slow, and rarely asked for
        self._name = group.group_name
        self._buffers: dict[torch.dtype, Tensor] = {}
        for dtype in DTYPES:
            buffer = symmetric.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device)
            symmetric.rendezvous(buffer, self._name)
            self._buffers[dtype] = buffer

    @staticmethod
    def supports(rows: Tensor) -> bool:
        """Return whether the kernel can sum `rows`. All ranks decide alike, as shapes and dtypes are the same."""
        num_bytes = rows.numel() * rows.element_size()
        return rows.dtype in DTYPES and 0 < num_bytes <= MAX_BYTES and num_bytes % ALIGNMENT_BYTES == 0

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the sum of all ranks' `rows`."""
        buffer = self._buffers[rows.dtype][: rows.numel()].view(rows.shape)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, rows.contiguous(), "sum", self._name)
        return summed


def check_against_reference(
    one_shot: "OneShot",
    rank: int,
    reference: Callable[[Tensor], Tensor],
    all_gather: Callable[[Tensor], Tensor],
    device: torch.device,
) -> None:
    """Compare the kernel's sums of random rows with those of `reference`, the reference all-reduce. Then compare the
    sums of all ranks, which `all_gather` collects. All ranks of the axis call this together.

    Raises:
        WrongSumError: sums differ.
    """
    generator = torch.Generator().manual_seed(rank)
    for dtype in DTYPES:
        for count in (8, 4096, MAX_BYTES // dtype.itemsize):
            rows = torch.randn(1, count, generator=generator).to(device, dtype)
            summed, expected = one_shot(rows), reference(rows.clone())
            if not torch.allclose(summed.float(), expected.float(), rtol=0.05, atol=0.05):
                raise WrongSumError(f"sums of {count} numbers in {dtype} are not those of the ordinary all-reduce")
            if not bool((all_gather(summed) == summed).all()):
                raise WrongSumError(f"ranks get different sums of {count} numbers in {dtype}")
