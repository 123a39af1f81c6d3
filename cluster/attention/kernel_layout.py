"""Checks of tensors before C and Triton kernels read them by address and row stride."""

from torch import Tensor

from cluster.kv.pool import KVPool


def with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` `[T, .., d]`, copied if one of its T entries is not contiguous. Gaps between entries may stay."""
    contiguous_stride = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != contiguous_stride:
            return tensor.contiguous()
        contiguous_stride *= size
    return tensor


def checked_cells(q: Tensor, kv: Tensor | None, pool: KVPool) -> tuple[Tensor, Tensor | None]:
    """Return `q` `[T, nh, d]` and `kv` `[T, *Cell.shape]` (or None) with contiguous rows, checked against the pool's
    cells.

    Raises:
        ValueError: the dtype or cell shape differs from the pool's. The kernels do not check this.
    """
    if q.dtype != pool.dtype:
        raise ValueError(f"queries of {q.dtype} for a pool of {pool.dtype}")
    if kv is None:
        return with_contiguous_rows(q), None
    if kv.dtype != q.dtype or kv.shape[1:] != pool.cell.shape:
        raise ValueError(f"cells {list(kv.shape)} of {kv.dtype} for a pool of {list(pool.cell.shape)} of {pool.dtype}")
    return with_contiguous_rows(q), with_contiguous_rows(kv)
