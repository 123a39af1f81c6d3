"""Calibration, the measurement of step times at start: it leaves no state behind, and is short."""

from collections.abc import Sequence

import pytest

from cluster.batch import StepInput
from cluster.engine import Engine, build_engine, calibrate
from cluster.engine.calibrate import TrialLoad
from cluster.engine.lockstep import Lockstep, StepInFlight
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


def decoded_rows(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[Engine, list[Sequence[int]]]:
    """Return an engine with adaptive trees, and the table rows of the requests of each step that ran at its start."""
    rows, original = list[Sequence[int]](), Lockstep.run

    def run(lockstep: Lockstep, step_input: StepInput, *arguments: int) -> StepInFlight:
        rows.append([decode.row for decode in step_input.decodes])
        return original(lockstep, step_input, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Lockstep, "run", run)
        return engine_of(speculative_mode="adaptive", **settings), rows


def test_trees_are_measured_with_requests_that_have_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single request that appears many times is read from the processor's caches. On a CPU with 32 requests of the
    demo pair, plain steps took 11 ms in this way, and 16 ms with as many requests.
    """
    engine, rows = decoded_rows(monkeypatch, max_total_tokens=4096, context_length=64)
    assert 8 in {len(set(step)) for step in rows if len(step) == 8}
    engine.check_pages()
    assert run(engine, REQUESTS).tokens == run(engine_of(), REQUESTS).tokens
    engine, rows = decoded_rows(monkeypatch, max_total_tokens=200, context_length=64)
    assert 1 < max(len(set(step)) for step in rows if len(step) == 8) < 8, "as many as the cache holds"
    engine.check_pages()


@pytest.mark.parametrize(
    ("exponent", "first_s", "trees"), [(0.5, 0.001, "all"), (1.0, 0.001, "few"), (1.0, 0.1, "none")]
)
def test_few_or_no_trees_are_measured_with_many_requests_where_times_grow_in_proportion(
    exponent: float, first_s: float, trees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step times are invented. The times of the most requests are measured or computed."""
    measured = set[tuple[int, int | None]]()

    def run(trial: calibrate.Trial, load: calibrate.TrialLoad) -> float:
        measured.add((load.decodes, load.tier))
        return first_s * load.decodes**exponent

    monkeypatch.setattr(calibrate.Trial, "run", run)
    costs = engine_of(speculative_mode="adaptive").info().tree_costs
    tiers_of = {n: {tier for decodes, tier in measured if decodes == n and tier is not None} for n in (1, 2, 4, 8)}
    assert tiers_of[1] == tiers_of[4] and len(tiers_of[1]) > 4
    last_drafted = sum(not cost.lookup_tokens for cost in costs) - 1
    few = {0, 1, (last_drafted + 1) // 2}
    assert tiers_of[8] == {"all": tiers_of[1], "few": few, "none": set()}[trees]
    assert tiers_of[2] == few, "between two measured numbers of requests"
    for cost in costs:
        assert list(cost.ms) == ["1", "2", "4", "8"]
        assert cost.ms["8"] == pytest.approx(1000 * first_s * 8**exponent, rel=0.02)


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
