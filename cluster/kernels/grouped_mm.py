"""Grouped matrix product: the rows of each expert times that expert's matrix, in one call.

In bfloat16 on a GPU the product uses torch's kernel, which on some GPUs (see `reads_ends`) reads the row counts on the
device. In all other cases a reference implementation runs one product for each expert, and reads the row counts on the
host. The product is registered as a torch operator, so that tracing and capturing see one operator, and no read of row
counts.

Shape legend: T rows in order of their expert, H columns of a row, O columns of the result, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Not torch.library.custom_op: its first call imports torch's compiler, which takes two seconds.
LIBRARY: Any = torch.library.Library("aerie", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows `[T, H]` by `[E, H, O]` -> `[T, O]`. Expert e has rows `ends[e - 1]` (0 for the first) to
    `ends[e] - 1`; `ends` `[E]` is int32.
    """
    out: Tensor = torch.ops.aerie.grouped_mm(rows, matrices, ends)
    return out


def one_by_one(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Reference implementation of `grouped_mm`: one product for each expert with rows. On a GPU it waits for `ends`."""
    out, start = rows.new_empty(rows.shape[0], matrices.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], matrices[expert], out=out[start:end])
            start = end
    return out


def _on_gpu(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if not rows.shape[0]:
        return _shape_only(rows, matrices, ends)
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices, offs=ends)
    return one_by_one(rows, matrices, ends)


def reads_ends(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether `grouped_mm` on a GPU reads `ends` on the device, so that the host need not wait for `ends`.
    Torch's kernel does so in bfloat16 on Hopper and Blackwell. In other cases the host starts one product per expert.
    """
    return dtype == torch.bfloat16 and capability[0] in (9, 10)


def _shape_only(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


for _key, _kernel in (("CPU", one_by_one), ("CUDA", _on_gpu), ("Meta", _shape_only)):
    LIBRARY.impl("grouped_mm", _kernel, _key)
