"""Tensors as kernels read them: of the pool's cells, and by one stride from row to row."""

from torch import Tensor


def with_rows_whole(tensor: Tensor) -> Tensor:
    """`tensor` `[T, .., d]` with each of its T entries in one piece of memory."""
    whole = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != whole:
            return tensor.contiguous()
        whole *= size
    return tensor


def fitting(q: Tensor, kv: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """`q` `[T, nh, d]` and `kv` `[T, parts, nkv, d]`, rows whole, for a `pool` `[layers, slots, parts, nkv, d]`.

    Raises:
        ValueError: they are of another dtype or width than the pool's cells, which a kernel would not notice.
    """
    if q.dtype != pool.dtype or kv.dtype != q.dtype or kv.shape[1:] != pool.shape[2:]:
        raise ValueError(f"cells {list(kv.shape)} of {kv.dtype} for a pool {list(pool.shape)} of {pool.dtype}")
    return with_rows_whole(q), with_rows_whole(kv)
