"""Measuring what steps take at start leaves no trace, and is short."""

import pytest

from cluster.engine import Engine, build_engine, calibrate
from cluster.engine.calibrate import TrialLoad
from cluster.status import StepCosts
from tests.parity.harness import GREEDY, config_of, request, run, tiny_pair

ASKED = [request(f"{i}", [t % 23 for t in range(1, 40 + i)], GREEDY, max_tokens=20) for i in range(3)]


def engine_of(**settings: object) -> Engine:
    return build_engine(config_of(*tiny_pair(), 4, 3, **settings))


def costs_of(engine: Engine) -> StepCosts:
    """What the engine says that steps take."""
    costs = engine.info().step_costs
    assert costs is not None
    return costs


def test_engine_info_shows_measured_step_costs_unless_mixed_prefill_size_is_set() -> None:
    engine = engine_of(mixed_prefill_size=None)
    costs = costs_of(engine)
    assert costs.decode_ms["1"] > 0
    assert list(costs.target_rows_ms.values()) == sorted(costs.target_rows_ms.values())
    assert len(costs.target_rows_ms) > 2
    assert engine_of().info().step_costs is None, "a number of rows was given"
    assert costs_of(engine_of(mixed_prefill_size=None, max_running_requests=1)).decode_ms


def test_calibration_leaves_no_state_in_the_engine() -> None:
    engine, fixed = engine_of(mixed_prefill_size=None), engine_of()
    status = engine.status()
    assert (status.steps, status.pages_used, status.pages_cached, status.own_seconds) == (0, 0, 0, 0.0)
    engine.check_pages()
    assert not engine.has_work
    assert run(engine, ASKED).tokens == run(fixed, ASKED).tokens
    engine.check_pages()


@pytest.mark.parametrize(
    "small",
    [
        {"max_total_tokens": 24, "page_size": 4},
        {"max_total_tokens": 15, "page_size": 1},
        {"max_total_tokens": 4096, "context_length": 12},
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": -1},
        {"page_size": 1, "max_running_requests": 2},
        {"speculative_batch_tiers": {2: 1, 3: 0}},
    ],
)
def test_calibration_runs_with_very_small_limits(small: dict[str, object]) -> None:
    engine = engine_of(mixed_prefill_size=None, **small)
    assert costs_of(engine).decode_ms
    engine.check_pages()


def test_calibration_runs_slow_loads_once_and_takes_the_best_time_of_fast_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seconds are made up: every step takes as long as the first ones were said to, and one of them ten times that."""
    loads: list[TrialLoad] = []

    def measured(seconds: float) -> float:
        loads.clear()

        def taken(trial: calibrate._Trial, load: TrialLoad) -> float:
            loads.append(load)
            return seconds * (10 if len(loads) == 3 else 1)

        monkeypatch.setattr(calibrate._Trial, "run", taken)
        return float(costs_of(engine_of(mixed_prefill_size=None)).decode_ms["4"])

    slow = measured(3.0), list(loads)
    assert len(slow[1]) == 1 + len(set(slow[1][1:])) <= 12
    fast = measured(0.001), list(loads)
    assert fast[0] == pytest.approx(1.0)
    taken = fast[1][1:]  # the first one is for what is made on first use
    assert max(map(taken.count, taken)) <= calibrate.MAX_ROUNDS


def test_engine_learns_drift_from_step_times() -> None:
    engine = engine_of(mixed_prefill_size=None)
    correction = engine._parts.scheduler.correction
    engine.submit(request("steady", [5, 6], GREEDY, max_tokens=60))
    for _ in range(8):
        engine.step()
    assert (correction.decode_drift.observations, correction.prompt_drift.observations) == (7, 0), (
        "the first step decodes nothing"
    )
    engine.submit(request("long", [t % 23 for t in range(400)], GREEDY, max_tokens=2))
    engine.step()
    assert (correction.decode_drift.observations, correction.prompt_drift.observations) == (7, 1)
    fixed = engine_of()
    assert run(fixed, ASKED).tokens and fixed._parts.scheduler.correction.decode_drift.observations == 0, (
        "no pace, nothing to correct"
    )
