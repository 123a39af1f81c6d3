"""A step runs on a device whose tensors have no values: for every target family, draft, tier and sampling mode."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)

from cluster.batch import (
    Batch,
    DecodeRequest,
    ExtendMode,
    PageCopy,
    PageWrite,
    PromptChunk,
    RowPenalties,
    RowSampling,
    RowTokens,
    SamplingMode,
    StepInput,
)
from cluster.config.tree_shape import TreeShape
from cluster.dp_attention.sizes import ProgramKey
from cluster.engine import Engine, build_engine
from cluster.spec.result import StepOutput
from cluster.spec.step import Step
from tests.capture.sim import DEVICE_NAME, simulated
from tests.parity.harness import config_of, tiny_pair
from tests.parity.pairs import DRAFTS, Pair, algorithm_of, all_pairs, diagonal, draft_of
from tests.parity.trees import adaptive, engine_with_trees
from tests.support.families import FAMILIES
from tests.support.pairwise import assert_covering

MODES = (
    SamplingMode(0),
    SamplingMode.RANDOM,
    SamplingMode.RANDOM | SamplingMode.FILTERED,
    SamplingMode.RANDOM | SamplingMode.LOGPROBS | SamplingMode.TREES,
    SamplingMode.PROMPT_LOGPROBS,
    SamplingMode.ADJUSTED,
    SamplingMode.RANDOM | SamplingMode.FILTERED | SamplingMode.ADJUSTED | SamplingMode.BAD_WORDS,
)
PROMPTS = (PromptChunk(3, 0, 2, True, (5, 6)), PromptChunk(4, 4, 11, False, tuple(range(2, 10))))
STEP_INPUT_CHANGES = {
    "lens": ((0, 7), (1, 9)),
    "samplings": (RowSampling(0, 0.8, 5, 0.9, 0.0, 3),),
    "writes": (PageWrite(2, -1, 0), PageWrite(0, 0, 3), PageWrite(1, 0, 4)),
    "copies": (PageCopy(3, 5, 2),),
}
PENALTIES = RowPenalties(0, 0.5, 0.5, 1.2, 3, 2, (3, 4, 5), (1,), ((2, 1.0),), (1, 2, 3), ((3, 4), (2,)))
DECODES = (DecodeRequest(0, 7), DecodeRequest(1, 9), DecodeRequest(2, 0))


def engine_of(pair: Pair, topk: int) -> Engine:
    spec = pair.spec()
    settings = {"speculative_algorithm": algorithm_of(spec), "attention_backend": "torch"}
    return build_engine(config_of(pair.target, draft_of(pair.draft), topk, 3, **settings))


VARIANT_VALUES = (range(4), MODES, (False, True))
"""The variants of a step: its tier, its sampling mode, and whether it has prompt rows as well."""
VARIANTS = list(product(*VARIANT_VALUES))


def check(pair: Pair, topk: int, variants: Iterable[tuple[int, SamplingMode, bool]]) -> None:
    """Run a step of a pair in each of the variants (tier, mode, has prompts), and check the shapes of its outputs.

    With `topk` 1 the draft is a chain, otherwise a tree.
    """
    engine = engine_of(pair, topk)
    programs, shapes = engine._parts.lockstep.programs, engine._parts.resolved.tiers
    assert len(shapes) == 4
    with simulated(engine):
        for tier, mode, has_prompts in variants:
            shape, chunks = shapes[tier], PROMPTS if has_prompts else ()
            row_penalties = (PENALTIES,) if SamplingMode.ADJUSTED in mode else ()
            if SamplingMode.PROMPT_LOGPROBS in mode:
                chunks = tuple(chunk._replace(scored=chunk.stop - chunk.start - chunk.final) for chunk in chunks)
            step_input = StepInput(
                decodes=DECODES, chunks=chunks, penalties=row_penalties, **STEP_INPUT_CHANGES, mode=mode
            )
            sent, key = programs.assembler.send(step_input, shape.forced_nodes), ProgramKey(tier, 0, int(mode), ())
            output = programs._run(sent, key, shape)
            final_chunks, rows = sum(chunk.final for chunk in chunks), sum(chunk.stop - chunk.start for chunk in chunks)
            assert output.packed.shape == (len(DECODES) * (shape.num_steps + 3) + final_chunks + rows,)
            assert output.packed.device == torch.device(DEVICE_NAME, 0)
            assert (output.scores is not None) == (SamplingMode.PROMPT_LOGPROBS in mode)
            if output.scores is not None:
                assert output.scores.ranks.shape == (sum(chunk.scored for chunk in chunks),)
            assert (output.trees is not None) == (SamplingMode.TREES in mode)


FAST_PAIRS = range(0, len(diagonal()), 10)


@pytest.mark.parametrize(
    "number",
    [pytest.param(at, marks=() if at in FAST_PAIRS else pytest.mark.slow) for at in range(len(diagonal()))],
)
def test_step_of_each_diagonal_pair_reads_no_device_value(number: int) -> None:
    """The pairs have each draft once and each family at least once. The variants take turns over the pairs."""
    check(diagonal()[number], (1, 3)[number % 2], VARIANTS[number // 2 % 12 :: 12])


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda rows: int(rows[0]), DataDependentOutputException),
        (lambda rows: rows[rows > 1], DynamicOutputShapeException),
        (lambda rows: rows + torch.arange(2), FakeTensorDeviceMismatchError),
    ],
)
def test_simulated_device_catches_host_reads_and_tensors_of_other_devices(
    monkeypatch: pytest.MonkeyPatch, operation: Callable[[torch.Tensor], object], error: type[Exception]
) -> None:
    engine = engine_of(diagonal()[1], 1)
    original = Step.run

    def run_with_operation(self: Step, batch: Batch, shape: TreeShape) -> StepOutput:
        operation(batch.rows[:2])
        return original(self, batch, shape)

    monkeypatch.setattr(Step, "run", run_with_operation)
    with simulated(engine), pytest.raises(error):
        programs = engine._parts.lockstep.programs
        sent = programs.assembler.send(StepInput(decodes=DECODES), 0)
        programs._run(sent, ProgramKey(3, 0, 0, ()), engine._parts.resolved.shape)


def sharing_engine(topk: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine with attention by torch whose requests share rows, as otherwise only with the kernels in C."""
    monkeypatch.setattr("cluster.engine.build.device_facts", lambda config, device: ("cpu", lambda: True))
    config = adaptive(config_of(*tiny_pair(), topk, 2, attention_backend="torch"))
    return engine_with_trees(lambda: build_engine(config), [])


@pytest.mark.parametrize(
    ("extend_mode", "has_prompts"),
    # A step with prompt rows reads them, so it never has the mode NOTHING.
    [
        (mode, prompts)
        for mode in ExtendMode
        for prompts in (False, True)
        if not (prompts and mode is ExtendMode.NOTHING)
    ],
)
def test_step_of_a_resting_draft_reads_no_device_value(
    extend_mode: ExtendMode, has_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sharing_engine(3, monkeypatch)
    programs, shapes = engine._parts.lockstep.programs, engine._parts.resolved.tiers
    with simulated(engine):
        step_input = StepInput(decodes=DECODES, chunks=PROMPTS if has_prompts else (), **STEP_INPUT_CHANGES)
        tier = len(shapes) - 1 if extend_mode is ExtendMode.ACCEPTED else 0
        key = ProgramKey(tier, 0, 0, (), extend_mode)
        output = programs._run(programs.assembler.send(step_input, 0), key, shapes[tier])
        assert output.has_ranks == (tier > 0) and output.packed.device == torch.device(DEVICE_NAME, 0)


@pytest.mark.parametrize("has_prompts", [False, True])
@pytest.mark.parametrize("topk", [2, 3])
def test_step_that_selects_nodes_reads_no_device_value(
    topk: int, has_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sharing_engine(topk, monkeypatch)
    programs, shapes = engine._parts.lockstep.programs, engine._parts.resolved.tiers
    selecting = [tier for tier, shape in enumerate(shapes) if shape.selects_nodes]
    tiers_and_modes = product(
        (min(selecting), max(selecting)),
        (SamplingMode(0), SamplingMode.RANDOM | SamplingMode.FILTERED | SamplingMode.LOGPROBS),
    )
    assert shapes[max(selecting)].lookup_tokens and not shapes[min(selecting)].lookup_tokens
    for tier, mode in tiers_and_modes:
        with simulated(engine):
            step_input = StepInput(decodes=DECODES, chunks=PROMPTS if has_prompts else (), **STEP_INPUT_CHANGES)
            key = ProgramKey(tier, 0, int(mode), ())
            output = programs._run(programs.assembler.send(step_input, 0), key, shapes[tier])
            assert output.has_ranks and output.has_node_counts


@pytest.mark.parametrize("num_steps", [0, 4])
def test_step_of_ngram_speculation_reads_no_device_value(num_steps: int) -> None:
    config = config_of(
        tiny_pair()[0], speculative_algorithm="NGRAM", speculative_num_steps=4, attention_backend="torch"
    )
    engine = build_engine(config)
    programs, shapes = engine._parts.lockstep.programs, engine._parts.resolved.tiers
    with simulated(engine):
        histories = (RowTokens(0, (3, 4, 5, 3, 4)),)
        step_input = StepInput(decodes=DECODES, chunks=PROMPTS, **STEP_INPUT_CHANGES, histories=histories)
        output = programs._run(
            programs.assembler.send(step_input, 0), ProgramKey(num_steps, 0, 0, ()), shapes[num_steps]
        )
        assert output.path_length == num_steps + 1


def variants_of_pair(pair: Pair) -> tuple[int, list[int]]:
    """The topk of a pair, and the indices of the two `VARIANTS` that the pair runs."""
    family, draft = list(FAMILIES).index(pair.family), DRAFTS.index(pair.draft)
    return (1, 3)[(family + draft) % 2], [(9 * family + 2 * draft + offset) % len(VARIANTS) for offset in (0, 5)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_step_of_every_family_and_draft_pair_reads_no_device_value(family: str) -> None:
    """Each pair runs two variants; the next test shows what the pairs cover together."""
    for pair in all_pairs():
        if pair.family == family:
            topk, variant_numbers = variants_of_pair(pair)
            check(pair, topk, [VARIANTS[variant_number] for variant_number in variant_numbers])


def test_pair_cases_cover_all_tiers_modes_and_prompts() -> None:
    """Each family runs every variant. Each draft and each family has all pairs of values of topk, tier, mode and
    prompts.

    The factors in `variants_of_pair` were searched so that this holds.
    """
    variants_by_family, variants_by_draft = (defaultdict[str, list[tuple[Any, ...]]](list) for _ in range(2))
    for pair in all_pairs():
        topk, variant_numbers = variants_of_pair(pair)
        for way in variant_numbers:
            variants_by_family[pair.family].append((topk, *VARIANTS[way]))
            variants_by_draft[pair.draft].append((topk, *VARIANTS[way]))
    assert (set(variants_by_family), set(variants_by_draft)) == (set(FAMILIES), set(DRAFTS))
    for variants in [*variants_by_family.values(), *variants_by_draft.values()]:
        assert_covering(variants, [(1, 3), *VARIANT_VALUES])
    assert all(len({way[1:] for way in variants}) == len(VARIANTS) for variants in variants_by_family.values())
