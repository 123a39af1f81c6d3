"""Calibration, the measurement of step times at start: it leaves no state behind, and is short."""

import pytest

from cluster.engine import Engine, build_engine, calibrate
from cluster.engine.calibrate import TrialLoad
from cluster.status import StepCosts
from tests.parity.harness import GREEDY, config_of, make_request, run, tiny_pair

REQUESTS = [make_request(f"{i}", [t % 23 for t in range(1, 40 + i)], GREEDY, max_tokens=20) for i in range(3)]


def engine_of(**settings: object) -> Engine:
    return build_engine(config_of(*tiny_pair(), 4, 3, **settings))


def costs_of(engine: Engine) -> StepCosts:
    """Return the step costs that the engine reports."""
    costs = engine.info().step_costs
    assert costs is not None
    return costs


def test_engine_info_shows_measured_step_costs_unless_mixed_prefill_size_is_set() -> None:
    engine = engine_of(mixed_prefill_size=None)
    costs = costs_of(engine)
    assert costs.decode_ms["1"] > 0
    assert list(costs.target_rows_ms.values()) == sorted(costs.target_rows_ms.values())
    assert len(costs.target_rows_ms) > 2
    assert engine_of().info().step_costs is None, "mixed_prefill_size is set"
    assert costs_of(engine_of(mixed_prefill_size=None, max_running_requests=1)).decode_ms


def test_calibration_leaves_no_state_in_the_engine() -> None:
    engine, uncalibrated = engine_of(mixed_prefill_size=None), engine_of()
    status = engine.status()
    assert (status.steps, status.pages_used, status.pages_cached, status.own_seconds) == (0, 0, 0, 0.0)
    engine.check_pages()
    assert not engine.has_work
    assert run(engine, REQUESTS).tokens == run(uncalibrated, REQUESTS).tokens
    engine.check_pages()


@pytest.mark.parametrize(
    "small_limits",
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
def test_calibration_runs_with_very_small_limits(small_limits: dict[str, object]) -> None:
    engine = engine_of(mixed_prefill_size=None, **small_limits)
    assert costs_of(engine).decode_ms
    engine.check_pages()


@pytest.mark.parametrize("settings", [{}, {"page_size": 1, "max_running_requests": 2}, {"max_total_tokens": 24}])
def test_costs_of_adaptive_trees_are_measured_for_each_tree(settings: dict[str, object]) -> None:
    engine = engine_of(speculative_mode="adaptive", **settings)
    tiers, costs = engine._parts.resolved.tiers, engine.info().tree_costs
    assert [(c.num_steps, c.num_draft_tokens, c.lookup_tokens) for c in costs] == [shape.label for shape in tiers]
    counts = list(costs[0].ms)
    assert counts[0] == "1" and set(counts) <= {"1", "2", "4", "8"}, "a slow machine measures fewer numbers of requests"
    assert costs[-1].lookup_tokens == 8
    for cost in costs:
        assert list(cost.ms) == counts and list(cost.ms.values()) == sorted(cost.ms.values())
        assert list(cost.waking_ms) == ([] if cost.num_steps else counts)
    engine.check_pages()
    assert engine.status().pages_used == 0
    chances = engine.lockstep.step._chances
    lookup = engine.lockstep.step._lookup
    assert chances is not None and lookup is not None
    assert chances.trials.sum() == lookup.chances.trials.sum() == 0, "the tokens of measured steps are made up"
    assert engine_of().info().tree_costs == ()


def test_adaptive_trees_keep_the_tokens() -> None:
    assert run(engine_of(speculative_mode="adaptive"), REQUESTS).tokens == run(engine_of(), REQUESTS).tokens


def test_smaller_trees_never_cost_more_than_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are invented: steps without trees are disturbed in every round."""
    monkeypatch.setattr(
        calibrate.Trial, "run", lambda trial, load: (0.05 if load.tier == 0 else 0.001 * (1 + load.tier)) * load.decodes
    )
    costs = engine_of(speculative_mode="adaptive").info().tree_costs
    assert costs[0].ms["1"] == min(cost.ms["1"] for cost in costs[1:]) < 50
    assert costs[-1].ms["1"] == pytest.approx(1.0 * len(costs))


def test_measured_numbers_of_requests_end_where_times_grow_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are invented. The times of the most requests are measured or computed."""
    for exponent, counts in ((1.0, {1, 4}), (0.5, {1, 4, 8})):
        measured = set[int]()

        def run(
            trial: calibrate.Trial, load: calibrate.TrialLoad, e: float = exponent, seen: set[int] = measured
        ) -> float:
            seen.add(load.decodes if load.tier else 1)
            return 0.001 * load.decodes**e

        monkeypatch.setattr(calibrate.Trial, "run", run)
        costs = engine_of(speculative_mode="adaptive").info().tree_costs
        assert measured == counts
        assert list(costs[-1].ms) == ["1", "4", "8"] and costs[-1].ms["8"] == pytest.approx(8**exponent, rel=0.02)


def test_calibration_runs_slow_loads_once_and_takes_the_best_time_of_fast_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step times are invented: every trial step takes `seconds`, except the third, which takes ten times as long."""
    loads: list[TrialLoad] = []

    def calibrate_with(seconds: float) -> float:
        loads.clear()

        def fake_run(trial: calibrate.Trial, load: TrialLoad) -> float:
            loads.append(load)
            return seconds * (10 if len(loads) == 3 else 1)

        monkeypatch.setattr(calibrate.Trial, "run", fake_run)
        return float(costs_of(engine_of(mixed_prefill_size=None)).decode_ms["4"])

    slow_result = calibrate_with(3.0), list(loads)
    assert len(slow_result[1]) == 1 + len(set(slow_result[1][1:])) <= 12
    fast_result = calibrate_with(0.001), list(loads)
    assert fast_result[0] == pytest.approx(1.0)
    fast_loads = fast_result[1][1:]  # the first trial step is a warm-up
    assert max(map(fast_loads.count, fast_loads)) <= calibrate.MAX_ROUNDS


def test_engine_learns_drift_from_step_times() -> None:
    engine = engine_of(mixed_prefill_size=None)
    correction = engine._parts.scheduler.correction
    engine.submit(make_request("steady", [5, 6], GREEDY, max_tokens=60))
    for _ in range(8):
        engine.step()
    assert (correction.decode_drift.observations, correction.prompt_drift.observations) == (7, 0), (
        "the first step decodes nothing"
    )
    engine.submit(make_request("long", [t % 23 for t in range(400)], GREEDY, max_tokens=2))
    engine.step()
    assert (correction.decode_drift.observations, correction.prompt_drift.observations) == (7, 1)
    uncalibrated = engine_of()
    assert (
        run(uncalibrated, REQUESTS).tokens and uncalibrated._parts.scheduler.correction.decode_drift.observations == 0
    ), "an engine without a pace must not learn drift"
