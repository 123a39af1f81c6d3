"""The replay of a captured step equals the eager step to the last bit, whatever the program's buffers held before and
whichever requests decode.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.batch import ExtendMode, SamplingMode
from cluster.capture.tape import Tape
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.device.staging import StagedLists
from cluster.engine import Engine, build_engine
from cluster.engine.programs import TAPES, Program
from cluster.request import LogitAdjustments, Request, RequestParams, TokenLogprob
from cluster.spec.draft import HasChances
from cluster.spec.resting import RestingDraft
from cluster.spec.result import StepOutput
from tests.parity.harness import SAMPLING, VOCAB, config_of, run, tiny_pair
from tests.parity.pairs import algorithm_of, diagonal, draft_of
from tests.parity.poison import tensors_by_slot
from tests.parity.trees import adaptive, engine_with_trees
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models.mtp_cases import LISTS

ADJUSTED = LogitAdjustments(0.4, 0.3, 1.2, ((3, 1.0), (1, -100.0)), min_tokens=9)
PARAMS = {
    **SAMPLING,
    "log-probabilities": RequestParams(temperature=0.8, logprobs=3),
    "adjusted": RequestParams(temperature=0.8, adjustments=ADJUSTED),
}
POISON_VALUES = (math.nan, math.inf)
SIZES = (1, 2, 4, 8, 16)


def poison(tape: Tape[Any], value: float) -> None:
    """Fill the buffers of a captured program with `value`, and those of integers with 1."""
    with torch.inference_mode():
        for buffer in tape.buffers:
            buffer.fill_(value if buffer.is_floating_point() else 1)


class ReplayComparison:
    """Runs each step that the engine replays also eagerly, from the same state, and compares the outputs and the state
    after both. `replays` counts the replays of each program, by the id of the program.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        programs = engine._parts.lockstep.programs
        carried = programs.step.draft_inputs
        self.replays = Counter[int]()
        self._state = [*tensors_by_slot(engine), engine._parts.cache.table.lens]
        self._state += [carried.topk_logprobs, carried.topk_index, carried.hidden, carried.bonus]
        adjustments = programs.step.logits_tables.adjustments
        adjustments.allocate()
        self._state += [adjustments.flags, adjustments.min_tokens_left]
        draft = programs.step._draft
        if isinstance(draft, RestingDraft):
            self._state += [draft._hidden, draft._next_ids, draft._counts]
        if isinstance(draft, HasChances) and draft.chances is not None:
            self._state += [draft.chances.trials, draft.chances.hits]
        if (history := programs.step._history) is not None:
            self._state.append(history.tokens)
        if (lookup := programs.step._lookup) is not None:
            self._state += [lookup.chances.trials, lookup.chances.hits]
        self._buffer_addresses: dict[int, list[int]] = {}
        self._original_replay, self._programs = programs._replay, programs
        self._shapes = engine._parts.lockstep.tree_shapes
        monkeypatch.setattr(programs, "_replay", self.replay_and_compare)

    def replay_and_compare(self, program: Program, staged_lists: StagedLists) -> StepOutput:
        tape: Any = program.captured
        state_before = self._copy_state()
        key = next(key for key, captured_program in self._programs.captured.items() if captured_program is program)
        batch = self._programs.assembler.batch(
            staged_lists, SamplingMode(key.mode), key.forced_nodes, ExtendMode(key.extend_mode)
        )
        eager_output = self._programs.step.run(batch, self._shapes[key.tier])
        expected = [eager_output.packed, *_logprobs(eager_output), *self._copy_state()]
        with torch.inference_mode():
            for buffer_of_engine, saved_buffer in zip(self._state, state_before, strict=True):
                buffer_of_engine.copy_(saved_buffer)
        places = [buffer.data_ptr() for buffer in tape.buffers]
        assert self._buffer_addresses.setdefault(id(program), places) == places
        poison(tape, POISON_VALUES[self.replays[id(program)] % 2])
        output = self._original_replay(program, staged_lists)
        actual = [output.packed, *_logprobs(output), *self._copy_state()]
        assert all(bitwise_equal(a, b) for a, b in zip(actual, expected, strict=True))
        self.replays[id(program)] += 1
        return output

    def _copy_state(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._state]


def _logprobs(output: StepOutput) -> list[Tensor]:
    logprobs = output.logprobs
    return [] if logprobs is None else [logprobs.chosen, logprobs.values, logprobs.ids]


def bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Whether the tensors are equal; NaN equals NaN."""
    return bool(((first == second) | ((first != first) & (second != second))).all())


def outputs_of_requests(engine: Engine, params: RequestParams) -> dict[str, list[Any]]:
    """Run four times two requests; return the tokens and log-probabilities of each. Table rows, pages and lengths
    change from pair to pair, while the shapes of steps recur.
    """
    outputs: dict[str, list[Any]] = {}
    for number in range(4):
        for i in range(2):
            name, prompt = f"{number}/{i}", tuple(2 + (number + n) % 20 for n in range(4 + 9 * i + number))
            request_params = replace(params, seed=10 * number + i, max_tokens=30, ignore_eos=True)
            engine.submit(Request(name, prompt, request_params))
            outputs[name] = []
        while engine.has_work:
            for output in engine.step().outputs:
                outputs[output.request_id] += [*output.token_ids, *output.logprobs]
    return outputs


def check(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, params: RequestParams, sizes: tuple[int, ...] | None = None
) -> Counter[int]:
    """Check that requests get the same outputs with and without captured programs, and that each replay equals its
    eager step. Return how often each program was replayed.
    """
    eager_outputs = outputs_of_requests(build_engine(config), params)
    engine = build_engine(config.model_copy(update={"capture": "on", "capture_sizes": sizes}))
    comparison = ReplayComparison(monkeypatch, engine)
    replayed_outputs = outputs_of_requests(engine, params)
    if sizes is None:
        assert replayed_outputs == eager_outputs
    else:  # a matrix product rounds differently if it has another number of rows
        assert round_logprobs(replayed_outputs) == round_logprobs(eager_outputs)
    return comparison.replays


def round_logprobs(outputs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The outputs with log-probabilities rounded to nine digits."""
    return {
        name: [
            (item.token_id, round(item.logprob, 9), [(token, round(value, 9)) for token, value in item.top])
            if isinstance(item, TokenLogprob)
            else item
            for item in items
        ]
        for name, items in outputs.items()
    }


@pytest.mark.parametrize("sizes", [pytest.param(None, marks=pytest.mark.slow), SIZES])
@pytest.mark.parametrize("sampling", PARAMS)
@pytest.mark.parametrize("topk", [*(pytest.param(topk, marks=pytest.mark.slow) for topk in (0, 1)), 3])
def test_replay_gives_the_same_outputs_and_state_as_the_eager_step(
    monkeypatch: pytest.MonkeyPatch, topk: int, sampling: str, sizes: tuple[int, ...] | None
) -> None:
    """With `sizes` steps are padded to few sizes, so that steps with prompt rows are replayed as well."""
    target, draft = tiny_pair()
    config = config_of(target, draft if topk else None, topk or 1, page_size=4, chunked_prefill_size=9)
    replays = check(monkeypatch, config, PARAMS[sampling], sizes)
    assert max(replays.values()) >= 20 and len(replays) >= (1 if sizes else 2)


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
@pytest.mark.parametrize("topk", [1, 3])
def test_replay_of_adaptive_trees_and_resting_drafts_equals_the_eager_step(
    monkeypatch: pytest.MonkeyPatch, topk: int, sampling: str
) -> None:
    config = adaptive(config_of(*tiny_pair(), topk, 2, page_size=4, chunked_prefill_size=9))
    plain_outputs = outputs_of_requests(build_engine(config_of(tiny_pair()[0])), PARAMS[sampling])
    tiers = ResolvedSettings.from_settings(config).tiers
    last_tier, selecting_tier = (
        len(tiers) - 1,
        max((tier for tier, shape in enumerate(tiers) if shape.selects_nodes), default=1),
    )
    # The first step after the rest is the one in which the draft wakes.
    pattern = [0, 0, 0, 0, last_tier, last_tier, 1, 1, selecting_tier, selecting_tier]
    engine = engine_with_trees(lambda: build_engine(config.model_copy(update={"capture": "on"})), cycle(pattern))
    comparison = ReplayComparison(monkeypatch, engine)
    outputs = outputs_of_requests(engine, PARAMS[sampling])
    assert _tokens(outputs) == _tokens(plain_outputs)
    keys = {id(program): key for key, program in engine.lockstep.programs.captured.items()}
    replayed = {(keys[program].tier, ExtendMode(keys[program].extend_mode)) for program in comparison.replays}
    assert replayed >= {
        (0, ExtendMode.NOTHING),
        (0, ExtendMode.MISSED),
        (1, ExtendMode.ACCEPTED),
        (selecting_tier, ExtendMode.ACCEPTED),
        (last_tier, ExtendMode.ACCEPTED),
    }


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
def test_replay_of_ngram_speculation_equals_the_eager_step(monkeypatch: pytest.MonkeyPatch, sampling: str) -> None:
    config = config_of(tiny_pair()[0], speculative_algorithm="NGRAM", speculative_num_steps=3, page_size=4)
    replays = check(monkeypatch, config, PARAMS[sampling])
    assert max(replays.values()) >= 20


def _tokens(outputs: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {name: [item for item in items if isinstance(item, int)] for name, items in outputs.items()}


def test_replay_output_stays_valid_after_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is one step ahead: it reads the output of a replay after the next replay, mostly of the same program."""
    config = config_of(*tiny_pair(), 3)
    eager_outputs = outputs_of_requests(build_engine(config), PARAMS["log-probabilities"])
    engine = build_engine(config.model_copy(update={"capture": "on"}))
    engine.lockstep.max_in_flight = 1
    programs, replay_steps = engine._parts.lockstep.programs, list[int]()
    original_replay = programs._replay

    def record_replay(program: Program, staged_lists: StagedLists) -> StepOutput:
        replay_steps.append(id(program))
        return original_replay(program, staged_lists)

    monkeypatch.setattr(programs, "_replay", record_replay)
    # Rounded: here other requests share a step than in the eager run, so matrix products round differently.
    assert round_logprobs(outputs_of_requests(engine, PARAMS["log-probabilities"])) == round_logprobs(eager_outputs), (
        "outputs differ from eager steps"
    )
    assert sum(first == second for first, second in pairwise(replay_steps)) >= 20, "too few programs ran twice in a row"


def test_startup_programs_stay_and_oldest_later_programs_are_evicted() -> None:
    config = config_of(*tiny_pair(), 1, capture="on", capture_sizes=(1, 2), max_running_requests=2)
    engine = build_engine(config)
    programs = engine._parts.lockstep.programs
    startup_programs = programs.captured
    assert len(startup_programs) == 6, "expected a program for each of two sizes and three modes"
    any_program = next(iter(startup_programs.values()))
    for number in range(TAPES + 3):
        programs.add((number, 0, ()), any_program)
    later_keys = [key for key in programs.captured if key not in startup_programs]
    assert (
        later_keys == [(number, 0, ()) for number in range(3, TAPES + 3)]
        and startup_programs.items() <= programs.captured.items()
    )
    assert programs.checksum == sum(program.checksum for program in programs.captured.values())
    for key in programs.captured:
        programs.remove(key)
    assert programs.checksum == 0


def test_decode_steps_are_captured_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a program for each captured number of requests, each tier that batches of this size have,
    and each mode.
    """
    config = config_of(*tiny_pair(), 3, speculative_batch_tiers={4: 1, 6: 0}, max_running_requests=6)
    engine = build_engine(config.model_copy(update={"capture": "on", "capture_sizes": (1, 2, 4, 8)}))
    programs, captured_info = engine._parts.lockstep.programs, engine.info().captured
    decode_only_keys = [key for key in programs.captured if not key.sizes[0].prompt_rows]
    keys = {(key.tier, key.sizes[0].decodes, key.mode) for key in decode_only_keys}
    tiers = ((3, 1), (3, 2), (3, 4), (1, 4), (1, 8), (0, 8))
    assert keys >= {(*tier, mode) for tier in tiers for mode in (0, 1, 3)}
    assert captured_info is not None and captured_info.sizes == (1, 2, 4, 8) and captured_info.seconds > 0
    assert captured_info.programs == len(programs.captured) >= 18 and captured_info.mb > 0
    comparison = ReplayComparison(monkeypatch, engine)
    engine.submit(Request("first", (5, 6, 7), RequestParams(temperature=0.0, max_tokens=9, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert comparison.replays.total() >= 3, "too few decode steps were replayed"


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
def test_non_finite_prompt_end_in_a_padded_step_affects_no_other_request(sampling: str) -> None:
    """A padded step has more ends of prompts than prompts. The additional ends are those of an idle row."""
    config = config_of(*tiny_pair(), 3, capture="on", capture_sizes=SIZES)
    engine, params = build_engine(config), replace(PARAMS[sampling], max_tokens=20, ignore_eos=True, seed=1)
    healthy_prompts: dict[str, tuple[int, ...]] = {f"sound {n}": (3, 4, 5 + n) for n in range(3)}
    healthy_tokens = tokens_of_requests(engine, healthy_prompts, params)
    bad_token = min(set(range(9, VOCAB)) - {token for tokens in healthy_tokens.values() for token in tokens})
    with torch.inference_mode():
        engine._parts.lockstep.step._target.model._embed.weight[bad_token] = math.nan
    bad_prompts = {f"bad {n}": (8, 7, bad_token) for n in range(2)}
    tokens_by_request = tokens_of_requests(engine, healthy_prompts | bad_prompts, params)
    assert tokens_by_request == healthy_tokens | {name: [] for name in bad_prompts}
    assert tokens_of_requests(engine, healthy_prompts, params) == healthy_tokens, (
        "the non-finite requests affect later ones"
    )


def tokens_of_requests(
    engine: Engine, prompts: dict[str, tuple[int, ...]], params: RequestParams
) -> dict[str, list[int]]:
    """Run the prompts as requests that share steps; return the tokens of each."""
    return run(engine, [Request(name, prompt, params) for name, prompt in prompts.items()]).tokens


def test_steps_with_prompt_rows_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt runs five times, so that steps with the same number of prompt rows recur."""
    target = target_folder(vocab_size=VOCAB)
    config = config_of(target, draft_folder(target, num_aux=1), 3, disable_radix_cache=True)
    engine = build_engine(config.model_copy(update={"capture": "on"}))
    comparison, rows_and_replays = ReplayComparison(monkeypatch, engine), []
    for number in range(5):
        engine.submit(Request(f"{number}", tuple(range(2, 13)), RequestParams(temperature=0.0, max_tokens=6)))
        while engine.has_work:
            rows = engine.step().stats.prompt_rows
            rows_and_replays.append((rows, sum(comparison.replays.values())))
    prompt_steps_replayed = [after > before for (_, before), (rows, after) in pairwise(rows_and_replays) if rows]
    assert prompt_steps_replayed[-1], "the step of the last prompt was not replayed"


DIAGONAL = diagonal()
FAST_PAIRS = [n for n, pair in enumerate(DIAGONAL) if pair.draft in LISTS or pair.family in ("gpt_oss", "gemma3")][:3]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number", [pytest.param(at, marks=() if at in FAST_PAIRS else pytest.mark.slow) for at in range(len(DIAGONAL))]
)
def test_replay_matches_eager_steps_for_each_draft_and_family(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Each pair runs once. Chain and tree take turns over the pairs, and so do the sampling parameters."""
    pair = DIAGONAL[number]
    config = config_of(
        pair.target, draft_of(pair.draft), (1, 3)[number % 2], 3, speculative_algorithm=algorithm_of(pair.spec())
    )
    params = list(PARAMS.values())[number % len(PARAMS)]
    assert max(check(monkeypatch, config, params).values()) >= 20


@pytest.mark.parametrize("max_levels", [0, 1, 2])
def test_programs_of_every_batch_tier_are_replayed(monkeypatch: pytest.MonkeyPatch, max_levels: int) -> None:
    """When two requests decode together, their trees have fewer levels than the tree of a single request."""
    config = config_of(*tiny_pair(), 3, speculative_batch_tiers={2: max_levels})
    assert max(check(monkeypatch, config, PARAMS["0.8"]).values()) >= 20
