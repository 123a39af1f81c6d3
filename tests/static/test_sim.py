"""The step runs where nothing can be asked: every target family, draft, tier and sampling mode."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)

from cluster.batch import Adjusting, Batch, Decode, Mode, Order, PageCopy, PageWrite, PromptChunk, Sampling
from cluster.engine import Engine, build_engine
from cluster.spec.result import StepOutput
from cluster.spec.step import Step
from cluster.tree_shape import TreeShape, tiers
from tests.parity.harness import config_of
from tests.parity.pairs import Pair, algorithm_of, all_pairs, diagonal, draft_of
from tests.static.sim import NAME, simulated

MODES = (
    Mode(0),
    Mode.NOISY,
    Mode.NOISY | Mode.FILTERED,
    Mode.NOISY | Mode.LOGPROBS | Mode.TREES,
    Mode.PROMPT_LOGPROBS,
    Mode.ADJUSTED,
    Mode.NOISY | Mode.FILTERED | Mode.ADJUSTED | Mode.WORDS,
)
PROMPTS = (PromptChunk(3, 0, 2, True, (5, 6)), PromptChunk(4, 4, 11, False, tuple(range(2, 10))))
CHANGES = {
    "lens": ((0, 7), (1, 9)),
    "samplings": (Sampling(0, 0.8, 5, 0.9, 0.0, 3),),
    "writes": (PageWrite(2, -1, 0), PageWrite(0, 0, 3), PageWrite(1, 0, 4)),
    "copies": (PageCopy(3, 5, 2),),
}
ADJUSTING = Adjusting(0, 0.5, 0.5, 1.2, 3, 2, (3, 4, 5), (1,), ((2, 1.0),), (1, 2, 3), ((3, 4), (2,)))
DECODES = (Decode(0, 7), Decode(1, 9), Decode(2, 0))


def engine_of(pair: Pair, topk: int) -> Engine:
    spec = pair.spec()
    settings = {"speculative_algorithm": algorithm_of(spec), "attention_backend": "torch"}
    return build_engine(config_of(pair.target, draft_of(pair.draft), topk, 3, **settings))


def check(pair: Pair, turn: int, every: int = 1) -> int:
    """Run the step of each tier and sampling mode, or of every so many of these. `turn` picks which, chain or tree, and
    which of them have prompt rows beside: every other one.
    """
    engine, ran = engine_of(pair, (1, 3)[turn % 2]), 0
    programs, shapes = engine._p.lockstep.programs, tiers(engine._p.shape)
    with simulated(engine):
        for number, (shape, mode) in enumerate(product(shapes, MODES)):
            if (number + turn) % every:
                continue
            chunks = PROMPTS if (number + number // len(MODES) + turn // 2) % 2 else ()
            adjustings = (ADJUSTING,) if Mode.ADJUSTED in mode else ()
            if Mode.PROMPT_LOGPROBS in mode:
                chunks = tuple(chunk._replace(scored=chunk.stop - chunk.start - chunk.final) for chunk in chunks)
            order = Order(decodes=DECODES, chunks=chunks, adjustings=adjustings, **CHANGES, mode=mode)
            output = programs._run(programs.assembler.send(order, shape.forced), shape)
            finals, rows = sum(chunk.final for chunk in chunks), sum(chunk.stop - chunk.start for chunk in chunks)
            assert output.packed.shape == (len(DECODES) * (shape.num_steps + 3) + finals + rows,)
            assert output.packed.device == torch.device(NAME, 0)
            assert (output.scores is not None) == (Mode.PROMPT_LOGPROBS in mode)
            if output.scores is not None:
                assert output.scores.ranks.shape == (sum(chunk.scored for chunk in chunks),)
            assert (output.trees is not None) == (Mode.TREES in mode)
            ran += 1
    return ran


FEW = range(0, len(diagonal()), 3)


@pytest.mark.parametrize(
    "number",
    [pytest.param(at, marks=() if at in FEW else pytest.mark.slow) for at in range(len(diagonal()))],
)
def test_a_pair(number: int) -> None:
    """Each draft once and each family at least once, tiers and modes by turns."""
    assert check(diagonal()[number], number, every=6) >= 2


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda rows: int(rows[0]), DataDependentOutputException),
        (lambda rows: rows[rows > 1], DynamicOutputShapeException),
        (lambda rows: rows + torch.arange(2), FakeTensorDeviceMismatchError),
    ],
)
def test_what_asks_or_comes_from_elsewhere_is_caught(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[torch.Tensor], object], error: type[Exception]
) -> None:
    engine = engine_of(diagonal()[1], 1)
    true = Step.run

    def asking(self: Step, batch: Batch, shape: TreeShape) -> StepOutput:
        ask(batch.rows[:2])
        return true(self, batch, shape)

    monkeypatch.setattr(Step, "run", asking)
    with simulated(engine), pytest.raises(error):
        programs = engine._p.lockstep.programs
        programs._run(programs.assembler.send(Order(decodes=DECODES), 0), engine._p.shape)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("quarter", range(4))
def test_all_pairs_tiers_and_modes(quarter: int, part: int) -> None:
    """Each quarter has all tiers and modes of each pair; the four have each as chain and tree, with prompts and not."""
    for pair in all_pairs()[part::16]:
        assert check(pair, pair.turn + quarter) == 4 * len(MODES), pair
