"""Tensors as kernels read them: of the pool's cells, and by one stride from row to row."""

from torch import Tensor

from cluster.kv.pool import KVPool


def with_rows_whole(tensor: Tensor) -> Tensor:
    """`tensor` `[T, .., d]` with each of its T entries in one piece of memory."""
    whole = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != whole:
            return tensor.contiguous()
        whole *= size
    return tensor


def fitting(q: Tensor, kv: Tensor, pool: KVPool) -> tuple[Tensor, Tensor]:
    """`q` `[T, nh, d]` and `kv` `[T, parts, nkv, d]`, rows whole, for the cells of a `pool`.

    Raises:
        ValueError: they are of another dtype or width than the pool's cells, which a kernel would not notice.
    """
    if q.dtype != pool.dtype or kv.dtype != q.dtype or kv.shape[1:] != pool.cell:
        raise ValueError(f"cells {list(kv.shape)} of {kv.dtype} for a pool of {list(pool.cell)} of {pool.dtype}")
    return with_rows_whole(q), with_rows_whole(kv)
