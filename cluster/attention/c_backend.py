"""The attention primitive in C, for a CPU. It reads the page table and the pages in place, without copies.

Its results equal those of `TorchAttention` up to rounding. In addition, the exact bits of a row depend only on the
cells that the row sees, not on the batch or the tree (`kernels/attend/attend.c`).
"""

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from cluster.attention.kernel_layout import fitting, with_rows_whole
from cluster.attention.shape import AttentionShape
from cluster.batch import AttentionMetadata, HostBounds
from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool

POINTERS = (
    *("memory", "q", "kv", "sinks", "out", "write", "pages", "tree_rows", "tree_lens", "bits"),
    *("text_rows", "text_starts", "indptr"),
)
NUMBERS = (
    *("rows", "q_stride", "kv_stride", "parts", "heads", "kv_heads", "size", "value", "pages_each", "page_size"),
    *("requests", "each", "words", "bits_stride", "chunks", "first", "window", "threads", "coded"),
)


class AttendStruct(Structure):
    """The C struct `aerie_attend`, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in POINTERS),
        *((name, c_int64) for name in NUMBERS),
        ("scale", c_double),
    )


class CAttention:
    """Attention over one runner's pool, by the C function of a `library`."""

    def __init__(self, pool: KVPool, table: PageTable, shape: AttentionShape, library: Library) -> None:
        """Bind to a pool of float64, float32 or bfloat16. The arguments are as in `TorchAttention`."""
        parts, kv_heads, size = pool.cell
        self._run = library.functions["attend", pool.dtype]
        self._pool, self._pages = pool, table.device_pages  # keeps alive the memory that `_fixed` points to
        heads, windows, scale, value_dim = shape.filled(pool)
        self._heads, self._value_dim, self._windows = heads, value_dim, [window or 0 for window in windows]
        self._fixed: dict[str, Any] = {
            "pages": table.device_pages.data_ptr(),
            "parts": parts,
            "heads": heads,
            "kv_heads": kv_heads,
            "size": size,
            "value": value_dim,
            "pages_each": table.device_pages.shape[1],
            "page_size": table.page_size,
            "coded": 0 if pool.coded is None else pool.coded.nbytes,
            "scale": scale,
        }
        self._held: list[Tensor] = []  # keeps alive the tensors that `_bound` points to
        self._bound = AttendStruct()

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step. The C kernel reads lengths from the tensors themselves, so it needs no bounds."""

    def bind(self, seen: AttentionMetadata) -> None:
        """Use `seen` for the calls of the next forward."""
        given = {"write": seen.write}
        bound = AttendStruct(**self._fixed, first=seen.first)
        if (tree := seen.tree) is not None:
            bits = with_rows_whole(tree.bits)
            given |= {"tree_rows": tree.rows, "tree_lens": tree.lens, "bits": bits}
            bound.requests, (_, bound.each, bound.words) = tree.rows.shape[0], bits.shape
            bound.bits_stride = 0 if bits.shape[0] == 1 else bits.stride(0)  # 0: all requests share one mask
        if (text := seen.text) is not None:
            given |= {"text_rows": text.rows, "text_starts": text.starts, "indptr": text.indptr}
            bound.chunks = text.rows.shape[0]
        self._held = [tensor if name == "bits" else tensor.contiguous() for name, tensor in given.items()]
        for name, tensor in zip(given, self._held, strict=True):
            setattr(bound, name, tensor.data_ptr())
        self._bound = bound

    def __call__(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write kv `[T, 2, nkv, d]` or `[T, 1, 1, d]` to the pool, then attend q `[T, nh, d]` -> `[T, nh * dv]`."""
        q, kv = fitting(q, kv, self._pool)
        out = q.new_empty(q.shape[0], self._heads * self._value_dim)
        given = AttendStruct.from_buffer_copy(self._bound)  # a recorded call keeps its own arguments
        given.memory, given.q, given.kv = self._pool.kv[layer].data_ptr(), q.data_ptr(), kv.data_ptr()
        given.sinks = None if sinks is None else sinks.data_ptr()
        given.out, given.window = out.data_ptr(), self._windows[layer]
        given.rows, given.q_stride, given.kv_stride = q.shape[0], q.stride(0), kv.stride(0)
        given.threads = torch.get_num_threads()
        native(self._run, byref(given))
        return out
