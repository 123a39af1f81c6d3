"""C kernels in place of torch operators that copy rows, in captured programs on a CPU (tapes).

A torch operator takes 5 to 10 microseconds for a few rows, and a step has about thirty of them.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cluster.kernels.library import Library

MOST_BYTES = 1 << 20
"""The most bytes that one call copies; for more, torch is faster, as it uses several threads."""
Call = partial[None]
aten = torch.ops.aten
PLACES = ("table", "row_ids", "column_ids", "out")
NUMBERS = (
    *("rows", "columns", "size", "table_rows", "table_columns", "row_stride", "column_stride"),
    *("row_ids_row", "row_ids_column", "column_ids_row", "column_ids_column", "wraps"),
)


class CellsStruct(Structure):
    """The C struct `aerie_cells`, field by field."""

    _fields_ = (*((name, c_void_p) for name in PLACES), *((name, c_int64) for name in NUMBERS))


class Copies:
    """Replaces torch operators by calls of one library's copying kernels."""

    def __init__(self, library: Library) -> None:
        # These kernels move bytes, so the functions of any dtype serve all dtypes.
        found = (library.functions[name, torch.float32] for name in ("gather", "scatter", "place", "cells"))
        self._gather, self._scatter, self._place, self._cells = found
        self._known: dict[OpOverload, Callable[..., list[Call] | None]] = {
            aten.index_select.default: self._select,
            aten.embedding.default: lambda out, table, ids, *_: self._gathered(out, table, ids),
            aten.take.default: self._take,
            aten.index_copy_.default: self._copy_rows,
            aten.cat.default: self._cat,
            aten.cat.out: self._cat,
            aten.gather.default: self._pick,
            aten.index.Tensor: self._index,
        }

    def __call__(
        self, function: OpOverload, args: Sequence[Any], options: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> list[Call] | None:
        """Return calls that fill the output of `function(*args, **options)`; None if C does not support the case.

        The calls keep their argument structs alive, but not the tensors to which the structs point.
        """
        known = self._known.get(function)
        if known is None or len(outputs) != 1 or not 0 < outputs[0].nbytes <= MOST_BYTES or options.keys() - {"out"}:
            return None
        return known(outputs[0], *args)

    def _select(self, out: Tensor, table: Tensor, dim: int, ids: Tensor) -> list[Call] | None:
        return self._gathered(out, table, ids) if dim == 0 and table.dim() else None

    def _take(self, out: Tensor, table: Tensor, ids: Tensor) -> list[Call] | None:
        return self._gathered(out, table.view(-1), ids, wraps=True) if table.is_contiguous() else None

    def _gathered(self, out: Tensor, table: Tensor, ids: Tensor, wraps: bool = False) -> list[Call] | None:
        size = _row_bytes(table)
        if not (_are_flat(out, table, ids) and _are_ids(ids) and out.nbytes == ids.numel() * size):
            return None
        places, wide = (table.data_ptr(), ids.data_ptr(), out.data_ptr()), ids.dtype == torch.int64
        return [partial(self._gather, *places, ids.numel(), size, table.shape[0], wide, wraps)]

    def _copy_rows(self, table: Tensor, same: Tensor, dim: int, ids: Tensor, given: Tensor) -> list[Call] | None:
        size = _row_bytes(table)
        flat = _are_flat(table, ids, given) and given.dtype == table.dtype
        if not (dim == 0 and flat and _are_ids(ids) and given.nbytes == ids.numel() * size):
            return None
        places, wide = (table.data_ptr(), ids.data_ptr(), given.data_ptr()), ids.dtype == torch.int64
        return [partial(self._scatter, *places, ids.numel(), size, table.shape[0], wide)]

    def _cat(self, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> list[Call] | None:
        dim %= out.dim()
        # `out` is `count` rows of `whole` bytes; each part fills its own columns of all rows, from byte `at` on.
        count, whole = prod(out.shape[:dim]), prod(out.shape[dim:]) * out.itemsize
        calls, at = list[Call](), out.data_ptr()
        for part in parts:
            # A matrix whose rows are contiguous, at any row stride, joined along its columns.
            spaced = part.dim() == 2 == dim + 1 and (part.stride(1) == 1 or part.shape[1] == 1)
            if part.dtype != out.dtype or part.dim() != out.dim() or not (part.is_contiguous() or spaced):
                return None
            size = prod(part.shape[dim:]) * out.itemsize
            stride = part.stride(0) * out.itemsize if spaced else size
            if size:
                calls.append(partial(self._place, part.data_ptr(), at, count, size, stride, whole))
            at += size
        return calls if out.is_contiguous() else None

    def _pick(self, out: Tensor, table: Tensor, dim: int, ids: Tensor) -> list[Call] | None:
        if not (table.dim() == 2 and dim in (1, -1) and out.is_contiguous() and ids.dtype == torch.int64):
            return None
        own = CellsStruct(rows=ids.shape[0], columns=ids.shape[1], wraps=False, table_rows=ids.shape[0])
        own.column_ids, own.column_ids_row, own.column_ids_column = ids.data_ptr(), *_strides(ids)
        return self._of_cells(own, out, table)

    def _index(self, out: Tensor, table: Tensor, ids: Sequence[Tensor | None]) -> list[Call] | None:
        if table.dim() != 2 or out.dim() != 2 or len(ids) != 2 or not out.is_contiguous():
            return None
        if any(each is None or each.dtype != torch.int64 for each in ids):
            return None
        rows, columns = (each.expand(out.shape) for each in ids if each is not None)
        own = CellsStruct(rows=out.shape[0], columns=out.shape[1], wraps=True, table_rows=table.shape[0])
        own.row_ids, own.row_ids_row, own.row_ids_column = rows.data_ptr(), *_strides(rows)
        own.column_ids, own.column_ids_row, own.column_ids_column = columns.data_ptr(), *_strides(columns)
        return self._of_cells(own, out, table)

    def _of_cells(self, own: CellsStruct, out: Tensor, table: Tensor) -> list[Call]:
        own.table, own.out, own.size, own.table_columns = table.data_ptr(), out.data_ptr(), out.itemsize, table.shape[1]
        own.row_stride, own.column_stride = (stride * table.itemsize for stride in table.stride())
        return [partial(self._cells, byref(own))]


def _strides(ids: Tensor) -> tuple[int, int]:
    """Return the strides of a matrix of ids, in elements."""
    return ids.stride(0), ids.stride(1)


def _row_bytes(table: Tensor) -> int:
    return prod(table.shape[1:]) * table.itemsize


def _are_ids(ids: Tensor) -> bool:
    return ids.dtype in (torch.int64, torch.int32)


def _are_flat(*tensors: Tensor) -> bool:
    return all(each.is_contiguous() for each in tensors)
