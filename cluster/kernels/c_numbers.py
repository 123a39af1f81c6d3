"""C kernels that replace torch's arithmetic on a few numbers, in captured programs on a CPU. `c_copies` says why."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cluster.kernels.library import Library

MOST = 2048
"""The most numbers of one call; torch is faster for more."""
KINDS = (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64)
FLOATS = (torch.float32, torch.float64)
ADD, SUBTRACT, MULTIPLY, EQUAL, UNEQUAL, DIVIDE, REMAINDER, LEAST, COPY, SUM, PRODUCTS = range(11)
OF_FLOATS = (ADD, SUBTRACT, MULTIPLY, EQUAL, UNEQUAL, COPY)
Call = partial[None]
Options = Mapping[str, Any]
aten = torch.ops.aten
OPERATIONS = {
    aten.add.Tensor: ADD,
    aten.add_.Tensor: ADD,
    aten.sub.Tensor: SUBTRACT,
    aten.mul.Tensor: MULTIPLY,
    aten.mul_.Tensor: MULTIPLY,
    aten.eq.Tensor: EQUAL,
    aten.eq.Scalar: EQUAL,
    aten.ne.Tensor: UNEQUAL,
    aten.ne.Scalar: UNEQUAL,
    aten.remainder.Scalar: REMAINDER,
    aten.remainder.Tensor: REMAINDER,
}
"""Operators with two arguments and no options."""
PLACES = ("a", "b", "out")
NUMBERS = (
    *("rows", "columns", "a_kind", "a_row", "a_column", "b_kind", "b_row", "b_column"),
    *("out_kind", "out_row", "out_column", "operation", "floats"),
)


class NumbersStruct(Structure):
    """The C struct `aerie_numbers`, field by field."""

    _fields_ = (*((name, c_void_p) for name in PLACES), *((name, c_int64) for name in NUMBERS))


class NumberKernels:
    """Replaces torch operators by calls of one library's kernel `numbers`."""

    def __init__(self, library: Library) -> None:
        self._run = library.functions["numbers", torch.float32]  # serves all dtypes: they are among its arguments
        known = {of: partial(self._two, operation) for of, operation in OPERATIONS.items()}
        self._known: dict[OpOverload, Callable[..., list[Call] | None]] = {
            **known,
            aten.div.Tensor_mode: self._divide,
            aten.clamp.default: self._clamp,
            aten.to.dtype: self._to,
            aten._to_copy.default: self._to,
            aten.zero_.default: lambda out, options, *_: self._filled(out, 0),
            aten.new_zeros.default: lambda out, options, *_: self._filled(out, 0),
            aten.arange.default: self._arange,
            aten.arange.start: self._arange,
            aten.repeat_interleave.self_int: self._repeat,
            aten.cumprod.default: self._products,
            aten.sum.dim_IntList: self._sum,
        }

    def __call__(
        self, function: OpOverload, args: Sequence[Any], options: Options, outputs: Sequence[Tensor]
    ) -> list[Call] | None:
        """Return calls that fill the output of `function(*args, **options)`; None if C does not support the case."""
        known = self._known.get(function)
        if known is None or len(outputs) != 1 or not 0 < outputs[0].numel() <= MOST:
            return None
        return known(outputs[0], {key: value for key, value in options.items() if key != "out"}, *args)

    def _two(self, operation: int, out: Tensor, options: Options, a: Any, b: Any) -> list[Call] | None:
        return None if options else self._made(operation, out, a, b)

    def _divide(self, out: Tensor, options: Options, a: Any, b: Any) -> list[Call] | None:
        return self._made(DIVIDE, out, a, b) if options == {"rounding_mode": "floor"} else None

    def _clamp(self, out: Tensor, options: Options, a: Tensor, *bounds: Any) -> list[Call] | None:
        least, most = (*bounds, None, None)[:2]
        return None if options or least is not None or most is None else self._made(LEAST, out, a, most)

    def _to(self, out: Tensor, options: Options, a: Tensor, *_: Any) -> list[Call] | None:
        return self._copy(out, a)

    def _copy(self, out: Tensor, a: Tensor) -> list[Call] | None:
        return self._made(COPY, out, a, a)

    def _filled(self, out: Tensor, number: int) -> list[Call] | None:
        return self._copy(out, torch.tensor(number, dtype=out.dtype))

    def _arange(self, out: Tensor, options: Options, *bounds: Any) -> list[Call] | None:
        return self._copy(out, torch.arange(*bounds)) if out.dtype == torch.int64 else None

    def _repeat(self, out: Tensor, options: Options, a: Tensor, times: int, *_: Any) -> list[Call] | None:
        alone = a.dim() == 1 and times * a.shape[0] == out.shape[0] and out.is_contiguous()
        return self._made(COPY, out.view(-1, times), a[:, None], a[:, None]) if alone else None

    def _products(self, out: Tensor, options: Options, a: Tensor, dim: int) -> list[Call] | None:
        along = a.dim() == 2 and dim in (1, -1) and not options
        return self._made(PRODUCTS, out, a, a) if along and out.dtype == torch.int64 else None

    def _sum(
        self, out: Tensor, options: Options, a: Tensor, dims: Sequence[int], keep: bool = False
    ) -> list[Call] | None:
        along = a.dim() == 2 and list(dims) in ([1], [-1]) and not options and out.dtype == torch.int64
        if not along or not 0 < a.numel() <= MOST:
            return None
        # The output is expanded to the shape of `a` with stride 0 along the sum.
        return self._made(SUM, (out if keep else out[:, None]).expand(a.shape), a, a)

    def _made(self, operation: int, out: Tensor, a: Any, b: Any) -> list[Call] | None:
        """Return one call; None if C does not support a dtype or shape."""
        one, other = _tensor(a), _tensor(b)
        if one is None or other is None or out.dim() > 2:
            return None
        dtypes = {each.dtype for each in (one, other, out)}
        floats = not dtypes.isdisjoint(FLOATS)
        if not dtypes <= set(KINDS) or (floats and not _alike(operation, out, a, b)):
            return None
        given = NumbersStruct(operation=operation, floats=floats)
        given.rows, given.columns = shape = (*(1,) * (2 - out.dim()), *out.shape)
        for name, tensor in zip(PLACES, (one, other, out), strict=True):
            whole = tensor.expand(out.shape).view(shape)  # broadcast dimensions get stride 0
            setattr(given, name, tensor.data_ptr())
            setattr(given, f"{name}_kind", KINDS.index(tensor.dtype))
            setattr(given, f"{name}_row", whole.stride(0) * tensor.itemsize)
            setattr(given, f"{name}_column", whole.stride(1) * tensor.itemsize)
        call = partial(self._run, byref(given))
        call.read = one, other  # type: ignore[attr-defined]
        return [call]


def _tensor(number: Any) -> Tensor | None:
    """Return `number`, a tensor or an int, as a tensor; None if it is anything else."""
    if isinstance(number, int):
        return torch.tensor(number, dtype=torch.int64)
    return number if isinstance(number, Tensor) else None


def _alike(operation: int, out: Tensor, a: Any, b: Any) -> bool:
    """Return whether C computes floats as torch does: sums and products in one dtype, comparisons in one dtype or with
    a small integer, and copies from any float dtype to any other.
    """
    if operation not in OF_FLOATS:
        return False
    same = isinstance(a, Tensor) and a.dtype in FLOATS
    if operation in (EQUAL, UNEQUAL):
        return same and (b.dtype == a.dtype if isinstance(b, Tensor) else abs(b) < 1 << 20)
    if operation == COPY:
        return same and out.dtype in FLOATS
    return same and isinstance(b, Tensor) and b.dtype == a.dtype == out.dtype
