"""The engine on a simulated CUDA stream (`stream.py`), with steps captured as on a GPU, gives the tokens of plain
decoding.
"""

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
from tests.capture.stream import (
    GpuViolation,
    Stream,
    StreamGraph,
    StreamPrograms,
    patch_transfers,
    run_engines_on_stream,
)
from tests.parity.automata import automaton, with_automata
from tests.parity.harness import SAMPLING, config_of, make_request, prompts, run, tiny_pair
from tests.parity.pairs import Pair, algorithm_of, diagonal, draft_of
from tests.unit.kernels.library import c_library

pytestmark = pytest.mark.skipif(
    os.environ.get("BACKEND") == "torch", reason="on a GPU steps whose attention is torch's are not captured"
)
SHAPES = {"plain": (0, 0), "chain": (1, 3), "tree": (3, 3)}
BANS = LogitAdjustments(repetition_penalty=1.3, frequency_penalty=0.4, bias=((4, -100.0), (9, 3.0)), min_tokens=4)
KINDS = ("free", "grammar", "penalties", "log-probabilities")
OTHER_TOKENS = "the tokens are not those of plain decoding"


def requests_of_kind(kind: str, sampling: str) -> list[Request]:
    """Four requests of one of the `KINDS`. With grammars, one of them has no grammar and another has penalties too."""
    requests = []
    for number, prompt in enumerate(prompts(4, longest=20)):
        options: dict[str, Any] = {"seed": 40 + number, "max_tokens": 14, "ignore_eos": kind != "grammar"}
        options["grammar"] = automaton(number) if kind == "grammar" and number != 2 else None
        options["adjustments"] = BANS if kind == "penalties" or (kind == "grammar" and number == 1) else None
        options["logprobs"] = 2 if kind == "log-probabilities" else None
        requests.append(make_request(f"{number}", prompt, SAMPLING[sampling], **options))
    return requests


@cache
def plain_tokens(target: str, kind: str, sampling: str) -> dict[str, list[int]]:
    """The tokens of the requests by plain decoding: each request runs alone, and nothing is captured."""
    tokens: dict[str, list[int]] = {}
    for single_request in requests_of_kind(kind, sampling):
        tokens |= run(with_automata(build_engine(config_of(target))), [single_request]).tokens
    return tokens


def config(target: str, draft: str | None, shape: str, **settings: object) -> EngineConfig:
    topk, steps = SHAPES[shape]
    all_settings = {"max_running_requests": 4, "kv_cache_dtype": "auto"} | settings
    return config_of(target, draft if topk else None, max(1, topk), steps, **all_settings)


def steps_of(engine: Engine) -> list[tuple[SamplingMode, bool]]:
    """For each step of the engine: its mode, and whether it was replayed."""
    programs: Any = engine._parts.lockstep.programs
    assert isinstance(programs, StreamPrograms)
    return programs.step_modes


def check(
    engine_config: EngineConfig, kind: str, sampling: str, turns: int = 2, buckets: Buckets | None = None
) -> tuple[Engine, Stream]:
    """Run the requests `turns` times on a stream, and compare their tokens with plain decoding. Return engine and
    stream.

    They run at least twice, because a program is captured when its key occurs for the second time.
    """
    expected = plain_tokens(engine_config.model_path, kind, sampling)
    with pytest.MonkeyPatch.context() as patch:
        stream = run_engines_on_stream(patch, buckets)
        engine = with_automata(build_engine(engine_config))
        segments_before, launches_before = stream.segments, stream.launches
        for _ in range(turns):
            assert run(engine, requests_of_kind(kind, sampling)).tokens == expected, OTHER_TOKENS
    assert stream.launches > launches_before, "nothing was replayed"
    if kind == "free" and buckets is None:
        assert stream.segments == segments_before, "a segment was captured after the start of the engine"
    return engine, stream


@pytest.fixture(autouse=True)
def require_c_kernels() -> None:
    """Require the C kernels: like Triton's programs they get memory addresses, and read no data before they run."""
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
    assert sum(is_replay for _, is_replay in steps) > 3
    if kind == "grammar":
        assert any(is_replay and SamplingMode.CONSTRAINED in mode for mode, is_replay in steps), (
            "no step with a grammar was replayed"
        )
        assert max(segments) > 3 and stream.waits > 0
    else:
        assert set(segments) == {1} and not stream.waits, "a step without a grammar must be one graph without waits"


@pytest.mark.parametrize("kind", ["free", "grammar"])
def test_steps_with_prompts_are_captured_when_capture_is_on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Torch's operators apply the token bitmask, as on a GPU."""
    monkeypatch.setattr("cluster.engine.build.bitmask_of", lambda _: apply_token_bitmask)
    engine_config = config(*tiny_pair(), "tree", disable_radix_cache=True, capture="on")
    engine, _ = check(engine_config, kind, "0.8", 3, Buckets((1, 2, 4, 8, 16, 32, 64, 96)))
    assert any(key.sizes[0].prompt_rows for key in engine._parts.lockstep.programs.captured)


FAMILY_PAIRS = diagonal()
FAST_PAIRS = range(4, len(FAMILY_PAIRS), 20)


@pytest.mark.parametrize(
    "number", [pytest.param(at, marks=() if at in FAST_PAIRS else pytest.mark.slow) for at in range(len(FAMILY_PAIRS))]
)
def test_stream_replay_matches_plain_decoding_for_each_family_and_draft(number: int) -> None:
    """The pairs have each draft once and each family at least once. Shapes, samplings and kinds take turns."""
    check_pair(FAMILY_PAIRS[number], list(SHAPES)[number % 3], KINDS[number // 3 % 4], number)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_stream_replay_matches_plain_decoding_for_each_family_and_kind(kind: str) -> None:
    """Every family runs with every kind. Shapes take turns, so that each family and each kind has all shapes."""
    turn = KINDS.index(kind)
    for at, pair in enumerate({pair.family: pair for pair in FAMILY_PAIRS}.values()):
        check_pair(pair, list(SHAPES)[(at + turn) % 3], kind, at + turn // 2)


def check_pair(pair: Pair, shape: str, kind: str, turn: int) -> None:
    """Check one pair; an even `turn` is greedy, an odd one sampled."""
    settings = {"speculative_algorithm": algorithm_of(pair.spec())} if shape != "plain" else {}
    check(config(pair.target, draft_of(pair.draft), shape, **settings), kind, ("greedy", "0.8")[turn % 2])


ROWS = torch.arange(4.0)


@pytest.mark.parametrize(
    ("operation", "error_text"),
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
    monkeypatch: pytest.MonkeyPatch, operation: Callable[[], object], error_text: str
) -> None:
    stream = run_engines_on_stream(monkeypatch)
    stream.in_step = True
    with recorded_by(stream), stream, pytest.raises(GpuViolation, match=error_text):
        StreamGraph(operation, stream)


def test_captured_operations_run_only_when_the_launched_stream_runs() -> None:
    stream, memory, values_seen_by_native = Stream(), torch.zeros(3), list[list[float]]()
    with torch.inference_mode(), recorded_by(stream), stream:
        stream.begin()
        incremented = memory + 1
        memory.add_(5)
        native(lambda: values_seen_by_native.append(incremented.tolist()))
        launch = stream.end()
    assert memory.tolist() == [0.0] * 3 and incremented.isnan().all() and not values_seen_by_native
    launch()
    assert memory.tolist() == [0.0] * 3 and not values_seen_by_native
    stream.run()
    assert memory.tolist() == [5.0] * 3 and values_seen_by_native == [[1.0] * 3]


def test_each_replay_calls_the_host_again_between_segments() -> None:
    """The output keeps its memory address over the replays. A replay needs no values of an earlier replay."""
    stream, x, host_inputs = Stream(), torch.tensor([1.0, 2.0]), list[list[float]]()

    def host_function(values: torch.Tensor) -> torch.Tensor:
        host_inputs.append(values.tolist())
        return values * 100

    def program() -> torch.Tensor:
        doubled = x * 2
        answer = host_call(host_function, doubled)
        assert answer is not None
        return answer + doubled

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch_transfers(patch, stream)
        with recorded_by(stream), stream:
            graph = StreamGraph(program, stream)
            output_address = graph.output.data_ptr()
        stream.run()
        assert graph.output.tolist() == [202.0, 404.0] and len(graph) == 3
        x.copy_(torch.tensor([3.0, 4.0]))
        with recorded_by(stream), stream:
            graph.replay()
        stream.run()
        assert graph.output.tolist() == [606.0, 808.0] and graph.output.data_ptr() == output_address
    assert host_inputs == [[2.0, 4.0], [6.0, 8.0]]


def assert_fault_changes_tokens(shape: str, kind: str) -> None:
    """Assert that a fault that the test has planted changes tokens."""
    with pytest.raises(AssertionError, match=OTHER_TOKENS):
        check(config(*tiny_pair(), shape), kind, "0.8")


def test_planted_stale_host_call_result_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_tokens(tiny_pair()[0], "grammar", "0.8")
    original = StreamGraph.host_call

    def host_call_once(self: StreamGraph, call: Any, arguments: tuple[Any, ...]) -> Any:
        answers: list[Any] = []

        def call_first_time(*call_arguments: Any) -> Any:
            answers[:] = answers or [call(*call_arguments)]
            return answers[0]

        return original(self, call_first_time, arguments)

    monkeypatch.setattr(StreamGraph, "host_call", host_call_once)
    assert_fault_changes_tokens("chain", "grammar")


def test_planted_missing_result_copy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_tokens(tiny_pair()[0], "free", "0.8")
    monkeypatch.setattr(StepOutput, "start_copy", replace)
    assert_fault_changes_tokens("plain", "free")


def test_planted_missing_input_copy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_tokens(tiny_pair()[0], "free", "0.8")
    original = Programs._replay

    def replay_on_old_inputs(self: Programs, program: Program, staged_lists: StagedLists) -> StepOutput:
        return original(self, program, program.inputs)

    monkeypatch.setattr(Programs, "_replay", replay_on_old_inputs)
    assert_fault_changes_tokens("plain", "free")
