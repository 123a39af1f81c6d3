"""Tensors as kernels read them: by one stride from row to row."""

from torch import Tensor


def with_rows_whole(tensor: Tensor) -> Tensor:
    """`tensor` `[T, .., d]` with each of its T entries in one piece of memory."""
    whole = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != whole:
            return tensor.contiguous()
        whole *= size
    return tensor
