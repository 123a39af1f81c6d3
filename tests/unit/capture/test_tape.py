"""A tape's replay equals the program on new inputs. Each test fills the tape's buffers with useless values before."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cluster.capture.buffers import Buffers
from cluster.capture.recorder import CaptureError, opaque
from cluster.capture.tape import Tape

ROWS = torch.tensor([1, 2])


def poison(tape: Tape) -> None:
    with torch.inference_mode():
        for buffer in tape.buffers:
            buffer.fill_(math.nan if buffer.is_floating_point() else 1)


def data_dependent(rows: Tensor) -> Tensor:
    """Return one of two results; the sum of the rows decides which."""
    return rows * 2 if float(rows.sum()) > 0 else rows - 1


def program(x: Tensor, w: Tensor, memory: Tensor) -> list[Tensor]:
    """Run products, views, writes in place, indexing, operators without an `out` variant, and one call whose branch
    depends on the data.
    """
    rows = (x @ w).relu()
    second_row = rows.view(2, 10)[1:].clone()
    marks = torch.zeros(4, 2, dtype=x.dtype).scatter_(1, torch.arange(4)[:, None] % 2, 1.0)
    memory.index_copy_(0, ROWS, rows[:2])
    values, ids = opaque(data_dependent, rows).topk(2)
    chosen = torch.where(values > 1, values, -1.0)
    return [
        values,
        ids,
        second_row,
        marks,
        chosen,
        values.softmax(-1).cumprod(-1),
        memory[ids[:, 0]],
        rows[:, :2].contiguous(),
    ]


def test_tape_replay_equals_the_program_on_new_inputs() -> None:
    x, w, memory = torch.randn(4, 3), torch.randn(3, 5), torch.zeros(6, 5)
    tape = Tape(lambda: program(x, w, memory))
    addresses = [buffer.data_ptr() for buffer in tape.buffers]
    for iteration in range(20):
        x.copy_(torch.randn(4, 3)) if iteration % 2 else x.neg_()
        with torch.inference_mode():
            memory.zero_()
            expected, expected_memory = program(x, w, memory), memory.clone()
            memory.zero_()
        poison(tape)
        tape.replay()
        assert all(torch.equal(a, b) for a, b in zip(tape.output, expected, strict=True))
        assert torch.equal(memory, expected_memory)
    assert addresses == [buffer.data_ptr() for buffer in tape.buffers]
    assert tape.bytes == sum(buffer.untyped_storage().nbytes() for buffer in tape.buffers) > 0


def layers(x: Tensor, w: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = (x @ w).softmax(-1) + opaque(data_dependent, x)
    return x


def test_tape_layers_reuse_the_same_buffers() -> None:
    x, w = torch.randn(4, 5), torch.randn(5, 5)
    few, many = (Tape(lambda count=count: layers(x, w, count)) for count in (3, 30))
    assert len(many) > 9 * len(few) and many.bytes == few.bytes
    for _ in range(3):
        poison(many)
        many.replay()
        with torch.inference_mode():
            assert torch.equal(many.output, layers(x, w, 30))
        x.copy_(torch.randn(4, 5))


def test_tapes_share_buffers_except_for_their_outputs() -> None:
    x, w, buffers = torch.randn(4, 5), torch.randn(5, 5), Buffers()
    first, second = (Tape(lambda: layers(x, w, 5), buffers) for _ in range(2))
    assert 0 < second.bytes <= x.nbytes < first.bytes
    first.replay()
    expected = first.output.clone()
    poison(second)
    second.replay()
    assert torch.equal(first.output, expected) and torch.equal(second.output, expected)


@pytest.mark.parametrize(
    ("reading_program", "message"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: x if bool((x > 0).any()) else -x, "a value"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.repeat_interleave(ROWS, dim=0), "repeat_interleave"),
        (lambda x: x + torch.tensor([1.0, 2.0]), "no numbers from the host"),
    ],
)
def test_capture_refuses_programs_that_read_tensor_values_on_the_host(
    reading_program: Callable[[Tensor], object], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        Tape(lambda: reading_program(torch.ones(2, 2)))


def test_recording_stops_after_a_failed_capture() -> None:
    with pytest.raises(CaptureError):
        Tape(lambda: torch.ones(2).nonzero())
    assert torch.equal(opaque(data_dependent, torch.ones(2)), torch.full((2,), 2.0))
    assert len(Tape(lambda: torch.ones(2) + 1)) == 2


def test_a_capture_does_not_import_the_compiler() -> None:
    """The import of `torch._dynamo` takes more than three seconds of the start of a server."""
    code = """
import sys, torch
from cluster.capture.buffers import Buffers
from cluster.capture.tape import Tape
x = torch.ones(3)
with torch.inference_mode():
    assert Tape(lambda: x + 1, Buffers()).output.tolist() == [2.0] * 3
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
