"""How wide the panels are that weights lie in for the products in C, and what goes with rows into these."""

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL = 64  # bytes of a panel's row in registers' width: as many columns as a sum has lanes
STEP = 32  # inputs that a tile has (AMX)


def columns_of(dtype: torch.dtype) -> int:
    """Columns of a panel, for rows of `dtype`."""
    return PANEL // torch.promote_types(dtype, torch.float32).itemsize


def in_panels(matrices: Tensor) -> Tensor:
    """`[E, inputs, outputs]` -> `[E, ceil(outputs / c), inputs, c]`, with zeros after the last column."""
    (experts, inputs, outputs), each = matrices.shape, columns_of(matrices.dtype)
    whole = F.pad(matrices, (0, -outputs % each)).view(experts, inputs, -1, each)
    return whole.transpose(1, 2).contiguous()


def in_tiles(matrices: Tensor) -> Tensor:
    """`[E, inputs, outputs]` in bfloat16 -> `[E, ceil(outputs / c), ceil(inputs / 32) * 16, c, 2]`: inputs in pairs,
    with zeros after the last one too.
    """
    (experts, inputs, outputs), each = matrices.shape, columns_of(matrices.dtype)
    pairs, panels = -(-inputs // STEP) * STEP // 2, -(-outputs // each)
    whole = F.pad(matrices, (0, -outputs % each, 0, -inputs % STEP)).view(experts, pairs, 2, panels, each)
    return whole.permute(0, 3, 1, 4, 2).contiguous()


def out_of_panels(panels: Tensor, inputs: int, outputs: int) -> Tensor:
    """The matrices `[E, inputs, outputs]` that `in_panels` or `in_tiles` laid out."""
    if panels.dim() == 5:
        panels = panels.transpose(3, 4).flatten(2, 3)
    return panels.transpose(1, 2).flatten(2)[:, :inputs, :outputs].contiguous()


def fitting_rows(rows: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """`rows` `[T, inputs]`, row after row in memory.

    Raises:
        ValueError: they are of another width, dtype or device than the product's, which C would not notice.
    """
    if not rows.is_cpu or rows.dim() != 2 or rows.shape[1] != inputs or rows.dtype != dtype:
        raise ValueError(f"rows {list(rows.shape)} of {rows.dtype} do not fit {inputs} of {dtype}")
    return rows.contiguous()


def fitting_bias(bias: Tensor, rows: Tensor, outputs: int) -> Tensor:
    """`bias` `[outputs]`, number after number in memory.

    Raises:
        ValueError: it is of another width, dtype or device than the product's, which C would not notice.
    """
    if not bias.is_cpu or bias.shape != (outputs,) or bias.dtype != rows.dtype:
        raise ValueError(f"a bias {list(bias.shape)} of {bias.dtype} does not fit {outputs} outputs of {rows.dtype}")
    return bias.contiguous()


def fitting_ends(ends: Tensor, experts: int) -> Tensor:
    """Where each expert's rows end, `[experts]`, one after the other in memory.

    Raises:
        ValueError: they are not int32 or of other experts, which C would not notice.
    """
    if not ends.is_cpu or ends.shape != (experts,) or ends.dtype != torch.int32:
        raise ValueError(f"ends {list(ends.shape)} of {ends.dtype} do not fit {experts} experts; give int32")
    return ends.contiguous()
