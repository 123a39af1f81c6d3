"""The times of trees that are not measured follow from those that are."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from cluster.arch.resolve import ResolvedConfig
from cluster.batch import ExtendMode
from cluster.config.tree_shape import TreeShape, tiers
from cluster.dp_attention.facts import RankFacts, TreeVote
from cluster.dp_attention.plan import StepPlan
from cluster.dp_attention.tree_times import TreeCosts
from cluster.engine import build_engine
from cluster.engine.calibrate import TrialLoad
from cluster.engine.lockstep import Lockstep
from cluster.engine.tree_calibration import _times, completed, measure_trees, typical_times
from cluster.kv.cache import KVCache
from cluster.request import RequestParams
from tests.parity.harness import config_of, make_request, tiny_pair
from tests.parity.trees import adaptive, equal_costs

SHAPES = {
    "chain": tiers(TreeShape(num_steps=5, topk=1, num_draft_tokens=6), share_rows=True),
    "tree": tiers(TreeShape(num_steps=3, topk=4, num_draft_tokens=12), share_rows=True),
    "shallow": tiers(TreeShape(num_steps=1, topk=1, num_draft_tokens=2), share_rows=True),
}


def true_us(shape: TreeShape) -> int:
    """Return a time that grows with the levels that run the draft, and with the rows of the target."""
    return 900 + 100 * max(0, shape.num_steps - 1) + 70 * shape.num_draft_tokens


@pytest.mark.parametrize("name", SHAPES)
def test_times_of_smaller_trees_are_those_of_fewer_rows(name: str) -> None:
    shapes = SHAPES[name]
    deepest = shapes[-1].num_steps
    measured = {t: true_us(s) for t, s in enumerate(shapes) if s.num_steps == deepest or not s.selects_nodes}
    assert completed(measured, shapes) == [true_us(shape) for shape in shapes]


def test_noise_never_makes_a_smaller_tree_slower_nor_faster_than_plain_decoding() -> None:
    shapes = SHAPES["chain"]
    measured = {t: true_us(s) for t, s in enumerate(shapes) if s.num_steps == 5 or not s.selects_nodes}
    measured[shapes.index(next(s for s in shapes if s.num_steps == 5))] = 100  # a clock that stood still
    times = completed(measured, shapes)
    assert min(times) == 100 and times[0] == 100, "a part of a tree never takes longer than the tree"
    measured = dict.fromkeys(measured, 500) | {0: 480}
    assert set(completed(measured, shapes)[1:]) == {500}


def test_trees_are_measured_as_programs_that_were_captured_at_start() -> None:
    """On a GPU, an eager step takes several times as long as a captured one, and a run that is captured even longer."""
    programs_before: list[int] = []

    def measure(lockstep: Lockstep, cache: KVCache, resolved: ResolvedConfig) -> TreeCosts:
        programs_before.append(len(lockstep.programs.captured))
        return measure_trees(lockstep, cache, resolved)

    config = adaptive(config_of(*tiny_pair(), topk=2, num_steps=2, capture="on", capture_sizes=(1, 2)))
    with patch("cluster.engine.build.measure_trees", measure):
        engine = build_engine(config.model_copy(update={"max_running_requests": 2}))
    assert programs_before == [len(engine.lockstep.programs.captured)] and programs_before[0] > 0


def test_engine_uses_a_better_tree_when_steps_have_lost_the_price_of_its_capture() -> None:
    config = adaptive(config_of(*tiny_pair(), num_steps=2, capture="on"))
    with patch("cluster.engine.build.measure_trees", equal_costs):
        engine = build_engine(config)
    coordinator, programs, outlook = engine.lockstep.coordinator, engine.lockstep.programs, [1000, 1000, 1000]
    plans: list[StepPlan] = []
    agree = coordinator.agree

    def noting_agree(facts: RankFacts) -> StepPlan:
        plans.append(agree(facts))
        return plans[-1]

    with (
        patch.object(engine._parts.scheduler.decode.outlook, "vote", lambda *_: TreeVote(2, tuple(outlook))),
        patch.object(coordinator, "agree", noting_agree),
    ):
        engine.submit(make_request("a", [3, 5, 2], RequestParams(), max_tokens=40))
        while not programs.capture_us:  # plain decoding, until its steps are captured and replayed
            engine.step()
        outlook[:] = 1000, 1500, 2000
        engine.step()
        assert plans[-1].tier == 0 and plans[-1].lost_us == 50, "half of the 100 us"
        programs.capture_us = 100
        for _ in range(3):
            engine.step()
    assert [plan.lost_us for plan in plans[-3:]] == [50, 0, 0] and plans[-2].extend_mode is ExtendMode.MISSED
    assert [plan.tier for plan in plans[-3:]] == [0, 0, 2]


def test_a_program_that_is_missing_has_the_price_of_a_capture() -> None:
    config = adaptive(config_of(*tiny_pair(), num_steps=2, capture="on"))
    with patch("cluster.engine.build.measure_trees", equal_costs):
        engine = build_engine(config)
    programs, plans = engine.lockstep.programs, list[StepPlan]()
    agree = engine.lockstep.coordinator.agree

    def noting_agree(facts: RankFacts) -> StepPlan:
        plans.append(agree(facts))
        return plans[-1]

    with (
        patch.object(engine._parts.scheduler.decode.outlook, "vote", lambda *_: TreeVote(2, (1000, 2000, 1000))),
        patch.object(engine.lockstep.coordinator, "agree", noting_agree),
    ):
        engine.submit(make_request("a", [3, 5, 2], RequestParams(), max_tokens=40))
        for _ in range(8):
            engine.step()
    plan = plans[-1]
    assert plan.captured and programs.has_program(plan.key) and programs.capture_us > 0
    assert [programs.price_us(plan, tier) for tier in range(3)] == [programs.capture_us, 0, programs.capture_us]
    assert programs.price_us(plan._replace(captured=False), 2) == 0, "such steps are not captured"
    programs.remove(plan.key)
    assert programs.price_us(plan, plan.tier) == programs.capture_us
    resting = plan.key._replace(tier=0, extend_mode=ExtendMode.NOTHING)
    program: Any = SimpleNamespace(checksum=0)
    programs.add(resting, program)
    assert programs.price_us(plan, 0) == 0, "without trees the draft rests"


class SlowProgram:
    """A captured program. By the clock `now_s` of one number, each replay takes 10 ms."""

    def __init__(self, captured: Any, now_s: list[float]) -> None:
        self._captured, self._now_s = captured, now_s
        self.output, self.bytes = captured.output, captured.bytes

    def replay(self) -> None:
        self._now_s[0] += 0.01
        self._captured.replay()


def test_the_price_of_a_capture_does_not_include_the_step_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 64 requests take ten times as long as those of one, but to capture them takes little longer. The first
    capture of a process may take long.
    """
    engine, now_s = build_engine(config_of(*tiny_pair(), num_steps=2, capture="on")), [0.0]
    programs = engine.lockstep.programs
    capture: Any = programs._capture
    run = programs._run
    monkeypatch.setattr("cluster.engine.programs.time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def slow_capture(program: Any) -> Any:
        now_s[0] += 0.05 if programs.captured else 3.0
        return SlowProgram(capture(program), now_s)

    def slow_run(*arguments: Any) -> Any:
        now_s[0] += 0.02
        return run(*arguments)

    monkeypatch.setattr(programs, "_capture", slow_capture)
    monkeypatch.setattr(programs, "_run", slow_run)
    for count in (1, 2, 3):
        for index in range(count):
            engine.submit(make_request(f"{count}.{index}", [3, 5, 2], RequestParams(), max_tokens=20))
        while engine.has_work:
            engine.step()
    assert len(programs.captured) >= 3 and programs.capture_us == 70_000, "20 + 20 + 50 - 2 * 10 ms"


class SimulatedTrial:
    """Runs steps of some true times on a machine that is 1.5 times as slow for some seconds out of four. Eager runs
    take 100 times as long.
    """

    def __init__(self, true_us: dict[int, float], eager_runs: int) -> None:
        self._true_us, self._eager_runs, self._random = true_us, eager_runs, Random(5)
        self._runs: Counter[int] = Counter()
        self.spent_s = 0.0

    def time_once(self, load: TrialLoad) -> float:
        assert load.tier is not None
        self._runs[load.tier] += 1
        pace = 1.5 if self.spent_s % 4.0 > 1.5 else 1.0
        us = self._true_us[load.tier] * pace * self._random.uniform(1.0, 1.1)
        us *= 100 if self._runs[load.tier] <= self._eager_runs else 1
        self.spent_s += us / 1e6
        return us


@pytest.mark.parametrize("eager_runs", [0, 2, 4])
@pytest.mark.parametrize("step_us", [900.0, 20_000.0])
def test_times_are_comparable_on_a_machine_whose_pace_changes(eager_runs: int, step_us: float) -> None:
    true_us = {tier: step_us * (1 + tier) for tier in range(4)}
    trial: Any = SimulatedTrial(true_us, eager_runs)
    times = _times(trial, [TrialLoad(1, tier=tier) for tier in true_us], eager_runs)
    for tier, us in enumerate(times):
        assert us / times[0] == pytest.approx(1 + tier, rel=0.1)
    assert times[0] < 1.6 * step_us


def test_a_step_that_something_disturbed_does_not_count() -> None:
    assert typical_times([[10, 20, 30], [10, 2000, 30], [15, 30, 45]]) == [10, 20, 30]
    assert typical_times([[10, 20]]) == [10, 20]
