"""A joined call of C kernels does the same as its calls one after another, for all types of arguments."""

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
def test_tape_joins_norm_and_activation_and_replays_the_same_bits(dtype: torch.dtype) -> None:
    """Both kernels take doubles between integers, and the norm takes more integers than there are registers."""
    kernels = c_kernels()
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((6, 64), (64,)))
    inputs = rows.clone()

    def program() -> torch.Tensor:
        return kernels.activate(kernels.norm(inputs, weight, 1e-5), Activation("clamped", 1.702, 7.0))

    expected = program()
    tape = Tape(program)
    assert len(tape) == 1, "the tape must make one call for both kernels"
    assert torch.equal(tape.output, expected)
    inputs.mul_(-2)
    tape.replay()
    assert torch.equal(tape.output, program()) and not torch.equal(tape.output, expected)


def test_joined_calls_run_in_order_with_their_own_arguments() -> None:
    """Each call reads the output of the call before it, and has arguments that differ from those of other calls."""
    library = c_library()
    run = library.functions["activate", torch.float64]
    first_source = torch.linspace(-3, 3, 64, dtype=torch.float64)[None].contiguous()
    separate_outputs = [torch.zeros(1, 32, dtype=torch.float64) for _ in range(4)]
    joined_outputs = [out.clone() for out in separate_outputs]

    def calls(outputs: list[torch.Tensor]) -> list[partial[None]]:
        argument_tuples = [
            (1, 32, 2, 1.702, 7.0, 1),
            (1, 16, 2, 1.25, 3.0, 1),
            (1, 8, 2, 1.5, 2.0, 1),
            (1, 4, 2, 0.5, 9.0, 1),
        ]
        sources = [first_source, *outputs]
        return [
            partial(run, source.data_ptr(), out.data_ptr(), *arguments)
            for source, out, arguments in zip(sources, outputs, argument_tuples, strict=False)
        ]

    for call in calls(separate_outputs):
        call()
    joined_calls = join_calls(calls(joined_outputs))
    assert len(joined_calls) == 1
    joined_calls[0]()
    assert (
        all(
            torch.equal(separate_output, joined_output)
            for separate_output, joined_output in zip(separate_outputs, joined_outputs, strict=True)
        )
        and separate_outputs[3].any()
    )


def test_join_calls_keeps_python_calls_in_their_position() -> None:
    library, python_reads = c_library(), list[str]()
    run = library.functions["bar", torch.float32]
    logits, masks, out = torch.ones(1, 32), torch.full((1, 1), 5, dtype=torch.int32), torch.zeros(1, 32)
    arguments = (logits.data_ptr(), masks.data_ptr(), None, out.data_ptr(), 1, 32, 32, 1, -8.0, 1)
    kernel_call: Callable[[], Any] = partial(run, *arguments)
    calls = join_calls([kernel_call, kernel_call, lambda: python_reads.append(f"{out[0, :3].tolist()}"), kernel_call])
    assert len(calls) == 3
    for call in calls:
        call()
    assert python_reads == ["[1.0, -7.0, 1.0]"]


def test_join_calls_refuses_arguments_that_are_not_numbers() -> None:
    run = c_library().functions["keys", torch.float32]
    bad = partial(run, "text", 0, 0, 1, 1, 1)
    with pytest.raises(TypeError, match="str"):
        join_calls([bad, bad])
