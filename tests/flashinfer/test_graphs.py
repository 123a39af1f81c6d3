"""Engines on FlashInfer's stand-in whose steps are captured, as tapes and as graphs on a stream as unkind as CUDA's.

The host is a step ahead on the stream, so each program is captured once for each set of wrappers. Tokens are plain
decoding's, and what a graph must not meet is found: a plan that is written over, a stale one, another key's, other
numbers than it was captured with.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cluster.attention.flashinfer import plans as flashinfer_plans
from cluster.attention.flashinfer import readers as flashinfer_readers
from cluster.attention.flashinfer.plans import ForwardKey, RunnerPlans
from cluster.batch import SamplingMode
from cluster.capture import recorder
from cluster.capture.recorder import CallsBeforeReplay
from cluster.config import EngineConfig
from cluster.dp_attention.sizes import Buckets
from cluster.engine import Engine, build_engine, captures
from cluster.engine.programs import EAGER_FALLBACK_WARNING
from cluster.observability.metrics import merge
from tests.flashinfer.device import DEVICE, PLANNED
from tests.flashinfer.stand_in import Paged, stand_in_serves
from tests.flashinfer.test_engine import FAMILIES, SHAPES, pair
from tests.parity.harness import SAMPLING, config_of, request, run
from tests.static.stream import Stream, on_stream, unwatched

SIZES = Buckets((1, 2), allow_prompts=False)
WITH_PROMPTS = Buckets((1, 2, 4, 8, 16))
pytestmark = pytest.mark.timeout(1200)


def requests() -> list[Any]:
    prompts = [[3, 5, 2], [1, *range(2, 15)]]
    return [request(f"r{at}", one, SAMPLING["0.8"], max_tokens=7, seed=at) for at, one in enumerate(prompts)]


@cache
def plain(target: str) -> dict[str, list[int]]:
    return run(build_engine(config_of(target, attention_backend="torch")), requests()).tokens


def config(shape: str, family: str, **settings: Any) -> EngineConfig:
    target, draft = pair(family)
    plain(target)
    given = {"attention_backend": "flashinfer", "chunked_prefill_size": 8, "max_running_requests": 2}
    return config_of(target, draft, **given | SHAPES[shape] | {"num_steps": 2} | settings)


def serve(patch: pytest.MonkeyPatch, of: EngineConfig, buckets: Buckets = SIZES) -> tuple[Engine, Stream]:
    stand_in_serves(patch.setattr)
    patch.setattr(flashinfer_readers, "WORKSPACE", 1)
    patch.setattr(captures, "MODES", (SamplingMode.RANDOM,))
    stream = on_stream(patch, buckets)
    patch.setattr(flashinfer_plans, "copy_to_device", recorder.copy_to_device)
    patch.setattr(DEVICE, "host", lambda: unwatched(stream))
    return build_engine(of), stream


def served(engine: Engine, stream: Stream, turns: int = 2) -> int:
    """The tokens are plain decoding's, and steps are replayed; how many were launched anew."""
    launched = stream.launches
    for _ in range(turns):
        assert run(engine, requests()).tokens == plain(engine.config.model_path)
    assert stream.launches > launched + 3, "few steps were replayed"
    return engine._parts.lockstep.programs.eager_fallbacks


def check(patch: pytest.MonkeyPatch, of: EngineConfig) -> Engine:
    engine, stream = serve(patch, of)
    repeated = DEVICE.repeated
    assert not served(engine, stream)
    assert DEVICE.repeated == repeated, "what decodes was captured before the first request, and only that"
    return engine


ALL = [(shape, family) for shape in SHAPES for family in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "family"), ALL)
def test_captured_flashinfer_engine_gives_plain_tokens_for_all_families(
    monkeypatch: pytest.MonkeyPatch, shape: str, family: str
) -> None:
    """Sliding windows and sinks among them."""
    programs = check(monkeypatch, config(shape, family))._parts.lockstep.programs.captured
    assert {key.buffer_set for key in programs} == {0, 1} and all(
        program.host_calls.calls for program in programs.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_prompt_chunks_give_plain_tokens_without_eager_fallback(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Their number is no part of a key, and a wrapper for graphs has a batch of one size."""
    engine, stream = serve(monkeypatch, config("tree", family, disable_radix_cache=True), WITH_PROMPTS)
    assert not served(engine, stream, 4)
    assert any(key.sizes[0].prompt_rows for key in engine._parts.lockstep.programs.captured)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_flashinfer_tapes_give_the_tokens_of_plain_decoding(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    stand_in_serves(monkeypatch.setattr)
    engine = build_engine(config("tree", family, capture="on", capture_sizes=(1, 2, 4, 8, 16)))
    before = DEVICE.runs
    for _ in range(2):
        assert run(engine, requests()).tokens == plain(engine.config.model_path)
    assert DEVICE.runs > before and not engine._parts.lockstep.programs.eager_fallbacks


def found(patch: pytest.MonkeyPatch, what: str) -> None:
    """With what a test has planted, a step meets a plan that is not its own."""
    with pytest.raises(AssertionError, match=what):
        check(patch, config("chain", "grouped", num_steps=1))


@pytest.mark.slow
def test_planted_single_wrapper_set_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    true = RunnerPlans.__init__

    def one(self: RunnerPlans, *given: Any) -> None:
        true(self, *given)
        self._eager_plans, self._captured_plans = (self._eager_plans[0],) * 2, (self._captured_plans[0],) * 2

    monkeypatch.setattr(RunnerPlans, "__init__", one)
    found(monkeypatch, "while its copy may be under way")


def test_planted_stale_plan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are repeated as if nothing had to be done before."""
    monkeypatch.setattr(CallsBeforeReplay, "ready", lambda self: True)
    found(monkeypatch, "a stale plan")


def test_planted_plan_for_another_key_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan is made in the place of the one for one request less or more."""
    true = RunnerPlans.plan_again

    def other(self: RunnerPlans, key: ForwardKey, turn: int) -> dict[str, Any] | None:
        held, wrong = self._captured_plans[turn], key._replace(requests=3 - key.requests)
        if wrong in held:
            held[key], held[wrong] = held[wrong], held[key]
        return true(self, key, turn)

    monkeypatch.setattr(RunnerPlans, "plan_again", other)
    found(monkeypatch, "the batch of graphs is of one size")


@pytest.mark.slow
def test_program_with_swapped_host_calls_falls_back_to_eager_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = serve(monkeypatch, config("chain", "grouped"))
    programs = engine._parts.lockstep.programs
    held = programs._pinned
    for key in list(held):
        if key.sizes[0].decodes == 1:
            other = key._replace(sizes=(key.sizes[0]._replace(decodes=2),))
            one, two = held[key], held[other]
            held[key], held[other] = replace(one, host_calls=two.host_calls), replace(two, host_calls=one.host_calls)
    for _ in range(2):
        assert run(engine, requests()).tokens == plain(engine.config.model_path)
    assert programs.eager_fallbacks > 3


def unlike(patch: pytest.MonkeyPatch, change: Callable[[Paged, int], None]) -> list[str]:
    """Have every seventh plan of wrappers for graphs come out unlike the others, once the list has something in it."""
    true, planted, count = Paged._plan, list[str](), itertools.count()

    def plan(self: Paged, given: dict[str, Any]) -> None:
        true(self, given)
        if self.graphs:
            change(self, int(bool(planted) and next(count) % 7 == 0))

    patch.setattr(Paged, "_plan", plan)
    return planted


def grid(wrapper: Paged, by: int) -> None:
    """Another number of blocks, in the plan and in what is launched with it."""
    wrapper._plan_info = [*wrapper._plan_info[:3], wrapper._plan_info[3] + by]
    PLANNED[-1] = replace(PLANNED[-1], launched=tuple(wrapper._plan_info))


def longest(wrapper: Paged, by: int) -> None:
    """Another bound of lengths, which `run` passes on."""
    wrapper._max_kv_len += by


@pytest.mark.slow
@pytest.mark.parametrize("change", [grid, longest])
def test_changed_plan_numbers_cause_a_counted_eager_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Callable[[Paged, int], None]
) -> None:
    planted = unlike(monkeypatch, change)
    engine, stream = serve(monkeypatch, config("chain", "grouped"))
    planted.append("from now on")
    count, page = served(engine, stream, 3), merge([engine.metrics.serialize()]).decode()
    shown = re.search(r"^aerie_launched_anew_total{.*} (\S+)$", page, re.MULTILINE)
    assert shown is not None and 1 < float(shown[1]) <= count
    assert [record.message for record in caplog.records].count(EAGER_FALLBACK_WARNING) == 1


@pytest.mark.slow
def test_skipped_plan_comparison_is_detected_as_wrong_launch_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = unlike(monkeypatch, grid)
    engine, stream = serve(monkeypatch, config("chain", "grouped"))
    planted.append("from now on")
    true = CallsBeforeReplay.ready
    monkeypatch.setattr(CallsBeforeReplay, "ready", lambda self: true(self) or True)
    with pytest.raises(AssertionError, match="with other numbers than it was launched with"):
        served(engine, stream)
