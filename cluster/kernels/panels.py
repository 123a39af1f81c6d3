"""How wide the panels are that weights lie in for the products in C."""

import torch

PANEL = 64  # bytes of a panel's row in registers' width: as many columns as a sum has lanes


def columns_of(dtype: torch.dtype) -> int:
    """Columns of a panel, for rows of `dtype`."""
    return PANEL // torch.promote_types(dtype, torch.float32).itemsize
