"""Concatenation and selection of tensors that are also fast on the meta device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return `torch.cat(parts, dim)`; fast on the meta device, on which models are built to check headers.

    On the meta device `torch.cat` would import torch's compiler, which takes longer than the rest of the check.
    """
    first = parts[0]
    if first.device.type != "meta":
        return torch.cat(list(parts), dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.new_empty(shape)


def chosen(given: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return `torch.index_select(given, dim, index)`; fast on the meta device, as `joined` is."""
    if given.device.type != "meta":
        return given.index_select(dim, index.to(given.device))
    shape = list(given.shape)
    shape[dim] = index.shape[0]
    return given.new_empty(shape)
