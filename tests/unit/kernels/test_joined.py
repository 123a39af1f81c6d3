"""Joined calls of C kernels do what the calls do one after the other, whatever sorts of arguments they take."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cluster.capture.tape import Tape, join_calls
from cluster.kernels.interface import Activation
from cluster.kernels.joined import MAX_DOUBLES, MAX_INTEGERS
from cluster.kernels.library import SIGNATURES
from tests.unit.kernels.library import c_kernels, c_library

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def test_kernel_signatures_fit_the_argument_limits_of_a_joined_call() -> None:
    for name, signature in SIGNATURES.items():
        assert signature.count("d") <= MAX_DOUBLES and len(signature) - signature.count("d") <= MAX_INTEGERS, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_tape_with_norm_and_activation_replays_the_same_bits(dtype: torch.dtype) -> None:
    """Norm, activation and rotation take doubles between whole numbers, the last two more arguments than registers."""
    kernels = c_kernels()
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((6, 64), (64,)))
    given = rows.clone()

    def program() -> torch.Tensor:
        normed = kernels.norm(given, weight, 1e-5)
        return kernels.activate(torch.cat([normed, normed], 1), Activation("clamped", 1.702, 7.0))

    wanted = program()
    tape = Tape(program)
    assert torch.equal(tape.output, wanted)
    given.mul_(-2)
    tape.replay()
    assert torch.equal(tape.output, program()) and not torch.equal(tape.output, wanted)


def test_joined_calls_run_in_order_with_their_own_arguments() -> None:
    """Each call reads what the one before it wrote, and a structure as it is when the call is made."""
    library = c_library()
    run = library.functions["activate", torch.float64]
    both = torch.linspace(-3, 3, 64, dtype=torch.float64)[None].contiguous()
    outs = [torch.zeros(1, 32, dtype=torch.float64) for _ in range(4)]
    again = [out.clone() for out in outs]

    def calls(places: list[torch.Tensor]) -> list[partial[None]]:
        numbers = [(1, 32, 2, 1.702, 7.0, 1), (1, 16, 2, 1.25, 3.0, 1), (1, 8, 2, 1.5, 2.0, 1), (1, 4, 2, 0.5, 9.0, 1)]
        sources = [both, *places]
        return [
            partial(run, source.data_ptr(), out.data_ptr(), *each)
            for source, out, each in zip(sources, places, numbers, strict=False)
        ]

    for call in calls(outs):
        call()
    together = join_calls(calls(again))
    assert len(together) == 1
    together[0]()
    assert all(torch.equal(one, other) for one, other in zip(outs, again, strict=True)) and outs[3].any()


def test_join_calls_keeps_python_calls_in_their_position() -> None:
    library, seen = c_library(), list[str]()
    run = library.functions["bar", torch.float32]
    logits, masks, out = torch.ones(1, 32), torch.full((1, 1), 5, dtype=torch.int32), torch.zeros(1, 32)
    places = (logits.data_ptr(), masks.data_ptr(), None, out.data_ptr(), 1, 32, 32, 1, -8.0, 1)
    one: Callable[[], Any] = partial(run, *places)
    calls = join_calls([one, one, lambda: seen.append(f"{out[0, :3].tolist()}"), one])
    assert len(calls) == 3
    for call in calls:
        call()
    assert seen == ["[1.0, -7.0, 1.0]"]


def test_join_calls_refuses_arguments_that_are_not_numbers() -> None:
    run = c_library().functions["keys", torch.float32]
    bad = partial(run, "text", 0, 0, 1, 1, 1)
    with pytest.raises(TypeError, match="str"):
        join_calls([bad, bad])
