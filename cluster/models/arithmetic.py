"""Functions that concatenate tensors or select from them, and are fast on the meta device too."""

from collections.abc import Sequence

import torch
from torch import Tensor


def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return `torch.cat(tensors, dim)`. This is also fast on the meta device, where a model is built to check the
    headers of its checkpoint: there `torch.cat` would import torch's compiler, which takes longer than the whole check.
    """
    first = tensors[0]
    if first.device.type != "meta":
        return torch.cat(list(tensors), dim)
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return first.new_empty(shape)


def select_indices(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return `torch.index_select(tensor, dim, index)`; fast on the meta device, as `concat` is."""
    if tensor.device.type != "meta":
        return tensor.index_select(dim, index.to(tensor.device))
    shape = list(tensor.shape)
    shape[dim] = index.shape[0]
    return tensor.new_empty(shape)
