"""C kernels that replace torch's arithmetic on a few numbers, in captured programs on a CPU. The docstring of
`c_copies` says why.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from functools import partial
from itertools import chain, product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cluster.kernels.library import Library

MAX_NUMBERS = 2048
"""The most numbers of an operator's output; torch is faster for more."""
MAX_VECTOR_NUMBERS = 1 << 16
"""The same for sums, differences and products of float32 in contiguous rows, which C computes in vectors."""
MAX_CALLS = 64
"""The most calls for one result. A call has two dimensions, so tensors of more may need several calls."""
KINDS = (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64)
FLOATS, INTEGERS = (torch.float32, torch.float64), (torch.int64, torch.int32)
ADD, SUBTRACT, MULTIPLY, EQUAL, UNEQUAL, LESS, GREATER, AT_MOST, AT_LEAST = range(9)
DIVIDE, REMAINDER, MINIMUM, MAXIMUM, OR, AND, COPY, CHOOSE, SUM, CUMULATIVE_PRODUCT = range(9, 19)
COMPARISONS = (EQUAL, UNEQUAL, LESS, GREATER, AT_MOST, AT_LEAST)
FLOAT_OPERATIONS = (ADD, SUBTRACT, MULTIPLY, *COMPARISONS, COPY)
Call = partial[None]
Options = Mapping[str, Any]
aten = torch.ops.aten
BINARY_OPERATIONS = {
    aten.add.Tensor: ADD,
    aten.add_.Tensor: ADD,
    aten.sub.Tensor: SUBTRACT,
    aten.mul.Tensor: MULTIPLY,
    aten.mul_.Tensor: MULTIPLY,
    aten.eq.Tensor: EQUAL,
    aten.eq.Scalar: EQUAL,
    aten.ne.Tensor: UNEQUAL,
    aten.ne.Scalar: UNEQUAL,
    aten.lt.Tensor: LESS,
    aten.lt.Scalar: LESS,
    aten.gt.Tensor: GREATER,
    aten.gt.Scalar: GREATER,
    aten.le.Tensor: AT_MOST,
    aten.le.Scalar: AT_MOST,
    aten.ge.Tensor: AT_LEAST,
    aten.ge.Scalar: AT_LEAST,
    aten.maximum.default: MAXIMUM,
    aten.minimum.default: MINIMUM,
    aten.bitwise_or.Tensor: OR,
    aten.__or__.Tensor: OR,
    aten.bitwise_and.Tensor: AND,
    aten.__and__.Tensor: AND,
    aten.__iand__.Tensor: AND,
    aten.floor_divide.default: DIVIDE,
    aten.remainder.Scalar: REMAINDER,
    aten.remainder.Tensor: REMAINDER,
}
"""Operators with two arguments. A call with options is not replaced."""
POINTER_FIELDS = ("a", "b", "out")
INTEGER_FIELDS = (
    *("rows", "columns", "a_kind", "a_row", "a_column", "b_kind", "b_row", "b_column"),
    *("out_kind", "out_row", "out_column", "operation", "floats"),
)


class NumbersStruct(Structure):
    """The C struct `aerie_numbers`, field by field."""

    _fields_ = (*((name, c_void_p) for name in POINTER_FIELDS), *((name, c_int64) for name in INTEGER_FIELDS))


class NumberKernels:
    """Replaces torch operators by calls of one library's kernel `numbers`."""

    def __init__(self, library: Library) -> None:
        self._function = library.functions["numbers", torch.float32]  # serves all dtypes: they are among its arguments
        binary_operations = {
            operator: partial(self._binary, operation) for operator, operation in BINARY_OPERATIONS.items()
        }
        self._replacements: dict[OpOverload, Callable[..., list[Call] | None]] = {
            **binary_operations,
            aten.div.Tensor_mode: self._divide,
            aten.clamp.default: self._clamp,
            aten.clamp_.default: self._clamp,
            aten.to.dtype: self._to,
            aten._to_copy.default: self._to,
            aten.zero_.default: lambda out, options, *_: self._fill(out, 0),
            aten.new_zeros.default: lambda out, options, *_: self._fill(out, 0),
            aten.zeros_like.default: lambda out, options, *_: self._fill(out, 0),
            aten.fill_.Scalar: lambda out, options, a, number: self._fill(out, number),
            aten.bitwise_not.default: self._not,
            aten.pad.default: self._pad,
            aten.where.self: self._where,
            aten.where.ScalarOther: self._where,
            aten.where.ScalarSelf: self._where,
            aten.arange.default: self._arange,
            aten.arange.start: self._arange,
            aten.repeat_interleave.self_int: self._repeat,
            aten.cumprod.default: self._cumulative_product,
            aten.sum.dim_IntList: self._sum,
        }

    def __call__(
        self, function: OpOverload, args: Sequence[Any], options: Options, outputs: Sequence[Tensor]
    ) -> list[Call] | None:
        """Return calls that fill the output of `function(*args, **options)`; None if C does not support the case."""
        replacement = self._replacements.get(function)
        if replacement is None or len(outputs) != 1 or not outputs[0].numel():
            return None
        return replacement(outputs[0], {key: value for key, value in options.items() if key != "out"}, *args)

    def _binary(self, operation: int, out: Tensor, options: Options, a: Any, b: Any) -> list[Call] | None:
        return None if options else self._call(operation, out, a, b)

    def _divide(self, out: Tensor, options: Options, a: Any, b: Any) -> list[Call] | None:
        return self._call(DIVIDE, out, a, b) if options == {"rounding_mode": "floor"} else None

    def _clamp(self, out: Tensor, options: Options, a: Tensor, *bounds: Any) -> list[Call] | None:
        minimum, maximum = (*bounds, options.get("min"), options.get("max"))[:2]
        if (minimum is None) == (maximum is None):
            return None
        return self._call(MINIMUM, out, a, maximum) if minimum is None else self._call(MAXIMUM, out, a, minimum)

    def _to(self, out: Tensor, options: Options, a: Tensor, *_: Any) -> list[Call] | None:
        return self._copy(out, a)

    def _copy(self, out: Tensor, a: Tensor) -> list[Call] | None:
        return self._call(COPY, out, a, a)

    def _fill(self, out: Tensor, number: int) -> list[Call] | None:
        return self._copy(out, torch.tensor(number, dtype=out.dtype))

    def _not(self, out: Tensor, options: Options, a: Tensor) -> list[Call] | None:
        return self._call(EQUAL, out, a, 0) if a.dtype == torch.bool else None

    def _pad(
        self, out: Tensor, options: Options, a: Tensor, pads: Sequence[int], mode: str = "constant", value: Any = None
    ) -> list[Call] | None:
        if len(pads) != 2 or mode != "constant" or min(pads) < 0:
            return None
        end = pads[0] + a.shape[-1]
        borders = [part for part in (out[..., : pads[0]], out[..., end:]) if part.numel()]
        return _all_of(
            self._copy(out[..., pads[0] : end], a),
            *(self._fill(part, 0 if value is None else value) for part in borders),
        )

    def _where(self, out: Tensor, options: Options, condition: Tensor, a: Any, b: Any) -> list[Call] | None:
        if out.dtype in FLOATS:
            return None
        return _all_of(self._call(COPY, out, b, b), self._call(CHOOSE, out, condition, a))

    def _arange(self, out: Tensor, options: Options, *bounds: Any) -> list[Call] | None:
        return self._copy(out, torch.arange(*bounds)) if out.dtype == torch.int64 else None

    def _repeat(self, out: Tensor, options: Options, a: Tensor, times: int, *_: Any) -> list[Call] | None:
        is_supported = a.dim() == 1 and times * a.shape[0] == out.shape[0] and out.is_contiguous()
        return self._call(COPY, out.view(-1, times), a[:, None], a[:, None]) if is_supported else None

    def _cumulative_product(self, out: Tensor, options: Options, a: Tensor, dim: int) -> list[Call] | None:
        is_supported = a.dim() == 2 and dim in (1, -1) and not options
        return (
            self._call(CUMULATIVE_PRODUCT, out, a, a, by_rows=True)
            if is_supported and out.dtype == torch.int64
            else None
        )

    def _sum(self, out: Tensor, options: Options, a: Tensor, dims: Sequence[int], *_: Any) -> list[Call] | None:
        if dims is None or list(dims) not in ([-1], [a.dim() - 1]) or options.get("dtype", out.dtype) != out.dtype:
            return None
        if not 0 < a.numel() <= MAX_NUMBERS or a.dim() < 2 or not (a.is_contiguous() or a.dim() == 2):
            return None
        if a.dtype in FLOATS or out.dtype not in INTEGERS or not out.is_contiguous():
            return None
        # The output is expanded to the shape of `a` with stride 0 along the sum.
        rows = a.flatten(0, -2)
        return self._call(SUM, out.view(-1, 1).expand(rows.shape), rows, rows, by_rows=True)

    def _call(self, operation: int, out: Tensor, a: Any, b: Any, by_rows: bool = False) -> list[Call] | None:
        """Return calls that compute `out`; None if C does not support a dtype or shape. `by_rows`: the
        operation goes along the rows of a matrix, as a sum does, so dimensions are not merged.
        """
        a_tensor, b_tensor = _as_tensor(a), _as_tensor(b)
        if a_tensor is None or b_tensor is None:
            return None
        tensors = a_tensor, b_tensor, out
        dtypes = {tensor.dtype for tensor in tensors}
        any_float = not dtypes.isdisjoint(FLOATS)
        # Torch computes with a tensor of no dimension in the dtype of the other tensor, which may be narrower.
        if min(a_tensor.dim(), b_tensor.dim()) == 0 and isinstance(b, Tensor) and a_tensor.dtype != b_tensor.dtype:
            return None
        if not dtypes <= set(KINDS) or (any_float and not _floats_are_supported(operation, out, a, b)):
            return None
        # A broadcast dimension has stride 0.
        strides = [tensor.expand(out.shape).stride() for tensor in tensors]
        dimensions = list(zip(out.shape, *strides, strict=True))
        *outer, rows, columns = dimensions if by_rows else _merged(dimensions)
        is_vector = dtypes == {torch.float32} and operation in (ADD, SUBTRACT, MULTIPLY) and set(columns[1:]) == {1}
        if out.numel() > (MAX_VECTOR_NUMBERS if is_vector else MAX_NUMBERS) or prod(d[0] for d in outer) > MAX_CALLS:
            return None
        calls = list[Call]()
        for index in product(*(range(dimension[0]) for dimension in outer)):
            arguments = NumbersStruct(operation=operation, floats=any_float, rows=rows[0], columns=columns[0])
            for number, (name, tensor) in enumerate(zip(POINTER_FIELDS, tensors, strict=True), start=1):
                offset = sum(i * dimension[number] for i, dimension in zip(index, outer, strict=True))
                setattr(arguments, name, tensor.data_ptr() + offset * tensor.itemsize)
                setattr(arguments, f"{name}_kind", KINDS.index(tensor.dtype))
                setattr(arguments, f"{name}_row", rows[number] * tensor.itemsize)
                setattr(arguments, f"{name}_column", columns[number] * tensor.itemsize)
            call = partial(self._function, byref(arguments))
            call.inputs = a_tensor, b_tensor  # type: ignore[attr-defined]
            calls.append(call)
        return calls


def _merged(dimensions: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Merge neighbouring dimensions that can be walked as one, and drop dimensions of size 1; at least two remain. A
    dimension is its size and the strides of all tensors, in numbers.
    """
    merged = [(1,) * 4, *(dimension for dimension in dimensions if dimension[0] != 1)]
    for index in range(len(merged) - 1, 1, -1):
        (outer_size, *outer), (size, *inner) = merged[index - 1 : index + 1]
        if outer == [size * stride for stride in inner]:
            merged[index - 1 : index + 1] = [(outer_size * size, *inner)]
    return merged if len(merged) > 1 else [(1,) * 4, *merged]


def _all_of(*parts: list[Call] | None) -> list[Call] | None:
    """Return the calls of all parts, in order; None if a part is None."""
    supported = [part for part in parts if part is not None]
    return list(chain.from_iterable(supported)) if len(supported) == len(parts) else None


def _as_tensor(number: Any) -> Tensor | None:
    """Return `number`, a tensor or an int, as a tensor; None if it is anything else."""
    if isinstance(number, int):
        return torch.tensor(number, dtype=torch.int64)
    return number if isinstance(number, Tensor) else None


def _floats_are_supported(operation: int, out: Tensor, a: Any, b: Any) -> bool:
    """Return whether C computes floats as torch does. It does so for sums, differences and products in one dtype, for
    comparisons in one dtype or with a small integer, and for copies to floats.
    """
    if operation not in FLOAT_OPERATIONS:
        return False
    a_is_float = isinstance(a, Tensor) and a.dtype in FLOATS
    if operation in COMPARISONS:
        return a_is_float and (b.dtype == a.dtype if isinstance(b, Tensor) else abs(b) < 1 << 20)
    if operation == COPY:
        return out.dtype in FLOATS
    return a_is_float and isinstance(b, Tensor) and b.dtype == a.dtype == out.dtype
