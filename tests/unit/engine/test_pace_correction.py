"""Correction of the pace when the machine has changed since calibration: the shares hold again after a few steps."""

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

Distortion = Callable[[float], float]


def prompt_slowdowns(scheduler: Scheduler, machine: Machine, prompt: int, distort: Distortion = float) -> list[float]:
    """Run a prompt, then steps without a prompt. Return, for each step with the prompt, its time divided by the time of
    decoding alone. `distort` turns a real step time into the measured one.
    """
    prompt_state, ratios = sequence("long", prompt), list[float]()
    scheduler.waiting.append(prompt_state)
    for _ in range(20):
        while prompt_state.prefilling:
            ratios.append(take_step(scheduler, machine, distort))
        take_step(scheduler, machine, distort)
    scheduler.release(prompt_state)
    return ratios


def take_step(scheduler: Scheduler, machine: Machine, distort: Distortion) -> float:
    """Take the next step on `machine`, and report its distorted time to the scheduler. Return the step's time divided
    by the time of its decoding alone.
    """
    plan = scheduler.schedule()
    decode_load = (len(plan.decodes), max((s.committed for s, _ in plan.decodes), default=0))
    step_us = machine.step(*decode_load, plan.prompt_rows, plan.chunks[0].start if plan.chunks else 0)
    scheduler.learn(plan, plan.decode_us, plan.prompt_rows > 0, distort(step_us))
    advance(plan)
    return step_us / machine.step(*decode_load)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("machine", [CPU, EIGHT_B])
def test_prompt_rows_get_their_share_again_after_row_costs_change(
    machine: Machine, factor: float, share: float
) -> None:
    changed_machine = replace(machine, row_us=machine.row_us * factor, pair=machine.pair * factor)
    scheduler = scheduler_of(machine.pace(share, 1024), 1024, tokens=20000)
    decoding(scheduler, 4)
    prompt_slowdowns(scheduler, changed_machine, 8192)
    ratios = prompt_slowdowns(scheduler, changed_machine, 8192)
    mean = sum(ratios) / len(ratios)
    assert mean <= 1.15 / (1 - share)
    assert mean >= 0.85 / (1 - share) or scheduler.correction.prompt_drift.value < 1.02 / MAX_DRIFT, (
        "a low share is allowed only at the lower limit of the drift"
    )


def test_uniformly_slower_machine_keeps_the_prompt_step_count() -> None:
    def twice(us: float) -> float:
        return 2.0 * us

    normal_scheduler, slow_scheduler = (scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=20000) for _ in range(2))
    for scheduler in (normal_scheduler, slow_scheduler):
        decoding(scheduler, 4)
    for _ in range(50):
        take_step(normal_scheduler, CPU, float)
        take_step(slow_scheduler, CPU, twice)
    normal_slowdowns = prompt_slowdowns(normal_scheduler, CPU, 4096)
    slow_slowdowns = prompt_slowdowns(slow_scheduler, CPU, 4096, twice)
    assert len(normal_slowdowns) == pytest.approx(len(slow_slowdowns), rel=0.15)


def test_correction_is_robust_to_rare_very_long_steps() -> None:
    rng = Random(7)

    def distort(us: float) -> float:
        return us * (100.0 if rng.random() < 0.1 else rng.uniform(0.9, 1.1))

    scheduler = scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=20000)
    decoding(scheduler, 4)
    prompt_slowdowns(scheduler, CPU, 8192, distort)
    ratios = prompt_slowdowns(scheduler, CPU, 8192, distort)
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


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_rank_without_decodes_leaves_decoding_ranks_their_share(factor: float) -> None:
    """Whatever its rows cost, this rank makes a step take about twice the time of the decoding ranks (share 0.5)."""
    peer_step_us, scheduler = CPU.step(4, 300), scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=20000)
    predicted_us = round(CPU.pace(0.5, 1024).decoding([300] * 4))
    prompt_state, ratios, empty_step_us = sequence("long", 8192), list[float](), CPU.step(0, 0)
    scheduler.waiting.append(prompt_state)
    for _ in range(20):
        scheduler.learn(Schedule(), predicted_us, False, peer_step_us)
    while prompt_state.prefilling:
        plan = scheduler.schedule(predicted_us)
        start = plan.chunks[0].start if plan.chunks else 0
        step_us = max(peer_step_us, empty_step_us + factor * (CPU.step(0, 0, plan.prompt_rows, start) - empty_step_us))
        scheduler.learn(plan, predicted_us, plan.prompt_rows > 0, step_us)
        ratios.append(step_us / peer_step_us)
        advance(plan)
    assert 1.7 <= sum(ratios[30:]) / len(ratios[30:]) <= 2.3


def test_running_median_converges_to_the_median() -> None:
    rng, running = Random(3), RunningMedian()
    for _ in range(400):
        running.observe(4.0 * rng.choice((0.9, 1.0, 1.0, 30.0)))
    assert running.value == pytest.approx(4.0, rel=0.15)


def test_prefill_drift_is_learned_only_from_informative_steps() -> None:
    """The router predicts waits from this drift. A step that another group made long, or that has few rows, says
    nothing about the drift.
    """
    scheduler = scheduler_of(PACE, 300)
    scheduler.waiting.append(sequence("long", 4000))
    for _ in range(8):
        plan = scheduler.schedule()
        assert plan.prefill_us == pytest.approx(PACE.fixed + PACE.cost(0, plan.chunks[0].start, 300))
        scheduler.learn(plan, 0, 400, 9 * plan.prefill_us)
        scheduler.learn(plan, 0, 300, 2 * plan.prefill_us)
        advance(plan)
    assert 1.6 < scheduler.correction.prefill_drift.value < 2.2
    observations_of_long = scheduler.correction.prefill_drift.observations
    scheduler = scheduler_of(PACE, 300)
    scheduler.waiting.append(sequence("short", 3))
    plan = scheduler.schedule()
    scheduler.learn(plan, 0, 3, 9 * plan.prefill_us)
    assert (observations_of_long, scheduler.correction.prefill_drift.observations) == (8, 0)
