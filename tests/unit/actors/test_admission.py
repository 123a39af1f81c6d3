"""Admission against a server that is simulated in its own time: who is let in, who is told to come back, and when."""

import heapq
import pickle
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.actors.admission import HEADROOM, Admission
from cluster.actors.messages import Overloaded
from cluster.actors.output_lengths import FIRST_GUESS
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.request import Request, RequestParams

PLENTY = 1 << 24  # tokens of KV: slots run out first


def config(**settings: Any) -> ResolvedSettings:
    own = {"model_path": "m", "max_running_requests": 8, "max_queue_wait_s": 10.0, **settings}
    return ResolvedSettings.of(EngineConfig.model_validate(own))


def request(name: str, max_tokens: int = 100, prompt: int = 10) -> Request:
    return Request(name, tuple(range(prompt)), RequestParams(max_tokens=max_tokens))


@dataclass
class Simulation:
    """A server of `slots` slots, each good for `pace` tokens per second, first come first served, in 0.05 s steps."""

    settings: ResolvedSettings
    slots: int = 8
    pace: float = 20.0
    now: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)  # (arrival, wait) of those let in
    refused: list[tuple[float, float]] = field(default_factory=list)  # (arrival, Retry-After)
    finished: int = 0

    def run(self, arrivals: list[tuple[float, int, int]], until: float) -> None:
        """`arrivals` are (time, max_tokens, tokens that it really takes)."""
        admission = Admission(self.settings, clock=lambda: self.now)
        admission.started(PLENTY)
        coming = [(at, number, most, length) for number, (at, most, length) in enumerate(arrivals)]
        heapq.heapify(coming)
        waiting: list[tuple[str, float, int]] = []
        running: dict[str, float] = {}
        lengths: dict[str, int] = {}
        mosts: dict[str, int] = {}
        dealt: dict[str, int] = {}
        while self.now < until:
            self.now += 0.05
            while coming and coming[0][0] <= self.now:
                at, number, most, length = heapq.heappop(coming)
                name = str(number)
                if (full := admission.full()) is not None:
                    self.refused.append((at, full.retry_after_s))
                    continue
                try:
                    admission.check(request(name, most))
                except Overloaded as error:
                    self.refused.append((at, error.retry_after_s))
                    continue
                admission.entered(request(name, most))
                mosts[name] = most
                waiting.append((name, at, length))
            while waiting and len(running) < self.slots:
                name, at, length = waiting.pop(0)
                running[name], lengths[name], dealt[name] = 0.0, length, 0
                self.waits.append((at, self.now - at))
            for name in list(running):
                running[name] += 0.05 * self.pace
                new = min(int(running[name]), lengths[name]) - dealt[name]
                if new:
                    dealt[name] += new
                    admission.progressed(name, new)
                if dealt[name] >= lengths[name]:
                    admission.left(name, stopped=lengths[name] < mosts[name])
                    del running[name]
                    self.finished += 1


def lengths_of(kind: str, count: int) -> list[tuple[int, int]]:
    rng = random.Random(5)
    if kind == "equal":
        return [(100, 100)] * count
    if kind == "known":
        return [(size, size) for size in (rng.choice((40, 80, 160)) for _ in range(count))]
    return [(4096, max(1, min(4096, int(rng.expovariate(1 / 100))))) for _ in range(count)]  # unknown to the server


@pytest.mark.parametrize("kind", ["equal", "known", "unknown"])
@pytest.mark.parametrize("burst", [False, True])
def test_five_times_overload(kind: str, burst: bool) -> None:
    sim = Simulation(config())
    capacity = 8 * 20.0 / 100  # requests per second
    seconds, count = 120.0, int(5 * capacity * 120.0)
    times = [0.0] * 100 if burst else []
    times += [seconds * i / count for i in range(count)]
    sim.run([(at, *size) for at, size in zip(times, lengths_of(kind, len(times)), strict=True)], seconds)
    taken = sorted(wait for _, wait in sim.waits)
    sure = (
        0.95 if kind == "unknown" else 0.99
    )  # chance has its say where there are 8 slots and nobody knows the lengths
    assert taken[int(sure * len(taken))] <= 10.0
    mean = 93.3 if kind == "known" else 100
    assert sim.finished >= 0.9 * (seconds * 8 * 20.0 / mean - 8)
    # Retry-After against what those let in at about the same time really waited, once there is a queue
    ratios = []
    for at, said in sim.refused:
        near = [wait for arrival, wait in sim.waits if abs(arrival - at) < 3.0]
        if at > 20.0 and near:
            ratios.append(said / statistics.mean(near))
    assert len(ratios) > 50
    assert 0.5 < statistics.median(ratios) < 2.0
    assert sum(0.5 <= ratio <= 2.0 for ratio in ratios) > 0.8 * len(ratios)


def test_a_server_with_room_takes_everybody() -> None:
    sim = Simulation(config())
    times = [i / (0.7 * 1.6) for i in range(100)]
    sim.run([(at, 100, 100) for at in times], 120.0)
    assert not sim.refused
    assert sim.finished == 100


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(clock: Hand, count: int = 8, **settings: Any) -> Admission:
    """An admission whose slots are taken by requests of 100 tokens that get 10 tokens a second each."""
    admission = Admission(config(**settings), clock)
    admission.started(PLENTY)
    for i in range(count):
        admission.entered(request(f"r{i}"))
    for _ in range(10):
        clock.now += 0.1
        for i in range(count):
            admission.progressed(f"r{i}", 1)
    return admission


def test_requests_in_the_queue_are_counted() -> None:
    admission = Admission(config(max_queued_requests=5), Hand())
    admission.started(PLENTY)
    for i in range(5):
        admission.check(request(f"r{i}"))
        admission.entered(request(f"r{i}"))
    with pytest.raises(Overloaded, match="max_queued_requests is 5"):
        admission.check(request("one more"))


@pytest.mark.parametrize(("bound_s", "taken"), [(5.0, 8), (30.0, 24), (600.0, 200)])
def test_before_anything_was_measured_as_many_wait_as_a_slow_server_would_serve_in_time(
    bound_s: float, taken: int
) -> None:
    admission = Admission(config(max_queue_wait_s=bound_s), Hand())  # 8 slots
    admission.started(PLENTY)
    for i in range(200):
        if admission.full() is not None:
            assert i == taken
            return
        admission.entered(request(f"r{i}"))
    assert taken == 200


def test_the_wait_is_known_before_any_request_has_ended() -> None:
    clock = Hand()
    admission = filled(clock)
    assert admission.wait(1).seconds == pytest.approx(9.0, rel=0.2)  # 90 of 100 tokens are left
    full = admission.full()
    assert full is not None
    assert full.retry_after_s == pytest.approx(9.0, rel=0.2)
    assert str(full) == (
        "the first token would come after about 9.0 s; the limit is 7 s, 0.7 of max_queue_wait_s (10 s)"
    )
    least = filled(Hand(), max_queue_wait_s=0.5).full()
    assert str(least).endswith("the limit is 1 s, the least for any max_queue_wait_s (0.5 s)")
    assert filled(Hand(), max_queue_wait_s=20.0).full() is None


def test_tokens_of_the_queue_are_bounded() -> None:
    admission = Admission(config(max_queued_tokens=500), Hand())
    admission.check(request("huge", prompt=2000))  # an empty queue takes anything
    admission.entered(request("r0", prompt=390, max_tokens=10))
    admission.check(request("fits", prompt=50, max_tokens=10))
    with pytest.raises(Overloaded, match="max_queued_tokens is 500"):
        admission.check(request("does not", prompt=100, max_tokens=10))


def test_nothing_is_left_when_all_have_left() -> None:
    clock = Hand()
    admission = filled(clock)
    for i in range(8):
        admission.left(f"r{i}", stopped=False)
    assert (admission.queued_tokens, admission.wait(1).seconds, admission.full()) == (0.0, 0.0, None)
    admission.left("nobody", stopped=True)
    admission.progressed("nobody", 3)


def test_a_gang_that_is_down_says_nothing_of_time() -> None:
    clock = Hand()
    admission = filled(clock)
    admission.stopped()
    clock.now += 100.0
    assert admission.full() is None
    admission.started(PLENTY)
    assert admission.wait(1).seconds == pytest.approx(9.0, rel=0.2)  # the 100 s do not count


def test_an_outage_is_no_time_to_a_first_token() -> None:
    clock = Hand()
    admission = Admission(config(max_running_requests=64), clock)
    admission.started(PLENTY)
    for i in range(32):
        admission.entered(request(f"r{i}"))
    clock.now += 0.5
    admission.stopped()
    for i in range(32, 64):
        admission.entered(request(f"r{i}"))
    clock.now += 40.0
    admission.started(PLENTY)
    clock.now += 0.5
    for _ in range(50):
        for i in range(64):
            admission.progressed(f"r{i}", 2)
        clock.now += 0.1
    assert admission.wait(1).seconds < 1.0  # all slots are taken by streams that are about to end
    assert admission.full() is None


def test_expected_lengths_are_learnt() -> None:
    clock = Hand()
    admission = Admission(config(), clock)
    assert admission.new_tokens(request("r", max_tokens=4096)) == pytest.approx(FIRST_GUESS)
    for i in range(200):
        admission.entered(request(f"r{i}", max_tokens=4096))
        clock.now += 0.1
        admission.progressed(f"r{i}", 10)
        admission.left(f"r{i}", stopped=True)
    assert admission.new_tokens(request("r", max_tokens=4096)) == pytest.approx(10.0, rel=0.7)
    assert 0.0 < HEADROOM < 1.0


def test_a_refusal_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(Overloaded("full", 12.5)))
    assert (str(error), error.retry_after_s) == ("full", 12.5)
