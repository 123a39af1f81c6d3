"""The expected wait against the true one, in gangs whose schedulers are the real ones and whose clock is made up."""

from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import pytest

from cluster.actors.admission import HEADROOM, SHORT_WAIT_S, Admission
from cluster.actors.prefill_speed import Drift
from tests.unit.actors.simulated_gang import ACCEPT, Arrival, Outcome, SimulatedGang
from tests.unit.engine.test_prefill_share import CPU, EIGHT_B, Machine

LIMIT_S = 10.0
FLOOR_S = 1.0  # waits below this count as this: nobody is refused for them
FACTOR = 2.0


def steady(
    per_s: float, seconds: float, prompt: tuple[int, int], tokens: tuple[int, int], **more: Any
) -> list[Arrival]:
    """Requests at random times, of random sizes."""
    rng, now, found = Random(7), 0.0, []
    while now < seconds:
        now += rng.expovariate(per_s)
        found.append(Arrival(now, rng.randint(*prompt), rng.randint(*tokens), **more))
    return found


def burst(at: float, count: int = 60) -> list[Arrival]:
    rng = Random(int(at))
    return [Arrival(at + i / 1000, rng.randint(100, 1500), rng.randint(20, 60)) for i in range(count)]


def gang(machine: Machine = CPU, groups: int = 1, **given: Any) -> SimulatedGang:
    settings = {"attn_dp_size": groups, "max_queue_wait_s": LIMIT_S, **given.pop("settings", {})}
    return SimulatedGang(machine, settings=settings, **given)


def judge(outcomes: list[Outcome], over_s: float, factor: float = FACTOR) -> None:
    """The estimates are right, no refusal is false, and some request really waited longer than `over_s`."""
    assert max(one.waited for one in outcomes) > over_s, "or else nothing was tried"
    wrong = [
        one for one in outcomes if not 1 / factor <= max(one.expected, FLOOR_S) / max(one.waited, FLOOR_S) <= factor
    ]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}, as {wrong[:3]}"
    limit = HEADROOM * LIMIT_S
    false = [one for one in outcomes if one.refused and (one.waited <= SHORT_WAIT_S or one.waited < limit / factor)]
    assert not false, f"{len(false)} refused, as {false[:3]}"


SHORT = steady(5, 40, (5, 20), (1, 30))
LONG = [Arrival(10.0, 8000, 1), Arrival(22.0, 6000, 50)]
LOADS: dict[str, tuple[list[Arrival], dict[str, Any], float]] = {
    "short beside long": ([*SHORT, *LONG], {}, 5.0),
    "nobody decodes": ([*steady(5, 40, (5, 20), (1, 1)), LONG[0]], {}, 5.0),
    "bursts": ([*burst(0.0), *burst(60.0)], {}, 20.0),
    "all long": (steady(0.15, 120, (2000, 8000), (1, 100)), {}, 20.0),
    "slots full": (steady(8, 30, (20, 200), (50, 150)), {"settings": {"max_running_requests": 4}}, 5.0),
    "KV full": (steady(4, 30, (200, 600), (100, 200)), {"kv_tokens": 4000}, 5.0),
}


@pytest.mark.parametrize(
    ("load", "groups"),
    [
        *((load, 1) for load in LOADS),
        *(("short beside long", 2), ("nobody decodes", 2)),
        *(pytest.param(load, 2, marks=pytest.mark.slow) for load in ("bursts", "all long", "slots full", "KV full")),
    ],
)
def test_expected_wait_matches_the_simulated_wait(load: str, groups: int) -> None:
    arrivals, given, over_s = LOADS[load]
    if groups == 2:  # each request twice, but for the longest
        arrivals = arrivals + [replace(one, at=one.at + 0.0005) for one in arrivals if one.prompt < 8000]
    judge(gang(groups=groups, **given).run(arrivals), over_s)


@pytest.mark.parametrize("load", ["short beside long", "bursts", "slots full", "KV full"])
def test_expected_wait_matches_the_simulated_wait_on_a_fast_machine(load: str) -> None:
    arrivals, given, _ = LOADS[load]
    arrivals = [one if load == "bursts" else replace(one, at=one.at / 12) for one in arrivals]
    judge(gang(EIGHT_B, **given).run(arrivals), 0.2)


@pytest.mark.parametrize("load", ["nobody decodes", "bursts", "all long"])
def test_expected_wait_adapts_to_a_slower_machine(load: str) -> None:
    """By the steps that are taken before; ranks report it."""
    arrivals, given, over_s = LOADS[load]
    before = steady(2, 20, (5, 400), (1, 30))
    sim = gang(slower=1.7, **given)
    outcomes = sim.run([*before, *(replace(one, at=one.at + 30) for one in arrivals)])
    judge(outcomes[len(before) :], over_s)


def test_expected_wait_learns_row_times_when_mixed_prefill_size_is_fixed() -> None:
    """Nothing is measured at start then."""
    before = steady(0.5, 20, (600, 1500), (1, 30))
    sim = gang(measured=False, settings={"mixed_prefill_size": 64})
    outcomes = sim.run([*before, *(replace(one, at=one.at + 40) for one in LOADS["all long"][0])])
    judge(outcomes[len(before) :], 20.0, factor=3.0)


def test_gang_drift_ignores_ranks_without_observations() -> None:
    """What was measured on a busy machine is too slow: one rank knows, the other never had a long prompt."""
    assert Drift.of_gang([Drift(0.5, 1.0, 0.4), Drift(0.6, 1.0, 1.0)]) == (0.6, 1.0, 0.4)


def test_expected_wait_counts_a_prefix_shared_with_open_requests_once() -> None:
    arrivals = [Arrival(i / 1000, 4010, 20, prefix=4000) for i in range(20)]
    outcomes = gang().run(arrivals)
    judge(outcomes, 2.0)
    assert not any(one.refused for one in outcomes), "a prompt for each of them would take two minutes"


def test_short_requests_are_admitted_on_the_rank_without_the_long_prompt() -> None:
    """The case of which the field told: 442 of them were refused, though each was served in about a second."""
    outcomes = gang(groups=2).run([*steady(20, 30, (3, 8), (1, 1)), LONG[0]])
    short = [one for one in outcomes if one.arrival.prompt < 100]
    assert not any(one.refused for one in short) and max(one.waited for one in short) < 5.0


def test_expected_wait_recovers_when_a_burst_is_over() -> None:
    sim = gang()
    served = sim.run(burst(0.0, 120))
    assert any(one.refused for one in served)
    over = sim.now
    later = sim.run([Arrival(over + 0.5 + i, 50, 5) for i in range(3)])[len(served) :]
    assert all(one.expected < SHORT_WAIT_S and not one.refused for one in later)


@pytest.mark.parametrize("load", ["bursts", "slots full", "KV full"])
def test_admitted_requests_wait_no_longer_than_max_queue_wait_s(load: str) -> None:
    arrivals, given, _ = LOADS[load]
    outcomes = gang(admits_all=False, **given).run(arrivals)
    waits = [one.waited for one in outcomes if not one.refused]
    assert len(waits) < len(outcomes) and max(waits) <= LIMIT_S
    assert max(waits) > LIMIT_S / 4, "and many are let in"


@pytest.mark.parametrize(("most", "right"), [(96, 0.95), (4096, 0.9)])
def test_retry_after_matches_observed_waits_at_five_times_overload(most: int, right: float) -> None:
    """As in `aerie bench overload`: two ranks of eight slots, answers of one length, which is known or is learned."""
    gang_of_two = gang(groups=2, admits_all=False, settings={"max_running_requests": 8})
    capacity = 2 * 8 * ACCEPT / 96 / (1e-6 * CPU.step(8, 60))  # requests a second
    outcomes = gang_of_two.run([Arrival(i / (5 * capacity), 22, 96, most) for i in range(int(25 * 5 * capacity))])
    taken = [one for one in outcomes if not one.refused]
    assert max(one.waited for one in taken) <= LIMIT_S
    assert len(taken) > 0.8 * capacity * gang_of_two.now
    ratios = []
    for one in outcomes:
        near = [other.waited for other in taken if abs(other.arrival.at - one.arrival.at) < 2.0]
        if one.refused and near:
            ratios.append(one.expected / median(near))
    assert len(ratios) > 500 and sum(0.5 <= ratio <= 2.0 for ratio in ratios) > right * len(ratios)


def test_hundreds_of_refusals_need_few_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, run_ahead = [0], Admission._new_forecast

    def counted(admission: Admission, now: float) -> Any:
        made[0] += 1
        return run_ahead(admission, now)

    monkeypatch.setattr(Admission, "_new_forecast", counted)
    sim = gang(admits_all=False)
    outcomes = sim.run([*burst(0.0), *(Arrival(1.0 + i / 400, 600, 20) for i in range(400))])
    assert sum(one.refused for one in outcomes) > 300
    assert made[0] < 60
