"""The engine on a stream as unkind as CUDA's (`stream.py`), its steps captured as on a GPU: plain decoding's tokens."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from cluster.batch import SamplingMode
from cluster.capture.recorder import host_call, native, recorded_by
from cluster.config import EngineConfig
from cluster.device.staging import StagedLists
from cluster.dp_attention.sizes import Buckets
from cluster.engine import Engine, build_engine
from cluster.engine.programs import Program, Programs
from cluster.request import LogitAdjustments, Request
from cluster.sampling.token_bitmask import apply_token_bitmask
from cluster.spec import result
from cluster.spec.result import StepOutput
from tests.parity.automata import automaton, walked
from tests.parity.harness import SAMPLING, config_of, prompts, request, run, tiny_pair
from tests.parity.pairs import Pair, algorithm_of, diagonal, draft_of
from tests.static.stream import OnStream, Stream, StreamGraph, Unkind, cross, on_stream
from tests.unit.kernels.library import c_library

pytestmark = pytest.mark.skipif(
    os.environ.get("BACKEND") == "torch", reason="on a GPU steps whose attention is torch's are not captured"
)
SHAPES = {"plain": (0, 0), "chain": (1, 3), "tree": (3, 3)}
BANS = LogitAdjustments(repetition_penalty=1.3, frequency_penalty=0.4, bias=((4, -100.0), (9, 3.0)), min_tokens=4)
KINDS = ("free", "grammar", "penalties", "log-probabilities")


def asked(kind: str, sampling: str) -> list[Request]:
    """Four requests; with grammars one is free and one adjusted besides."""
    made = []
    for i, prompt in enumerate(prompts(4, longest=20)):
        given: dict[str, Any] = {"seed": 40 + i, "max_tokens": 14, "ignore_eos": kind != "grammar"}
        given["grammar"] = automaton(i) if kind == "grammar" and i != 2 else None
        given["adjustments"] = BANS if kind == "penalties" or (kind == "grammar" and i == 1) else None
        given["logprobs"] = 2 if kind == "log-probabilities" else None
        made.append(request(f"{i}", prompt, SAMPLING[sampling], **given))
    return made


@cache
def alone(target: str, kind: str, sampling: str) -> dict[str, list[int]]:
    """By plain decoding, each request by itself, nothing captured."""
    tokens: dict[str, list[int]] = {}
    for one in asked(kind, sampling):
        tokens |= run(walked(build_engine(config_of(target))), [one]).tokens
    return tokens


def config(target: str, draft: str | None, shape: str, **settings: object) -> EngineConfig:
    topk, steps = SHAPES[shape]
    given = {"max_running_requests": 4, "kv_cache_dtype": "auto"} | settings
    return config_of(target, draft if topk else None, max(1, topk), steps, **given)


def steps_of(engine: Engine) -> list[tuple[SamplingMode, bool]]:
    programs: Any = engine._parts.lockstep.programs
    assert isinstance(programs, OnStream)
    return programs.modes


def check(
    of: EngineConfig, kind: str, sampling: str, turns: int = 2, buckets: Buckets | None = None
) -> tuple[Engine, Stream]:
    """Twice, because a key is captured the second time that it occurs."""
    expected = alone(of.model_path, kind, sampling)
    with pytest.MonkeyPatch.context() as patch:
        stream = on_stream(patch, buckets)
        engine = walked(build_engine(of))
        started, launched = stream.segments, stream.launches
        for _ in range(turns):
            assert run(engine, asked(kind, sampling)).tokens == expected
    assert stream.launches > launched, "nothing was replayed"
    if kind == "free" and buckets is None:
        assert stream.segments == started, "decoding was captured before the first request, in one segment a program"
    return engine, stream


@pytest.fixture(autouse=True)
def by_the_kernels_in_c() -> None:
    """They are told places, as Triton's programs are, and look at nothing before they run."""
    c_library()


GRID = list(product(KINDS, SHAPES, ("greedy", "0.8")))


@pytest.mark.parametrize(
    ("kind", "shape", "sampling"),
    [
        pytest.param(*one, marks=() if at % 5 == 3 or one[0] == "grammar" else pytest.mark.slow)
        for at, one in enumerate(GRID)
    ],
)
def test_stream_replay_gives_the_tokens_of_plain_decoding(kind: str, shape: str, sampling: str) -> None:
    engine, stream = check(config(*tiny_pair(), shape), kind, sampling, turns=3 if kind == "grammar" else 2)
    steps = steps_of(engine)
    segments = [len(program.captured) for program in engine._parts.lockstep.programs.captured.values()]  # type: ignore[arg-type]
    assert sum(again for _, again in steps) > 3
    if kind == "grammar":
        assert any(again and SamplingMode.CONSTRAINED in mode for mode, again in steps), (
            "none with a grammar was replayed"
        )
        assert max(segments) > 3 and stream.waits > 0
    else:
        assert set(segments) == {1} and not stream.waits, "without a grammar a step is one graph, and nobody waits"


@pytest.mark.parametrize("kind", ["free", "grammar"])
def test_steps_with_prompts_are_captured_when_capture_is_on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """And tokens are barred by torch's operators, as on a GPU."""
    monkeypatch.setattr("cluster.engine.build.bitmask_of", lambda _: apply_token_bitmask)
    of = config(*tiny_pair(), "tree", disable_radix_cache=True, capture="on")
    engine, _ = check(of, kind, "0.8", 3, Buckets((1, 2, 4, 8, 16, 32, 64, 96)))
    assert any(key.sizes[0].prompt_rows for key in engine._parts.lockstep.programs.captured)


FAMILY_PAIRS = diagonal()
FEW = range(4, len(FAMILY_PAIRS), 20)


@pytest.mark.parametrize(
    "number", [pytest.param(at, marks=() if at in FEW else pytest.mark.slow) for at in range(len(FAMILY_PAIRS))]
)
def test_stream_replay_matches_plain_decoding_for_each_family_and_draft(number: int) -> None:
    """Each draft once and each family at least once; shapes, samplings and kinds by turns."""
    check_pair(FAMILY_PAIRS[number], list(SHAPES)[number % 3], KINDS[number // 3 % 4], number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_stream_replay_matches_plain_decoding_for_each_family_and_kind(kind: str) -> None:
    """Every family with every kind; shapes by turns, so that each family and each kind meets all of them."""
    turn = KINDS.index(kind)
    for at, pair in enumerate({pair.family: pair for pair in FAMILY_PAIRS}.values()):
        check_pair(pair, list(SHAPES)[(at + turn) % 3], kind, at + turn // 2)


def check_pair(pair: Pair, shape: str, kind: str, turn: int) -> None:
    """Greedy or sampled, by turns."""
    settings = {"speculative_algorithm": algorithm_of(pair.spec())} if shape != "plain" else {}
    check(config(pair.target, draft_of(pair.draft), shape, **settings), kind, ("greedy", "0.8")[turn % 2])


ROWS = torch.arange(4.0)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda: ROWS.sum().item(), "item"),
        (lambda: ROWS.add(1).tolist(), "tolist"),
        (lambda: ROWS.add(1).cpu(), "cpu"),
        (lambda: ROWS[ROWS > 1], "asks for a count"),
        (lambda: torch.tensor([1.0]), "numbers of the host"),
        (lambda: result.HostCopies([ROWS.add(1)]).wait(), "waits while a segment is captured"),
    ],
)
def test_stream_rejects_operations_that_a_gpu_cannot_capture(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[], object], what: str
) -> None:
    stream = on_stream(monkeypatch)
    stream.inside = True
    with recorded_by(stream), stream, pytest.raises(Unkind, match=what):
        StreamGraph(wrong, stream)


def test_captured_operations_run_only_when_the_launched_stream_runs() -> None:
    stream, memory, seen = Stream(), torch.zeros(3), list[list[float]]()
    with torch.inference_mode(), recorded_by(stream), stream:
        stream.begin()
        made = memory + 1
        memory.add_(5)
        native(lambda: seen.append(made.tolist()))
        launch = stream.end()
    assert memory.tolist() == [0.0] * 3 and made.isnan().all() and not seen
    launch()
    assert memory.tolist() == [0.0] * 3 and not seen
    stream.run()
    assert memory.tolist() == [5.0] * 3 and seen == [[1.0] * 3]


def test_each_replay_calls_the_host_again_between_segments() -> None:
    """What it says goes to one place; a program's own memory is not needed from one replay to the next."""
    stream, x, seen = Stream(), torch.tensor([1.0, 2.0]), list[list[float]]()

    def say(given: torch.Tensor) -> torch.Tensor:
        seen.append(given.tolist())
        return given * 100

    def program() -> torch.Tensor:
        doubled = x * 2
        answer = host_call(say, doubled)
        assert answer is not None
        return answer + doubled

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        cross(patch, stream)
        with recorded_by(stream), stream:
            graph = StreamGraph(program, stream)
            first = graph.output.data_ptr()
        stream.run()
        assert graph.output.tolist() == [202.0, 404.0] and len(graph) == 3
        x.copy_(torch.tensor([3.0, 4.0]))
        with recorded_by(stream), stream:
            graph.replay()
        stream.run()
        assert graph.output.tolist() == [606.0, 808.0] and graph.output.data_ptr() == first
    assert seen == [[2.0, 4.0], [6.0, 8.0]]


def noticed(shape: str, kind: str) -> None:
    """With what a test has planted, tokens are others, or the stream says what is wrong."""
    with pytest.raises((AssertionError, IndexError)):
        check(config(*tiny_pair(), shape), kind, "0.8")


def test_planted_stale_host_call_result_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tiny_pair()[0], "grammar", "0.8")
    true = StreamGraph.host_call

    def once(self: StreamGraph, call: Any, given: tuple[Any, ...]) -> Any:
        answers: list[Any] = []

        def stale(*now: Any) -> Any:
            answers[:] = answers or [call(*now)]
            return answers[0]

        return true(self, stale, given)

    monkeypatch.setattr(StreamGraph, "host_call", once)
    noticed("chain", "grammar")


def test_planted_missing_result_copy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tiny_pair()[0], "free", "0.8")
    monkeypatch.setattr(StepOutput, "start_copy", replace)
    noticed("plain", "free")


def test_planted_missing_input_copy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tiny_pair()[0], "free", "0.8")
    true = Programs._replay

    def elsewhere(self: Programs, program: Program, sent: StagedLists) -> StepOutput:
        return true(self, program, program.inputs)

    monkeypatch.setattr(Programs, "_replay", elsewhere)
    noticed("plain", "free")
