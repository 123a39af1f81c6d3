"""A machine that has changed since its pace was measured: the bargain holds again after a few steps."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median

import pytest

from cluster.engine.pace_correction import MAX_DRIFT, Correction, RunningMedian
from cluster.engine.schedule import Schedule
from cluster.engine.scheduler import Scheduler
from tests.unit.engine.test_prefill_share import CPU, EIGHT_B, PACE, Machine, decoding, scheduler_of
from tests.unit.engine.test_scheduler import advance, sequence

Disturbed = Callable[[float], float]


def rides(scheduler: Scheduler, machine: Machine, prompt: int, disturbed: Disturbed = float) -> list[float]:
    """Over those of decoding alone, the times of the steps in which a prompt is taken; then steps without one."""
    long, ratios = sequence("long", prompt), list[float]()
    scheduler.waiting.append(long)
    for _ in range(20):
        while long.prefilling:
            ratios.append(step(scheduler, machine, disturbed))
        step(scheduler, machine, disturbed)
    scheduler.release(long)
    return ratios


def step(scheduler: Scheduler, machine: Machine, disturbed: Disturbed) -> float:
    """Take the next step on `machine`, tell the scheduler, and give its time over that of its decoding alone."""
    plan = scheduler.schedule()
    own = (len(plan.decodes), max((s.committed for s, _ in plan.decodes), default=0))
    took = machine.step(*own, plan.prompt_rows, plan.chunks[0].start if plan.chunks else 0)
    scheduler.learn(plan, plan.decode_us, plan.prompt_rows > 0, disturbed(took))
    advance(plan)
    return took / machine.step(*own)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("by", [0.5, 2.0])
@pytest.mark.parametrize("machine", [CPU, EIGHT_B])
def test_prompt_rows_get_their_share_again_after_row_costs_change(machine: Machine, by: float, share: float) -> None:
    now = replace(machine, row=machine.row * by, pair=machine.pair * by)
    scheduler = scheduler_of(machine.pace(share, 1024), 1024, tokens=20000)
    decoding(scheduler, 4)
    rides(scheduler, now, 8192)
    ratios = rides(scheduler, now, 8192)
    mean = sum(ratios) / len(ratios)
    assert mean <= 1.15 / (1 - share)
    assert mean >= 0.85 / (1 - share) or scheduler.correction.prompt_drift.value < 1.02 / MAX_DRIFT, (
        "as cheap as they may seem"
    )


def test_uniformly_slower_machine_keeps_the_prompt_step_count() -> None:
    def twice(us: float) -> float:
        return 2.0 * us

    before, after = (scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=20000) for _ in range(2))
    for scheduler in (before, after):
        decoding(scheduler, 4)
    for _ in range(50):
        step(before, CPU, float)
        step(after, CPU, twice)
    kept = rides(before, CPU, 4096)
    slower = rides(after, CPU, 4096, twice)
    assert len(kept) == pytest.approx(len(slower), rel=0.15)


def test_correction_is_robust_to_rare_very_long_steps() -> None:
    rng = Random(7)

    def disturbed(us: float) -> float:
        return us * (100.0 if rng.random() < 0.1 else rng.uniform(0.9, 1.1))

    scheduler = scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=20000)
    decoding(scheduler, 4)
    rides(scheduler, CPU, 8192, disturbed)
    ratios = rides(scheduler, CPU, 8192, disturbed)
    assert 1.6 <= median(ratios) <= 2.3


def test_prompt_drift_is_limited_to_max_drift_in_both_directions() -> None:
    correction = Correction()
    for _ in range(500):
        correction.observe_mixed(1000.0, 1000.0, 1e9)
    assert correction.prompt_drift.value == MAX_DRIFT
    for _ in range(500):
        correction.observe_mixed(1000.0, 1000.0, 1.0)
    assert correction.prompt_drift.value == pytest.approx(1 / MAX_DRIFT)


def test_uninformative_steps_add_no_drift_observations() -> None:
    scheduler = scheduler_of(PACE, 300)
    correction = scheduler.correction
    scheduler.learn(Schedule(), 0, False, 500.0)
    scheduler.learn(Schedule(), 0, True, 500.0)
    scheduler.learn(Schedule(), 1000, True, 9000.0)  # the rows are another group's
    scheduler.learn(Schedule(mixed_decode_us=1000.0, prompt_us=20.0), 1000, True, 90000.0)
    assert (
        correction.decode_drift.observations,
        correction.prompt_drift.observations,
        correction.prompt_drift.value,
    ) == (0, 0, 1.0)
    scheduler_of(None, 300).learn(Schedule(mixed_decode_us=1000.0, prompt_us=2000.0), 1000, True, 90000.0)


@pytest.mark.parametrize("by", [0.6, 1.0, 1.7])
def test_rank_without_decodes_leaves_decoding_ranks_their_share(by: float) -> None:
    """It has their time besides its own part, whatever its rows take."""
    others, scheduler = CPU.step(4, 300), scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=20000)
    foretold = round(CPU.pace(0.5, 1024).decoding([300] * 4))
    long, ratios, idle = sequence("long", 8192), list[float](), CPU.step(0, 0)
    scheduler.waiting.append(long)
    for _ in range(20):
        scheduler.learn(Schedule(), foretold, False, others)
    while long.prefilling:
        plan = scheduler.schedule(foretold)
        start = plan.chunks[0].start if plan.chunks else 0
        took = max(others, idle + by * (CPU.step(0, 0, plan.prompt_rows, start) - idle))
        scheduler.learn(plan, foretold, plan.prompt_rows > 0, took)
        ratios.append(took / others)
        advance(plan)
    assert 1.7 <= sum(ratios[30:]) / len(ratios[30:]) <= 2.3


def test_running_median_converges_to_the_median() -> None:
    rng, running = Random(3), RunningMedian()
    for _ in range(400):
        running.observe(4.0 * rng.choice((0.9, 1.0, 1.0, 30.0)))
    assert running.value == pytest.approx(4.0, rel=0.15)


def test_prefill_drift_is_learned_only_from_informative_steps() -> None:
    """For the router, which predicts waits. A step that another group made long, or one of few rows, tells nothing."""
    scheduler = scheduler_of(PACE, 300)
    scheduler.waiting.append(sequence("long", 4000))
    for _ in range(8):
        plan = scheduler.schedule()
        assert plan.prefill_us == pytest.approx(PACE.fixed + PACE.cost(0, plan.chunks[0].start, 300))
        scheduler.learn(plan, 0, 400, 9 * plan.prefill_us)
        scheduler.learn(plan, 0, 300, 2 * plan.prefill_us)
        advance(plan)
    assert 1.6 < scheduler.correction.prefill_drift.value < 2.2
    seen = scheduler.correction.prefill_drift.observations
    scheduler = scheduler_of(PACE, 300)
    scheduler.waiting.append(sequence("short", 3))
    plan = scheduler.schedule()
    scheduler.learn(plan, 0, 3, 9 * plan.prefill_us)
    assert (seen, scheduler.correction.prefill_drift.observations) == (8, 0)
