"""On a CPU with the kernels in C steps without prompts are captured by default, and give the same tokens."""

import pytest

from cluster.config import EngineConfig
from cluster.engine import Engine, StepResult, build_engine
from cluster.engine.captures import CHUNK_SIZES
from cluster.engine.prefill import PrefillScheduler
from cluster.observability.step_times import StepTimes
from tests.parity.harness import SAMPLING, config_of, request, run, tiny_pair
from tests.unit.kernels.library import c_serves

PACE = StepTimes(0.5, 4, ((1, 1000.0), (9, 1200.0)), 0.0, ((4, 1000.0), (104, 6000.0)), 0.0, 0.0)
"""Prompts get about 20 rows of a step in which requests decode."""
TEXTS = [request(f"r{at}", [3 + at, 5, 2, *range(at)], SAMPLING["0.8"], max_tokens=14, seed=at) for at in range(4)]


def config(**settings: object) -> EngineConfig:
    return config_of(*tiny_pair(), **settings)


def replayed(of: EngineConfig) -> tuple[dict[str, list[int]], int, bool]:
    """Tokens, how many steps were replayed, and whether one of them had rows of prompts."""
    steps: list[StepResult] = []

    def note(_: Engine, step: StepResult) -> None:
        steps.append(step)

    tokens = run(build_engine(of), TEXTS[:2], note, later=()).tokens
    again = [step.stats for step in steps if "replay" in step.stats.phase_seconds]
    return tokens, len(again), any(stats.prompt_rows for stats in again)


def test_decode_only_steps_are_captured_and_replayed_by_default() -> None:
    c_serves()
    expected, none, _ = replayed(config(capture="off"))
    tokens, count, with_prompts = replayed(config(capture="auto"))
    assert tokens == expected
    assert not none and count >= 3 and not with_prompts


def test_steps_in_the_middle_of_a_prompt_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler cuts their chunks to sizes that recur. The prompt gives the tokens that it gives uncut."""
    monkeypatch.setattr("cluster.engine.build.measure_pace", lambda *_: PACE)
    monkeypatch.setattr(PrefillScheduler, "learn", lambda *_: None)  # so that chunks do not depend on the machine
    c_serves()
    long = request("long", [3 + at % 11 for at in range(480)], SAMPLING["0.8"], max_tokens=6, seed=9)
    company = [request(f"r{at}", [3 + at, 5, 2], SAMPLING["0.8"], max_tokens=400, ignore_eos=True) for at in range(2)]
    sizes = {"mixed_prefill_size": None, "max_total_tokens": 4096, "max_running_requests": 4}
    found = {}
    for capture in ("off", "auto"):
        steps: list[StepResult] = []

        def note(engine: Engine, step: StepResult, steps: list[StepResult] = steps) -> None:
            steps.append(step)
            if len(steps) == 9:
                engine.submit(long)

        found[capture] = run(build_engine(config(capture=capture, **sizes)), company, note, later=[long]).tokens
        again = [step.stats for step in steps if "replay" in step.stats.phase_seconds and step.stats.prompt_rows]
        assert (capture == "auto") == bool(again) and {stats.prompt_rows for stats in again} <= set(CHUNK_SIZES)
    assert found["auto"] == found["off"]


def test_auto_capture_with_given_sizes_captures_only_decode_steps() -> None:
    """Captured before the first request; three requests run as four, and steps with prompts are not padded."""
    c_serves()
    of = config(capture="auto", capture_sizes=(1, 2, 4), max_running_requests=4)
    info = build_engine(of).info().captured
    assert info is not None and info.sizes == (1, 2, 4) and info.programs == 9, "three sizes in three modes"
    expected = run(build_engine(config(capture="off")), TEXTS[:3]).tokens
    assert run(build_engine(of), TEXTS[:3]).tokens == expected
    _, count, with_prompts = replayed(of)
    assert count >= 3 and not with_prompts


def test_auto_capture_is_off_for_torch_attention_and_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not replayed(config(capture="auto", attention_backend="torch"))[1]
    monkeypatch.setattr("cluster.engine.captures.AUTO_BYTES", 1000)
    assert not replayed(config(capture="auto"))[1]
