"""Engines with FlashInfer's stand-in and captured steps: graphs on a simulated stream that is as strict as CUDA's.

On the stream the host is one step ahead, so each program is captured once for each set of wrappers. The tokens must be
those of plain decoding. Planted faults must be detected: a plan that is overwritten, a stale plan, the plan of another
key, and other launch numbers than the graph was captured with.
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
from tests.capture.stream import Stream, outside_step, run_engines_on_stream
from tests.flashinfer.device import DEVICE, PLANNED
from tests.flashinfer.stand_in import PagedWrapper, install_stand_in
from tests.flashinfer.test_engine import SHAPES, pair
from tests.parity.harness import SAMPLING, config_of, make_request, run

SIZES = Buckets((1, 2), allow_prompts=False)
WITH_PROMPTS = Buckets((1, 2, 4, 8, 16))
pytestmark = pytest.mark.timeout(1200)


def requests() -> list[Any]:
    prompts = [[3, 5, 2], [1, *range(2, 15)]]
    return [
        make_request(f"r{index}", prompt, SAMPLING["0.8"], max_tokens=7, seed=index)
        for index, prompt in enumerate(prompts)
    ]


@cache
def plain(target: str) -> dict[str, list[int]]:
    return run(build_engine(config_of(target, attention_backend="torch")), requests()).tokens


def config(shape: str, family: str, **settings: Any) -> EngineConfig:
    target, draft = pair(family)
    plain(target)
    engine_settings = {"attention_backend": "flashinfer", "chunked_prefill_size": 8, "max_running_requests": 2}
    return config_of(target, draft, **engine_settings | SHAPES[shape] | {"num_steps": 2} | settings)


def captured_engine(
    patch: pytest.MonkeyPatch, engine_config: EngineConfig, buckets: Buckets = SIZES
) -> tuple[Engine, Stream]:
    """Build an engine with the stand-in whose steps are captured as graphs on a simulated stream; return both."""
    install_stand_in(patch.setattr)
    patch.setattr(flashinfer_readers, "WORKSPACE", 1)
    patch.setattr(captures, "MODES", (SamplingMode.RANDOM,))
    stream = run_engines_on_stream(patch, buckets)
    patch.setattr(flashinfer_plans, "copy_to_device", recorder.copy_to_device)
    patch.setattr(DEVICE, "host", lambda: outside_step(stream))
    return build_engine(engine_config), stream


def check_replays(engine: Engine, stream: Stream, turns: int = 2) -> int:
    """Check that steps are replayed and give the tokens of plain decoding; return the number of eager fallbacks."""
    launches_before = stream.launches
    for _ in range(turns):
        assert run(engine, requests()).tokens == plain(engine.config.model_path)
    assert stream.launches > launches_before + 3, "too few steps were replayed"
    return engine._parts.lockstep.programs.eager_fallbacks


def check(patch: pytest.MonkeyPatch, engine_config: EngineConfig) -> Engine:
    """Check that a captured engine gives the right tokens without eager fallbacks or later captures; return it."""
    engine, stream = captured_engine(patch, engine_config)
    repeated_before = DEVICE.repeated
    assert not check_replays(engine, stream)
    assert DEVICE.repeated == repeated_before, "a program was captured after the first request"
    return engine


CAPTURED = (("tree", "grouped"), ("tree", "latent"), ("chain", "sinks, windows"))
"""Every family, with both shapes. `test_engine.py` has each family with each shape, without captured steps."""


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "family"), CAPTURED)
def test_captured_flashinfer_engine_gives_plain_tokens_for_all_families(
    monkeypatch: pytest.MonkeyPatch, shape: str, family: str
) -> None:
    """One of the families has sliding windows and sinks."""
    programs = check(monkeypatch, config(shape, family))._parts.lockstep.programs.captured
    assert {key.buffer_set for key in programs} == {0, 1} and all(
        program.host_calls.calls for program in programs.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["grouped", "latent"])  # these two have different wrappers for prompts
def test_captured_prompt_chunks_give_plain_tokens_without_eager_fallback(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A wrapper for graphs has a fixed number of requests, and a program's key does not have the number of chunks. So
    captured prompt chunks must not use such a wrapper.
    """
    engine, stream = captured_engine(monkeypatch, config("chain", family, disable_radix_cache=True), WITH_PROMPTS)
    assert not check_replays(engine, stream, 4)
    assert any(key.sizes[0].prompt_rows for key in engine._parts.lockstep.programs.captured)


def assert_detected(patch: pytest.MonkeyPatch, message: str) -> None:
    """Run a captured engine with the planted fault; the stand-in must fail with this message."""
    with pytest.raises(AssertionError, match=message):
        check(patch, config("chain", "grouped", num_steps=1))


@pytest.mark.slow
def test_planted_single_wrapper_set_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original_init = RunnerPlans.__init__

    def init_with_one_set(self: RunnerPlans, *args: Any) -> None:
        original_init(self, *args)
        self._eager_plans, self._captured_plans = (self._eager_plans[0],) * 2, (self._captured_plans[0],) * 2

    monkeypatch.setattr(RunnerPlans, "__init__", init_with_one_set)
    assert_detected(monkeypatch, "while its copy may be under way")


def test_planted_stale_plan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: programs are replayed without the host calls that plan them again."""
    monkeypatch.setattr(CallsBeforeReplay, "ready", lambda self: True)
    assert_detected(monkeypatch, "a stale plan")


def test_planted_plan_for_another_key_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the plan for one request is made in place of the plan for two requests, and the reverse."""
    original_plan_again = RunnerPlans.plan_again

    def plan_after_swap(self: RunnerPlans, key: ForwardKey, turn: int) -> dict[str, Any] | None:
        captured_plans, wrong_key = self._captured_plans[turn], key._replace(requests=3 - key.requests)
        if wrong_key in captured_plans:
            captured_plans[key], captured_plans[wrong_key] = captured_plans[wrong_key], captured_plans[key]
        return original_plan_again(self, key, turn)

    monkeypatch.setattr(RunnerPlans, "plan_again", plan_after_swap)
    assert_detected(monkeypatch, "the batch of graphs is of one size")


@pytest.mark.slow
def test_program_with_swapped_host_calls_falls_back_to_eager_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = captured_engine(monkeypatch, config("chain", "grouped", num_steps=1))
    programs = engine._parts.lockstep.programs
    pinned_programs = programs._pinned
    for key in list(pinned_programs):
        if key.sizes[0].decodes == 1:
            other_key = key._replace(sizes=(key.sizes[0]._replace(decodes=2),))
            program, other_program = pinned_programs[key], pinned_programs[other_key]
            pinned_programs[key], pinned_programs[other_key] = (
                replace(program, host_calls=other_program.host_calls),
                replace(other_program, host_calls=program.host_calls),
            )
    for _ in range(2):
        assert run(engine, requests()).tokens == plain(engine.config.model_path)
    assert programs.eager_fallbacks > 3


def vary_plans(patch: pytest.MonkeyPatch, change: Callable[[PagedWrapper, int], None]) -> list[str]:
    """Patch the wrappers for graphs so that every seventh plan is changed. This begins when the caller appends an entry
    to the returned list.
    """
    original_plan, activation, counter = PagedWrapper._plan, list[str](), itertools.count()

    def plan(self: PagedWrapper, arguments: dict[str, Any]) -> None:
        original_plan(self, arguments)
        if self.graphs:
            change(self, int(bool(activation) and next(counter) % 7 == 0))

    patch.setattr(PagedWrapper, "_plan", plan)
    return activation


def change_block_count(wrapper: PagedWrapper, difference: int) -> None:
    """Change the number of blocks, in the plan and in its launch numbers."""
    wrapper._plan_info = [*wrapper._plan_info[:3], wrapper._plan_info[3] + difference]
    PLANNED[-1] = replace(PLANNED[-1], launch_numbers=tuple(wrapper._plan_info))


def change_max_kv_len(wrapper: PagedWrapper, difference: int) -> None:
    """Change the largest KV length, which `run` passes to the kernel."""
    wrapper._max_kv_len += difference


@pytest.mark.slow
@pytest.mark.parametrize("change", [change_block_count, change_max_kv_len])
def test_changed_plan_numbers_cause_a_counted_eager_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Callable[[PagedWrapper, int], None]
) -> None:
    activation = vary_plans(monkeypatch, change)
    engine, stream = captured_engine(monkeypatch, config("chain", "grouped", num_steps=1))
    activation.append("from now on")
    fallback_count, metrics_page = check_replays(engine, stream, 3), merge([engine.metrics.serialize()]).decode()
    metric_match = re.search(r"^aerie_launched_anew_total{.*} (\S+)$", metrics_page, re.MULTILINE)
    assert metric_match is not None and 1 < float(metric_match[1]) <= fallback_count
    assert [record.message for record in caplog.records].count(EAGER_FALLBACK_WARNING) == 1


@pytest.mark.slow
def test_skipped_plan_comparison_is_detected_as_wrong_launch_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    activation = vary_plans(monkeypatch, change_block_count)
    engine, stream = captured_engine(monkeypatch, config("chain", "grouped", num_steps=1))
    activation.append("from now on")
    original_ready = CallsBeforeReplay.ready
    monkeypatch.setattr(CallsBeforeReplay, "ready", lambda self: original_ready(self) or True)
    with pytest.raises(AssertionError, match="with other numbers than it was launched with"):
        check_replays(engine, stream)
