"""Many products of different row counts as one call: the rows of each expert times that expert's matrix.

On a GPU it is torch's kernel, which reads the row counts on the device; elsewhere its twin, which runs one product for
each expert. As an operator of its own it can be traced and recorded: nothing around it asks the host how many rows an
expert has. Shape legend: T rows in order of their expert, H columns of a row, O of the result, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Not torch.library.custom_op, which imports torch's compiler at the first call: two seconds.
LIBRARY: Any = torch.library.Library("aerie", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`[T, H]`, `[E, H, O]` -> `[T, O]`; expert e has the rows after those of e - 1, up to `ends[e]`, `[E]` int32."""
    out: Tensor = torch.ops.aerie.grouped_mm(rows, matrices, ends)
    return out


def one_by_one(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The twin of `grouped_mm`: a product for every expert that has rows. On a GPU it waits for `ends`."""
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
    """Whether `grouped_mm` on a GPU leaves `ends` there, so that the host waits for nothing: torch's kernel is for
    bfloat16 on Hopper and Blackwell, else torch too makes one product after the other.
    """
    return dtype == torch.bfloat16 and capability[0] in (9, 10)


def _shape_only(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


for _key, _kernel in (("CPU", one_by_one), ("CUDA", _on_gpu), ("Meta", _shape_only)):
    LIBRARY.impl("grouped_mm", _kernel, _key)
