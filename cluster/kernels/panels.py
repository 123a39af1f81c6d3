"""How wide the panels are that weights lie in for the products in C, and what goes with rows into these."""

import torch
from torch import Tensor

PANEL = 64  # bytes of a panel's row in registers' width: as many columns as a sum has lanes


def columns_of(dtype: torch.dtype) -> int:
    """Columns of a panel, for rows of `dtype`."""
    return PANEL // torch.promote_types(dtype, torch.float32).itemsize


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
