"""The attention primitive in C, for a CPU. It reads the page table and the pages in place, without copies.

Its results equal those of `TorchAttention` up to rounding. In addition, the exact bits of a row depend only on the
cells that the row sees, not on the batch or the tree (`kernels/attend/attend.c`).
"""

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from cluster.attention.kernel_layout import checked_cells, with_contiguous_rows
from cluster.attention.shape import AttentionShape
from cluster.batch import AttentionMetadata, HostBounds
from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool

POINTERS = (
    *("memory", "q", "kv", "sinks", "out", "write", "pages", "window_pages", "tree_rows", "tree_lens", "bits"),
    *("text_rows", "text_starts", "indptr"),
)
NUMBERS = (
    *("rows", "q_stride", "kv_stride", "heads", "kv_heads", "size", "value", "cell", "values", "latent"),
    *("pages_each", "page_size"),
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
    """Attention of the layers in one KV pool, by the C function of a `library`."""

    def __init__(self, pool: KVPool, table: PageTable, shape: AttentionShape, library: Library) -> None:
        """Bind to a pool of float64, float32 or bfloat16, and to the page table of the rank. `shape` is the shape of
        the model's attention.
        """
        cell = pool.cell
        self._attend = library.functions["attend", pool.dtype]
        self._pool, self._pages = pool, table.device_pages  # keeps alive the memory that `_constant_fields` points to
        heads, windows, scale = shape.with_defaults(pool)
        self._heads, self._value_dim, self._windows = heads, cell.value_dim, [window or 0 for window in windows]
        self._constant_fields: dict[str, Any] = {
            "pages": table.device_pages.data_ptr(),
            "window_pages": None if pool.window_map is None else pool.window_map.device_pages.data_ptr(),
            "heads": heads,
            "kv_heads": cell.kv_heads,
            "size": cell.key_dim,
            "value": cell.value_dim,
            "cell": cell.numbers,
            "values": cell.values_offset,
            "latent": cell.is_latent,
            "pages_each": table.device_pages.shape[1],
            "page_size": table.page_size,
            "coded": cell.fp8_bytes if pool.fp8 else 0,
            "scale": scale,
        }
        self._bound_tensors: list[Tensor] = []  # keeps alive the tensors that `_step_arguments` points to
        self._step_arguments = AttendStruct()

    def prepare(self, bounds: HostBounds) -> None:
        """Do nothing: the C kernel reads lengths from the tensors themselves, so it needs no bounds."""

    def bind(self, metadata: AttentionMetadata) -> None:
        """Use `metadata` for the attention calls of the next forward."""
        tensors = {"write": metadata.write}
        arguments = AttendStruct(**self._constant_fields, first=metadata.first)
        if (tree := metadata.tree) is not None:
            bits = with_contiguous_rows(tree.bits)
            tensors |= {"tree_rows": tree.rows, "tree_lens": tree.lens, "bits": bits}
            arguments.requests, (_, arguments.each, arguments.words) = tree.rows.shape[0], bits.shape
            arguments.bits_stride = 0 if bits.shape[0] == 1 else bits.stride(0)  # 0: all requests share one mask
        if (prompt := metadata.text) is not None:
            tensors |= {"text_rows": prompt.rows, "text_starts": prompt.starts, "indptr": prompt.indptr}
            arguments.chunks = prompt.rows.shape[0]
        self._bound_tensors = [tensor if name == "bits" else tensor.contiguous() for name, tensor in tensors.items()]
        for name, tensor in zip(tensors, self._bound_tensors, strict=True):
            setattr(arguments, name, tensor.data_ptr())
        self._step_arguments = arguments

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Write kv `[T, *Cell.shape]` to the pool, unless it is None. Then compute the attention of the queries q
        `[T, nh, d]`, and return the result `[T, nh * dv]`.
        """
        q, kv = checked_cells(q, kv, self._pool)
        out = q.new_empty(q.shape[0], self._heads * self._value_dim)
        arguments = AttendStruct.from_buffer_copy(self._step_arguments)  # a recorded call keeps its own struct
        arguments.memory, arguments.q = self._pool.kv[layer].data_ptr(), q.data_ptr()
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.out, arguments.window = out.data_ptr(), self._windows[layer]
        arguments.rows, arguments.q_stride = q.shape[0], q.stride(0)
        if kv is not None:
            arguments.kv, arguments.kv_stride = kv.data_ptr(), kv.stride(0)
        arguments.threads = torch.get_num_threads()
        native(self._attend, byref(arguments))
        return out
