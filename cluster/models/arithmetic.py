"""What putting tensors together takes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` that is cheap on the meta device, where checks of headers build the model first.

    torch's own would import its compiler there, which takes seconds, longer than the rest of such a check.
    """
    first = parts[0]
    if first.device.type != "meta":
        return torch.cat(list(parts), dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.new_empty(shape)


def chosen(given: Tensor, index: Tensor, dim: int) -> Tensor:
    """`torch.index_select`, as cheap on the meta device as `joined`."""
    if given.device.type != "meta":
        return given.index_select(dim, index.to(given.device))
    shape = list(given.shape)
    shape[dim] = index.shape[0]
    return given.new_empty(shape)
