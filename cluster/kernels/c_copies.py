"""C kernels that replace torch's row-copying operators in captured programs on a CPU (tapes).

A torch operator takes 5 to 10 microseconds for a few rows, and a step has about thirty of them.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cluster.kernels.library import Library

MAX_BYTES = 1 << 20
"""The most bytes that an operator writes. For more bytes torch is faster, as it uses several threads."""
MAX_CALLS, MAX_BLOCKS = 64, 4096
"""The most calls that replace a reshape, and the most blocks of bytes that they copy."""
Call = partial[None]
aten = torch.ops.aten
POINTER_FIELDS = ("table", "row_ids", "column_ids", "out")
INTEGER_FIELDS = (
    *("rows", "columns", "size", "table_rows", "table_columns", "row_stride", "column_stride"),
    *("row_ids_row", "row_ids_column", "column_ids_row", "column_ids_column", "wraps"),
)


class CellsStruct(Structure):
    """The C struct `aerie_cells`, field by field."""

    _fields_ = (*((name, c_void_p) for name in POINTER_FIELDS), *((name, c_int64) for name in INTEGER_FIELDS))


class Copies:
    """Replaces torch operators by calls of one library's copying kernels."""

    def __init__(self, library: Library) -> None:
        # These kernels move bytes, so the functions of any dtype serve all dtypes.
        functions = (library.functions[name, torch.float32] for name in ("gather", "scatter", "place", "cells"))
        self._gather, self._scatter, self._place, self._cells = functions
        self._replacements: dict[OpOverload, Callable[..., list[Call] | None]] = {
            aten.index_select.default: self._index_select,
            aten.embedding.default: lambda out, table, ids, *_: self._gather_rows(out, table, ids),
            aten.take.default: self._take,
            aten.index_copy_.default: self._copy_rows,
            aten.cat.default: self._cat,
            aten.cat.out: self._cat,
            aten.reshape.default: lambda out, tensor, *_: self._rearrange(out, tensor),
            aten.contiguous.default: lambda out, tensor, *_: self._rearrange(out, tensor),
            aten.gather.default: self._gather_columns,
            aten.index.Tensor: self._index_cells,
        }

    def __call__(
        self, function: OpOverload, args: Sequence[Any], options: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> list[Call] | None:
        """Return calls that fill the output of `function(*args, **options)`; None if C does not support the case.

        The calls keep their argument structs alive, but not the tensors whose addresses they hold.
        """
        replacement = self._replacements.get(function)
        if replacement is None or len(outputs) != 1 or options.keys() - {"out"}:
            return None
        written = args[3] if function is aten.index_copy_.default else outputs[0]
        return replacement(outputs[0], *args) if 0 < written.nbytes <= MAX_BYTES else None

    def _index_select(self, out: Tensor, table: Tensor, dim: int, ids: Tensor) -> list[Call] | None:
        return self._gather_rows(out, table, ids) if dim == 0 and table.dim() else None

    def _take(self, out: Tensor, table: Tensor, ids: Tensor) -> list[Call] | None:
        return self._gather_rows(out, table.view(-1), ids, negative_ids_wrap=True) if table.is_contiguous() else None

    def _gather_rows(
        self, out: Tensor, table: Tensor, ids: Tensor, negative_ids_wrap: bool = False
    ) -> list[Call] | None:
        if table.dim() == ids.dim() == 1 and not table.is_contiguous() and ids.dtype == torch.int64:
            return self._gather_columns(out, table[None], 1, ids[None])
        row_bytes = _row_bytes(table)
        if not (_are_contiguous(out, table, ids) and _are_ids(ids) and out.nbytes == ids.numel() * row_bytes):
            return None
        addresses, int64_ids = (table.data_ptr(), ids.data_ptr(), out.data_ptr()), ids.dtype == torch.int64
        return [partial(self._gather, *addresses, ids.numel(), row_bytes, table.shape[0], int64_ids, negative_ids_wrap)]

    def _copy_rows(
        self, table: Tensor, destination: Tensor, dim: int, ids: Tensor, source: Tensor
    ) -> list[Call] | None:
        row_bytes = _row_bytes(table)
        all_contiguous = _are_contiguous(table, ids, source) and source.dtype == table.dtype
        if not (dim == 0 and all_contiguous and _are_ids(ids) and source.nbytes == ids.numel() * row_bytes):
            return None
        addresses, int64_ids = (table.data_ptr(), ids.data_ptr(), source.data_ptr()), ids.dtype == torch.int64
        return [partial(self._scatter, *addresses, ids.numel(), row_bytes, table.shape[0], int64_ids)]

    def _cat(self, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[Call] | None:
        dim %= out.dim()
        # `out` is `num_rows` rows of `out_row_bytes` bytes. Each tensor fills some columns of all rows; in the first
        # row, these columns begin at `address`.
        num_rows, out_row_bytes = prod(out.shape[:dim]), prod(out.shape[dim:]) * out.itemsize
        calls, address = list[Call](), out.data_ptr()
        for tensor in tensors:
            if not tensor.numel():
                continue
            # True for a matrix that is joined along its columns and has contiguous rows, at any row stride.
            is_strided_matrix = tensor.dim() == 2 == dim + 1 and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
            if (
                tensor.dtype != out.dtype
                or tensor.dim() != out.dim()
                or not (tensor.is_contiguous() or is_strided_matrix)
            ):
                return None
            tensor_row_bytes = prod(tensor.shape[dim:]) * out.itemsize
            tensor_stride = tensor.stride(0) * out.itemsize if is_strided_matrix else tensor_row_bytes
            calls.append(
                partial(
                    self._place, tensor.data_ptr(), address, num_rows, tensor_row_bytes, tensor_stride, out_row_bytes
                )
            )
            address += tensor_row_bytes
        return calls if out.is_contiguous() else None

    def _rearrange(self, out: Tensor, tensor: Tensor) -> list[Call] | None:
        """Return calls that copy `tensor` to the contiguous `out`, in the same order of numbers."""
        if not out.is_contiguous() or out.dtype != tensor.dtype:
            return None
        # The last dimensions whose numbers lie side by side are copied as blocks of bytes. The dimension before them is
        # the rows of a call, and each index of the others is a call.
        block, dims = out.itemsize, tensor.dim()
        while dims and (tensor.shape[dims - 1] == 1 or tensor.stride(dims - 1) * out.itemsize == block):
            dims -= 1
            block *= tensor.shape[dims]
        rows, stride = (tensor.shape[dims - 1], tensor.stride(dims - 1) * out.itemsize) if dims else (1, block)
        outer_shape = tensor.shape[: max(0, dims - 1)]
        if prod(outer_shape) > MAX_CALLS or prod(outer_shape) * rows > MAX_BLOCKS:
            return None
        calls, address = list[Call](), out.data_ptr()
        for index in product(*map(range, outer_shape)):
            offset = sum(i * step for i, step in zip(index, tensor.stride(), strict=False)) * out.itemsize
            calls.append(partial(self._place, tensor.data_ptr() + offset, address, rows, block, stride, block))
            address += rows * block
        return calls

    def _gather_columns(self, out: Tensor, table: Tensor, dim: int, ids: Tensor) -> list[Call] | None:
        """Replace a lookup along dimension 1. In a table `[n, m, size]`, one id must look up all `size` numbers."""
        is_matrix, is_stack = table.dim() == 2, table.dim() == 3 and (ids.shape[2] == 1 or ids.stride(2) == 0)
        if not (is_matrix or (is_stack and ids.shape[2] == table.shape[2] and _rows_are_contiguous(table))):
            return None
        if not (dim in (1, 1 - table.dim()) and out.is_contiguous() and ids.dtype == torch.int64):
            return None
        arguments = CellsStruct(rows=ids.shape[0], columns=ids.shape[1], wraps=False, table_rows=ids.shape[0])
        arguments.column_ids, arguments.column_ids_row, arguments.column_ids_column = ids.data_ptr(), *_strides(ids)
        return self._cells_call(arguments, out, table)

    def _index_cells(self, out: Tensor, table: Tensor, ids: Sequence[Tensor | None]) -> list[Call] | None:
        if table.dim() != 2 or out.dim() not in (1, 2) or len(ids) != 2 or not out.is_contiguous():
            return None
        out = out[None] if out.dim() == 1 else out
        if any(index is None or index.dtype != torch.int64 for index in ids):
            return None
        rows, columns = (index.expand(out.shape) for index in ids if index is not None)
        arguments = CellsStruct(rows=out.shape[0], columns=out.shape[1], wraps=True, table_rows=table.shape[0])
        arguments.row_ids, arguments.row_ids_row, arguments.row_ids_column = rows.data_ptr(), *_strides(rows)
        arguments.column_ids, arguments.column_ids_row, arguments.column_ids_column = (
            columns.data_ptr(),
            *_strides(columns),
        )
        return self._cells_call(arguments, out, table)

    def _cells_call(self, arguments: CellsStruct, out: Tensor, table: Tensor) -> list[Call]:
        arguments.table, arguments.out, arguments.size, arguments.table_columns = (
            table.data_ptr(),
            out.data_ptr(),
            prod(table.shape[2:]) * out.itemsize,
            table.shape[1],
        )
        arguments.row_stride, arguments.column_stride = (stride * table.itemsize for stride in table.stride()[:2])
        return [partial(self._cells, byref(arguments))]


def _strides(ids: Tensor) -> tuple[int, int]:
    """Return the first two strides of ids, in elements."""
    return ids.stride(0), ids.stride(1)


def _rows_are_contiguous(table: Tensor) -> bool:
    """Return whether the numbers of the last dimension lie side by side."""
    return table.shape[-1] == 1 or table.stride(-1) == 1


def _row_bytes(table: Tensor) -> int:
    return prod(table.shape[1:]) * table.itemsize


def _are_ids(ids: Tensor) -> bool:
    return ids.dtype in (torch.int64, torch.int32)


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)
