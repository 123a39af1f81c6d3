"""The panel layout of weights for the C products, and checks of the tensors that are passed to these products.

A panel holds c adjacent columns of a matrix, input after input: `panels[p][k][j]` is the element in row k and column
p * c + j.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL_BYTES = 64  # c numbers in the dtype of sums have this many bytes, so c equals LANES in c/vector.h
TILE_INPUTS = 32  # rows of the matrix in one AMX tile


def panel_columns_of(dtype: torch.dtype) -> int:
    """Return c, the columns of a panel, for rows of `dtype`: 8 in float64, else 16."""
    return PANEL_BYTES // torch.promote_types(dtype, torch.float32).itemsize


def in_panels(matrices: Tensor) -> Tensor:
    """Lay out `[E, inputs, outputs]` as `[E, ceil(outputs / c), inputs, c]`, with zeros after the last column."""
    (experts, inputs, outputs), panel_columns = matrices.shape, panel_columns_of(matrices.dtype)
    padded = F.pad(matrices, (0, -outputs % panel_columns)).view(experts, inputs, -1, panel_columns)
    return padded.transpose(1, 2).contiguous()


def in_tiles(matrices: Tensor) -> Tensor:
    """Lay out `[E, inputs, outputs]` in bfloat16 as `[E, ceil(outputs / c), ceil(inputs / 32) * 16, c, 2]`: inputs in
    pairs, as AMX reads them, with zeros after the last column and the last input.
    """
    (experts, inputs, outputs), panel_columns = matrices.shape, panel_columns_of(matrices.dtype)
    pairs, panels = -(-inputs // TILE_INPUTS) * TILE_INPUTS // 2, -(-outputs // panel_columns)
    padded = F.pad(matrices, (0, -outputs % panel_columns, 0, -inputs % TILE_INPUTS)).view(
        experts, pairs, 2, panels, panel_columns
    )
    return padded.permute(0, 3, 1, 4, 2).contiguous()


def out_of_panels(panels: Tensor, inputs: int, outputs: int) -> Tensor:
    """Return the matrices `[E, inputs, outputs]` from the layout of `in_panels` or `in_tiles`."""
    if panels.dim() == 5:
        panels = panels.transpose(3, 4).flatten(2, 3)
    return panels.transpose(1, 2).flatten(2)[:, :inputs, :outputs].contiguous()


def checked_rows(rows: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return `rows` `[T, inputs]`, contiguous.

    Raises:
        ValueError: the width or dtype does not fit, or `rows` is not on a CPU. The C code does not check this.
    """
    if not rows.is_cpu or rows.dim() != 2 or rows.shape[1] != inputs or rows.dtype != dtype:
        raise ValueError(f"rows {list(rows.shape)} of {rows.dtype} do not fit {inputs} of {dtype}")
    return rows.contiguous()


def checked_bias(bias: Tensor, rows: Tensor, outputs: int) -> Tensor:
    """Return `bias` `[outputs]`, contiguous.

    Raises:
        ValueError: the width or dtype does not fit, or `bias` is not on a CPU. The C code does not check this.
    """
    if not bias.is_cpu or bias.shape != (outputs,) or bias.dtype != rows.dtype:
        raise ValueError(f"a bias {list(bias.shape)} of {bias.dtype} does not fit {outputs} outputs of {rows.dtype}")
    return bias.contiguous()


def checked_ends(ends: Tensor, experts: int) -> Tensor:
    """Return `ends` `[experts]`, the end of each expert's rows, contiguous.

    Raises:
        ValueError: `ends` is not int32, not `[experts]`, or not on a CPU. The C code does not check this.
    """
    if not ends.is_cpu or ends.shape != (experts,) or ends.dtype != torch.int32:
        raise ValueError(f"ends {list(ends.shape)} of {ends.dtype} do not fit {experts} experts; give int32")
    return ends.contiguous()
