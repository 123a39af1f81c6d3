"""On a CPU with the C kernels the engine captures steps without prompts by default, and gives the same tokens."""

import pytest

from cluster.config import EngineConfig
from cluster.engine import Engine, StepResult, build_engine
from cluster.engine.captures import CHUNK_SIZES
from cluster.engine.prefill import PrefillScheduler
from cluster.observability.step_times import StepTimes
from tests.parity.harness import SAMPLING, config_of, make_request, run, tiny_pair
from tests.unit.kernels.library import skip_unless_c_backend

STEP_TIMES = StepTimes(0.5, 4, ((1, 1000.0), (9, 1200.0)), 0.0, ((4, 1000.0), (104, 6000.0)), 0.0, 0.0)
"""Made-up times of steps. With these times a step in which requests decode gets about 20 prompt rows."""
REQUESTS = [
    make_request(f"r{at}", [3 + at, 5, 2, *range(at)], SAMPLING["0.8"], max_tokens=14, seed=at) for at in range(4)
]


def config(**settings: object) -> EngineConfig:
    return config_of(*tiny_pair(), **settings)


def run_and_count_replays(engine_config: EngineConfig) -> tuple[dict[str, list[int]], int, bool]:
    """Run two requests; return their tokens, how many steps were replayed, and whether a replayed step had
    prompt rows.
    """
    steps: list[StepResult] = []

    def record_step(_: Engine, step: StepResult) -> None:
        steps.append(step)

    tokens = run(build_engine(engine_config), REQUESTS[:2], record_step, later_requests=()).tokens
    replayed_stats = [step.stats for step in steps if "replay" in step.stats.phase_seconds]
    return tokens, len(replayed_stats), any(stats.prompt_rows for stats in replayed_stats)


def test_decode_only_steps_are_captured_and_replayed_by_default() -> None:
    skip_unless_c_backend()
    expected, replays_without_capture, _ = run_and_count_replays(config(capture="off"))
    tokens, replays, with_prompts = run_and_count_replays(config(capture="auto"))
    assert tokens == expected
    assert not replays_without_capture and replays >= 3 and not with_prompts


def test_steps_in_the_middle_of_a_prompt_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler cuts the prompt into chunks of recurring sizes. The tokens are those of a run without capture."""
    monkeypatch.setattr("cluster.engine.build.measure_pace", lambda *_: STEP_TIMES)
    monkeypatch.setattr(PrefillScheduler, "learn", lambda *_: None)  # or chunks would depend on the machine
    skip_unless_c_backend()
    long_request = make_request("long", [3 + at % 11 for at in range(480)], SAMPLING["0.8"], max_tokens=6, seed=9)
    decoding_requests = [
        make_request(f"r{at}", [3 + at, 5, 2], SAMPLING["0.8"], max_tokens=400, ignore_eos=True) for at in range(2)
    ]
    sizes = {"mixed_prefill_size": None, "max_total_tokens": 4096, "max_running_requests": 4}
    tokens_by_capture = {}
    for capture in ("off", "auto"):
        steps: list[StepResult] = []

        def record_step(engine: Engine, step: StepResult, steps: list[StepResult] = steps) -> None:
            steps.append(step)
            if len(steps) == 9:
                engine.submit(long_request)

        tokens_by_capture[capture] = run(
            build_engine(config(capture=capture, **sizes)),
            decoding_requests,
            record_step,
            later_requests=[long_request],
        ).tokens
        replayed_stats = [
            step.stats for step in steps if "replay" in step.stats.phase_seconds and step.stats.prompt_rows
        ]
        assert (capture == "auto") == bool(replayed_stats) and {stats.prompt_rows for stats in replayed_stats} <= set(
            CHUNK_SIZES
        )
    assert tokens_by_capture["auto"] == tokens_by_capture["off"]


def test_auto_capture_with_given_sizes_captures_only_decode_steps() -> None:
    """The programs are captured before the first request. Three requests run in the program of four. Steps with prompts
    are not padded.
    """
    skip_unless_c_backend()
    engine_config = config(capture="auto", capture_sizes=(1, 2, 4), max_running_requests=4)
    captured_info = build_engine(engine_config).info().captured
    assert captured_info is not None and captured_info.sizes == (1, 2, 4) and captured_info.programs == 9, (
        "expected three sizes in three modes"
    )
    expected = run(build_engine(config(capture="off")), REQUESTS[:3]).tokens
    assert run(build_engine(engine_config), REQUESTS[:3]).tokens == expected
    _, replays, with_prompts = run_and_count_replays(engine_config)
    assert replays >= 3 and not with_prompts


def test_auto_capture_is_off_for_torch_attention_and_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_c_backend()
    assert not run_and_count_replays(config(capture="auto", attention_backend="torch"))[1]
    assert run_and_count_replays(config(capture="auto"))[1], "programs of the usual size must be captured"
    monkeypatch.setattr("cluster.engine.captures.AUTO_BYTES", 1000)
    assert not run_and_count_replays(config(capture="auto"))[1]
