"""C arithmetic on small tensors in replayed programs gives the same bits as torch's operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from cluster.capture.tape import Tape
from cluster.kernels.c_numbers import KINDS, MAX_CALLS, MAX_NUMBERS, NumberKernels
from cluster.kernels.joined import _Joined
from tests.unit.kernels.library import c_library

INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float64)
Program = Callable[[Tensor, Tensor], Tensor]
INTEGER_PROGRAMS: dict[str, Program] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "equal": lambda a, b: a == b,
    "unequal": lambda a, b: a != b,
    "less": lambda a, b: a < b,
    "greater": lambda a, b: a > b,
    "less than a number": lambda a, b: a < 2,
    "greater than a number": lambda a, b: a > -1,
    "maximum": lambda a, b: torch.maximum(a, b),
    "minimum": lambda a, b: torch.minimum(a, b),
    "or": lambda a, b: a | b,
    "and": lambda a, b: (a & b) + (a > 0).__iand__(b > 0),
    "not": lambda a, b: ~(a == b),
    "at most": lambda a, b: a <= b,
    "at most a number": lambda a, b: a <= 1,
    "at least": lambda a, b: a >= b,
    "at least a number": lambda a, b: a >= 1,
    "clamp in place": lambda a, b: a.clone().clamp_(max=2),
    "where both are tensors": lambda a, b: torch.where(a < b, a, b[:1]),
    "where the first is a number": lambda a, b: torch.where(a == b, 7, b),
    "fill": lambda a, b: a.clone().fill_(-3),
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "where": lambda a, b: torch.where(a == b, a, -1),
    "pad": lambda a, b: F.pad(a, (1, 2)),
    "pad with a number": lambda a, b: F.pad(a == b, (1, 0), value=True),
    "add a number": lambda a, b: a + 3,
    "equal to a number": lambda a, b: a == 2,
    "divide": lambda a, b: a.div(4, rounding_mode="floor"),
    "divide by a negative number": lambda a, b: a.div(-3, rounding_mode="floor"),
    "divide by a tensor": lambda a, b: a.div(b * 2 + 1, rounding_mode="floor"),
    "remainder": lambda a, b: a.remainder(4),
    "remainder by a negative number": lambda a, b: a.remainder(-3),
    "clamp max": lambda a, b: a.clamp(max=3),
    "clamp min": lambda a, b: a.clamp(min=-2),
    "floor_divide": lambda a, b: a // 3,
    "to float32": lambda a, b: (a * 12345).to(torch.float32),
    "to float64": lambda a, b: a.to(torch.float64),
    "three dimensions": lambda a, b: a[:, None] + b[None],
    "four dimensions": lambda a, b: a[:, None, :, None] * b[None, :, None],
    "in place": lambda a, b: a.clone().mul_(4).add_(b),
    "zero": lambda a, b: a.clone().zero_(),
    "zeros": lambda a, b: a.new_zeros(3, 5),
    "to int64": lambda a, b: a.to(torch.int64),
    "to int32": lambda a, b: (a * 3).to(torch.int32),
    "row and column": lambda a, b: a[:, :1] + b[:1],
    "one row": lambda a, b: a[0] + b,
    "every other column": lambda a, b: a[:, ::2] - b[:, ::2],
    "transposed": lambda a, b: a.t() + b.t(),
    "arange": lambda a, b: torch.arange(2, 7) + a[:, :1],
    "repeat_interleave": lambda a, b: a[:, 0].repeat_interleave(3),
    "cumprod": lambda a, b: a.cumprod(1),
    "sum": lambda a, b: a.sum(1),
    "sum to int32": lambda a, b: a.sum(-1, dtype=torch.int32),
    "sum in three dimensions": lambda a, b: (a[:, None] * b[None]).sum(-1, keepdim=True, dtype=torch.int32),
    "sum with keepdim": lambda a, b: (a == b).cumprod(1).sum(1, keepdim=True),
}
FLOAT_PROGRAMS: dict[str, Program] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "finite": lambda a, b: (a - a == 0).cumprod(1).sum(1, keepdim=True),
    "equal": lambda a, b: a == b,
    "less": lambda a, b: a < b,
    "greater": lambda a, b: a > b,
    "greater than a number": lambda a, b: a > 0,
    "at most": lambda a, b: a <= b,
    "at least": lambda a, b: a >= b,
    "pad": lambda a, b: F.pad(a, (2, 0)),
    "to float64": lambda a, b: a.double(),
    "to float32": lambda a, b: b.double().float(),
    "row and column": lambda a, b: a[:, :1] + b[:1],
}
UNSUPPORTED_PROGRAMS: dict[str, Program] = {
    "add a float": lambda a, b: a + 0.1,
    "add with a factor": lambda a, b: torch.add(a, b, alpha=3),
    "divide": lambda a, b: a.div(b.abs() + 1),
    "divide and round to 0": lambda a, b: a.div(4, rounding_mode="trunc"),
    "clamp min": lambda a, b: a.clamp(min=1),
    "sum of each column": lambda a, b: a.sum(0),
    "bfloat16": lambda a, b: a.bfloat16() + b.bfloat16(),
    "too many numbers": lambda a, b: a.repeat(MAX_NUMBERS, 1) + 1,
    "maximum": lambda a, b: torch.maximum(a, b),
    "floats to integers": lambda a, b: a.to(torch.int64),
    "where": lambda a, b: torch.where(a == b, a, -1),
    "less than a tensor without dimensions": lambda a, b: a.int() < torch.ones((), dtype=torch.int64),
    "sum of all": lambda a, b: a.int().sum(None, dtype=torch.int64),
    "pad in two dimensions": lambda a, b: F.pad(a, (1, 0, 1, 0)),
    "too many calls": lambda a, b: a.repeat(MAX_CALLS + 1, 1).view(-1, 3, 5)[:, ::2, ::2] == 1,
}


def compare_replays(program: Program, dtype: torch.dtype) -> int:
    """Check that replays equal runs of the program, for 20 inputs; return the number of the tape's calls."""
    generator = torch.Generator().manual_seed(0)

    def random_values() -> Tensor:
        if dtype in FLOATS:
            values = torch.randn(3, 5, generator=generator, dtype=torch.float64)
            values[0, 1], values[1, 2], values[2, 3] = float("nan"), float("inf"), -float("inf")
            return (values * 10.0 ** torch.randint(-30, 30, (3, 5), generator=generator)).to(dtype)
        return torch.randint(-7, 8, (3, 5), generator=generator).to(dtype)

    a, b = random_values(), random_values()
    tape = Tape(lambda: program(a, b), substitute=NumberKernels(c_library()))
    for _ in range(20):
        a.copy_(random_values())
        b.copy_(torch.where(torch.rand(3, 5, generator=generator) < 0.3, a, random_values()))
        tape.replay()
        expected = program(a, b)
        assert tape.output.dtype == expected.dtype and tape.output.shape == expected.shape
        assert torch.equal(tape.output.nan_to_num(7.5), expected.nan_to_num(7.5))
        assert torch.equal(tape.output.isnan(), expected.isnan())
    return len(tape)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", INTEGER_PROGRAMS)
def test_c_integer_arithmetic_on_tape_matches_torch(name: str, dtype: torch.dtype) -> None:
    assert compare_replays(INTEGER_PROGRAMS[name], dtype) <= 2, "one call of C, and at most one copy by torch before it"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FLOAT_PROGRAMS)
def test_c_float_arithmetic_on_tape_matches_torch(name: str, dtype: torch.dtype) -> None:
    assert compare_replays(FLOAT_PROGRAMS[name], dtype) <= 1


@pytest.mark.parametrize("name", UNSUPPORTED_PROGRAMS)
def test_unsupported_arithmetic_is_left_to_torch(name: str) -> None:
    """The last operator of each program is the unsupported one."""
    compare_replays(UNSUPPORTED_PROGRAMS[name], torch.float32)
    number_kernels, calls_by_operator = NumberKernels(c_library()), list[tuple[OpOverload, Any]]()

    def record_substitute(function: OpOverload, *arguments: Any) -> Any:
        calls_by_operator.append((function, number_kernels(function, *arguments)))
        return calls_by_operator[-1][1]

    a, b = torch.ones(3, 5), torch.full((3, 5), 2.0)
    Tape(lambda: UNSUPPORTED_PROGRAMS[name](a, b), substitute=record_substitute)
    operator, c_calls = calls_by_operator[-1]
    assert c_calls is None, operator


def test_c_integer_overflow_wraps_as_in_torch() -> None:
    for dtype in INTEGERS:
        a = torch.tensor([torch.iinfo(dtype).max], dtype=dtype)
        tape = Tape(lambda a=a: [a + a, a * a, a - (-a)], substitute=NumberKernels(c_library()))
        tape.replay()
        assert all(map(torch.equal, tape.output, [a + a, a * a, a - (-a)]))


def test_cumprod_sum_and_cast_accept_bool_and_integer_dtypes() -> None:
    """Bools count as 0 and 1."""
    for kind in KINDS[:3]:
        a = torch.tensor([[1, 1, 0], [1, 0, 1]]).to(kind)
        tape = Tape(lambda a=a: [a.cumprod(1), a.sum(1), a.to(torch.int64)], substitute=NumberKernels(c_library()))
        a.copy_(torch.tensor([[1, 0, 1], [1, 1, 1]]))
        tape.replay()
        assert len(tape) == 1 and all(map(torch.equal, tape.output, [a.cumprod(1), a.sum(1), a.to(torch.int64)]))


def test_padding_keeps_the_sign_of_zero() -> None:
    tape = Tape(lambda: F.pad(torch.ones(2), (1, 1), value=-0.0), substitute=NumberKernels(c_library()))
    tape.replay()
    assert tape.output.signbit().tolist() == [True, False, False, True]


def test_large_integers_are_rounded_to_float_once() -> None:
    """2^54 + 2^30 + 1 is just above the middle between two floats, but becomes that middle if it is first a double."""
    a = torch.tensor([[(1 << 54) + (1 << 30) + 1, -(1 << 54) - (1 << 30) - 1]])
    tape = Tape(lambda: a.to(torch.float32), substitute=NumberKernels(c_library()))
    tape.replay()
    assert torch.equal(tape.output, a.to(torch.float32))
    assert not torch.equal(tape.output, a.double().to(torch.float32))


def test_operators_that_write_no_number_are_not_recorded() -> None:
    table, rows, ids = torch.zeros(9, 0), torch.zeros(2, 0), torch.tensor([1, 2])
    tape = Tape(lambda: [table.index_copy_(0, ids, rows), ids + 1], substitute=NumberKernels(c_library()))
    assert len(tape) == 1


@pytest.mark.parametrize("operator", [torch.add, torch.sub, torch.mul])
def test_long_rows_of_float32_are_computed_in_vectors(operator: Program) -> None:
    a, b = torch.randn(3, MAX_NUMBERS), torch.randn(3, MAX_NUMBERS + 8)[:, 3:-5]
    tape = Tape(lambda: operator(a, b[:1]), substitute=NumberKernels(c_library()))
    assert isinstance(tape._calls[0], _Joined) and len(tape) == 1
    a.neg_()
    b.mul_(2)
    tape.replay()
    assert torch.equal(tape.output, operator(a, b[:1]))
