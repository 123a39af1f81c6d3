"""Cutting rows into blocks, so that temporaries stay small."""

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_BLOCK = 1 << 22  # the most numbers in a block on a GPU; a block has at least one row, even if it is longer
MAX_CPU_BLOCK = 1 << 17  # the same on a CPU: about as many as fit into the CPU's caches, temporaries included


def blocks(count: int, numbers_per_row: int, device: torch.device) -> list[slice]:
    """Return slices that cut `count` rows (or requests) of `numbers_per_row` numbers each into blocks. If `count` is 0,
    return one empty slice.
    """
    block_size = min(MAX_BLOCK, MAX_CPU_BLOCK) if device.type == "cpu" else MAX_BLOCK
    block_rows = max(1, block_size // max(1, numbers_per_row))
    return [slice(start, min(count, start + block_rows)) for start in range(0, max(1, count), block_rows)]


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts; if there is only one part, return it without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
