"""Cutting rows into blocks, so that temporaries stay small."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 22  # the most numbers of a block on a GPU; a block has at least one row, even if the row has more
CACHED = 1 << 17  # the same on a CPU: about as many as fit into the CPU's caches, temporaries included


def blocks(count: int, each: int, device: torch.device) -> list[slice]:
    """Return slices that cut `count` rows (or requests) of `each` numbers into blocks; if 0, one empty slice."""
    size = min(BLOCK, CACHED) if device.type == "cpu" else BLOCK
    step = max(1, size // max(1, each))
    return [slice(start, min(count, start + step)) for start in range(0, max(1, count), step)]


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts; if there is only one part, return it without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
