"""A captured step equals the step to the last bit, whatever its buffers held before and whoever decodes."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.batch import SamplingMode
from cluster.capture.tape import Tape
from cluster.config import EngineConfig
from cluster.device.staging import StagedLists
from cluster.engine import Engine, build_engine
from cluster.engine.programs import TAPES, Program
from cluster.request import LogitAdjustments, Request, RequestParams, TokenLogprob
from cluster.spec.result import StepOutput
from tests.parity.harness import SAMPLING, VOCAB, config_of, run, tiny_pair
from tests.parity.pairs import algorithm_of, diagonal, draft_of
from tests.parity.poison import memory_of
from tests.tiny import draft_folder, target_folder
from tests.unit.models.draft_cases import LISTS

ADJUSTED = LogitAdjustments(0.4, 0.3, 1.2, ((3, 1.0), (1, -100.0)), min_tokens=9)
PARAMS = {
    **SAMPLING,
    "log-probabilities": RequestParams(temperature=0.8, logprobs=3),
    "adjusted": RequestParams(temperature=0.8, adjustments=ADJUSTED),
}
POISONS = (math.nan, math.inf)
SIZES = (1, 2, 4, 8, 16)


def poison(tape: Tape[Any], value: float) -> None:
    """Fill all that the program makes for itself."""
    with torch.inference_mode():
        for buffer in tape.buffers:
            buffer.fill_(value if buffer.is_floating_point() else 1)


class Compared:
    """Runs every step that is to be replayed as it is as well, from the same state, and compares all it leaves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        programs = engine._parts.lockstep.programs
        carried = programs.step.draft_inputs
        self.replays = Counter[int]()
        self._state = [*memory_of(engine), engine._parts.cache.table.lens]
        self._state += [carried.topk_logprobs, carried.topk_index, carried.hidden, carried.bonus]
        adjustments = programs.step.logits_tables.adjustments
        adjustments.allocate()
        self._state += [adjustments.flags, adjustments.min_tokens_left]
        self._places: dict[int, list[int]] = {}
        self._replayed, self._programs = programs._replay, programs
        self._shapes = {shape.num_steps: shape for shape in engine._parts.lockstep.tree_shapes}
        monkeypatch.setattr(programs, "_replay", self.replayed)

    def replayed(self, program: Program, sent: StagedLists) -> StepOutput:
        tape: Any = program.captured
        before = self._copied()
        key = next(key for key, one in self._programs.captured.items() if one is program)
        batch = self._programs.assembler.batch(sent, SamplingMode(key.mode), key.forced_nodes)
        run = self._programs.step.run(batch, self._shapes[key.num_steps])
        wanted = [run.packed, *_logprobs(run), *self._copied()]
        with torch.inference_mode():
            for mine, old in zip(self._state, before, strict=True):
                mine.copy_(old)
        places = [buffer.data_ptr() for buffer in tape.buffers]
        assert self._places.setdefault(id(program), places) == places
        poison(tape, POISONS[self.replays[id(program)] % 2])
        given = self._replayed(program, sent)
        got = [given.packed, *_logprobs(given), *self._copied()]
        assert all(same(a, b) for a, b in zip(got, wanted, strict=True))
        self.replays[id(program)] += 1
        return given

    def _copied(self) -> list[Tensor]:
        return [one.clone() for one in self._state]


def _logprobs(output: StepOutput) -> list[Tensor]:
    logprobs = output.logprobs
    return [] if logprobs is None else [logprobs.chosen, logprobs.values, logprobs.ids]


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def texts(engine: Engine, params: RequestParams) -> dict[str, list[Any]]:
    """What requests get that come and go: rows, pages and lengths change, and shapes recur."""
    given: dict[str, list[Any]] = {}
    for number in range(4):
        for i in range(2):
            name, prompt = f"{number}/{i}", tuple(2 + (number + n) % 20 for n in range(4 + 9 * i + number))
            own = replace(params, seed=10 * number + i, max_tokens=30, ignore_eos=True)
            engine.submit(Request(name, prompt, own))
            given[name] = []
        while engine.has_work:
            for output in engine.step().outputs:
                given[output.request_id] += [*output.token_ids, *output.logprobs]
    return given


def check(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, params: RequestParams, sizes: tuple[int, ...] | None = None
) -> Counter[int]:
    """The texts with captured programs are those without; returns how often each program was replayed."""
    plain = texts(build_engine(config), params)
    engine = build_engine(config.model_copy(update={"capture": "on", "capture_sizes": sizes}))
    compared = Compared(monkeypatch, engine)
    given = texts(engine, params)
    if sizes is None:
        assert given == plain
    else:  # products over other numbers of rows round otherwise
        assert rounded(given) == rounded(plain)
    return compared.replays


def rounded(given: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The texts with log-probabilities to nine digits."""
    return {
        name: [
            (one.token_id, round(one.logprob, 9), [(token, round(value, 9)) for token, value in one.top])
            if isinstance(one, TokenLogprob)
            else one
            for one in text
        ]
        for name, text in given.items()
    }


@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize("sampling", PARAMS)
@pytest.mark.parametrize("topk", [*(pytest.param(topk, marks=pytest.mark.slow) for topk in (0, 1)), 3])
def test_replay_gives_the_same_outputs_and_state_as_the_eager_step(
    monkeypatch: pytest.MonkeyPatch, topk: int, sampling: str, sizes: tuple[int, ...] | None
) -> None:
    """Padded to `sizes`, steps with prompt rows are replayed as well: few sizes are enough for all."""
    target, draft = tiny_pair()
    config = config_of(target, draft if topk else None, topk or 1, page_size=4, chunked_prefill_size=9)
    replays = check(monkeypatch, config, PARAMS[sampling], sizes)
    assert max(replays.values()) >= 20 and len(replays) >= (1 if sizes else 2)


def test_replay_output_stays_valid_after_the_next_replay() -> None:
    """With a host that is a step ahead, of the same program as a rule."""
    config = config_of(*tiny_pair(), 3)
    plain = texts(build_engine(config), PARAMS["log-probabilities"])
    engine = build_engine(config.model_copy(update={"capture": "on"}))
    engine.lockstep.max_in_flight = 1
    assert rounded(texts(engine, PARAMS["log-probabilities"])) == rounded(plain), "requests share steps with others"


def test_startup_programs_stay_and_oldest_later_programs_are_evicted() -> None:
    config = config_of(*tiny_pair(), 1, capture="on", capture_sizes=(1, 2), max_running_requests=2)
    engine = build_engine(config)
    programs = engine._parts.lockstep.programs
    started = programs.captured
    assert len(started) == 6, "two sizes, three modes"
    one = next(iter(started.values()))
    for number in range(TAPES + 3):
        programs.add((number, 0, ()), one)
    later = [key for key in programs.captured if key not in started]
    assert later == [(number, 0, ()) for number in range(3, TAPES + 3)] and started.items() <= programs.captured.items()
    assert programs.checksum == sum(program.checksum for program in programs.captured.values())
    for key in programs.captured:
        programs.remove(key)
    assert programs.checksum == 0


def test_decode_steps_are_captured_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number of requests, each tier that numbers of this size have, and each mode."""
    config = config_of(*tiny_pair(), 3, speculative_batch_tiers={4: 1, 6: 0}, max_running_requests=6)
    engine = build_engine(config.model_copy(update={"capture": "on", "capture_sizes": (1, 2, 4, 8)}))
    programs, info = engine._parts.lockstep.programs, engine.info().captured
    alone = [key for key in programs.captured if not key.sizes[0].prompt_rows]
    keys = {(key.num_steps, key.sizes[0].decodes, key.mode) for key in alone}
    tiers = ((3, 1), (3, 2), (3, 4), (1, 4), (1, 8), (0, 8))
    assert keys >= {(*tier, mode) for tier in tiers for mode in (0, 1, 3)}
    assert info is not None and info.sizes == (1, 2, 4, 8) and info.seconds > 0
    assert info.programs == len(programs.captured) >= 18 and info.mb > 0
    compared = Compared(monkeypatch, engine)
    engine.submit(Request("first", (5, 6, 7), RequestParams(temperature=0.0, max_tokens=9, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert compared.replays.total() >= 3, "steps of decoding, from the first on"


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
def test_non_finite_prompt_end_in_a_padded_step_affects_no_other_request(sampling: str) -> None:
    """Idle ends of a padded step are those of an idle row."""
    config = config_of(*tiny_pair(), 3, capture="on", capture_sizes=SIZES)
    engine, params = build_engine(config), replace(PARAMS[sampling], max_tokens=20, ignore_eos=True, seed=1)
    sound: dict[str, tuple[int, ...]] = {f"sound {n}": (3, 4, 5 + n) for n in range(3)}
    alone = texts_of(engine, sound, params)
    bad = min(set(range(9, VOCAB)) - {token for tokens in alone.values() for token in tokens})
    with torch.inference_mode():
        engine._parts.lockstep.step._target.model._embed.weight[bad] = math.nan
    broken = {f"bad {n}": (8, 7, bad) for n in range(2)}
    got = texts_of(engine, sound | broken, params)
    assert got == alone | {name: [] for name in broken}
    assert texts_of(engine, sound, params) == alone, "nothing is left behind"


def texts_of(engine: Engine, prompts: dict[str, tuple[int, ...]], params: RequestParams) -> dict[str, list[int]]:
    """The tokens of requests that run together."""
    return run(engine, [Request(name, prompt, params) for name, prompt in prompts.items()]).tokens


def test_steps_with_prompt_rows_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts again and again, so that steps with prompt rows recur."""
    target = target_folder(vocab_size=VOCAB)
    config = config_of(target, draft_folder(target, num_aux=1), 3, disable_radix_cache=True)
    engine = build_engine(config.model_copy(update={"capture": "on"}))
    compared, seen = Compared(monkeypatch, engine), []
    for number in range(5):
        engine.submit(Request(f"{number}", tuple(range(2, 13)), RequestParams(temperature=0.0, max_tokens=6)))
        while engine.has_work:
            rows = engine.step().stats.prompt_rows
            seen.append((rows, sum(compared.replays.values())))
    replayed = [after > before for (_, before), (rows, after) in pairwise(seen) if rows]
    assert replayed[-1], "the last prompt was replayed"


DIAGONAL = diagonal()
FEW = [n for n, pair in enumerate(DIAGONAL) if pair.draft in LISTS or pair.family in ("gpt_oss", "gemma3")][:6]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number", [pytest.param(at, marks=() if at in FEW else pytest.mark.slow) for at in range(len(DIAGONAL))]
)
def test_replay_matches_eager_steps_for_each_draft_and_family(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """One pair as a chain or a tree, sampled or filtered, by turns."""
    pair = DIAGONAL[number]
    config = config_of(
        pair.target, draft_of(pair.draft), (1, 3)[number % 2], 3, speculative_algorithm=algorithm_of(pair.spec())
    )
    params = list(PARAMS.values())[number % len(PARAMS)]
    assert max(check(monkeypatch, config, params).values()) >= 20


@pytest.mark.parametrize("most", [0, 1, 2])
def test_programs_of_every_batch_tier_are_replayed(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Two requests together draft less deeply than one."""
    config = config_of(*tiny_pair(), 3, speculative_batch_tiers={2: most})
    assert max(check(monkeypatch, config, PARAMS["0.8"]).values()) >= 20
