"""An exchange must make all calls of its script, in order and with the planned rows. Its error names a wrong call."""

import pytest
import torch

from cluster.distributed.mesh import Mesh, OutOfStepError
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ScriptCall

SUM, GATHER = ScriptCall("draft", "reduce", (3,), 8), ScriptCall("target", "gather", (2,), 8)


def begin_exchange(*calls: ScriptCall) -> Exchange:
    exchange = Exchange(Mesh(), torch.float32)
    exchange.begin(7, calls)
    return exchange


def test_exchange_that_follows_its_script_has_no_remaining_calls() -> None:
    exchange = begin_exchange(SUM, GATHER)
    rows = torch.ones(3, 8)
    assert exchange.remaining_calls == (SUM, GATHER)
    assert torch.equal(exchange.reduce(rows), rows) and torch.equal(exchange.gather(rows[:2]), rows[:2])
    assert exchange.remaining_calls == ()
    exchange.end()


def test_missing_last_call_raises_out_of_step() -> None:
    exchange = begin_exchange(SUM, GATHER)
    exchange.reduce(torch.ones(3, 8))
    with pytest.raises(
        OutOfStepError, match=r"rank 0 ended where gather of rows \[2\] comes next \(step 7, phase target"
    ):
        exchange.end()


def test_call_that_is_not_next_in_the_script_raises_out_of_step() -> None:
    with pytest.raises(OutOfStepError, match=r"calls gather where reduce of rows \[3\] comes next"):
        begin_exchange(SUM).gather(torch.ones(3, 8))
    with pytest.raises(OutOfStepError, match="calls reduce where the step ends"):
        begin_exchange().reduce(torch.ones(3, 8))


@pytest.mark.parametrize("rows", [torch.ones(2, 8), torch.ones(3, 7), torch.ones(3, 8, dtype=torch.float64)])
def test_rows_of_unplanned_shape_or_dtype_raise_out_of_step(rows: torch.Tensor) -> None:
    with pytest.raises(OutOfStepError, match=r"to reduce where \[3, 8\] of torch.float32 are planned"):
        begin_exchange(SUM).reduce(rows)


@pytest.mark.parametrize(
    ("calls", "expected_message"),
    [
        ([SUM], r"a program that ends as its call 1 where gather of rows \[2\] comes next"),
        (
            [GATHER, GATHER],
            r"calls gather of rows \[2\] in phase target as its call 0 where reduce of rows \[3\] comes",
        ),
        ([SUM, GATHER, SUM], r"calls reduce of rows \[3\] in phase draft as its call 2 where the step ends"),
    ],
)
def test_replay_refuses_a_program_with_other_calls(calls: list[ScriptCall], expected_message: str) -> None:
    exchange = begin_exchange(SUM, GATHER)
    with pytest.raises(OutOfStepError, match=expected_message):
        exchange.replay(calls)
    complete_exchange = begin_exchange(SUM, GATHER)
    complete_exchange.replay([SUM, GATHER])
    complete_exchange.end()
