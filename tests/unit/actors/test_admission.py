"""Admission by a clock that is moved by hand: who is let in, who is told to come back, and when.

That the expected waits are the true ones, also of those that come in overload, is in `test_expected_wait.py`.
"""

from typing import Any

import pytest

from cluster.actors.admission import Admission
from cluster.actors.messages import Overloaded
from cluster.actors.output_lengths import PRIOR_TOKENS_PER_STOP
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.request import Request, RequestParams

PLENTY = 1 << 24  # tokens of KV: slots run out first


def config(**settings: Any) -> ResolvedSettings:
    own = {"model_path": "m", "max_running_requests": 8, "max_queue_wait_s": 10.0, **settings}
    return ResolvedSettings.from_settings(EngineConfig.model_validate(own))


def request(name: str, max_tokens: int = 100, prompt: int = 10) -> Request:
    return Request(name, tuple(range(prompt)), RequestParams(max_tokens=max_tokens))


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(clock: Hand, count: int = 8, **settings: Any) -> Admission:
    """An admission whose slots are taken by requests of 100 tokens that get 10 tokens a second each."""
    admission = Admission(config(**settings), clock)
    admission.on_gang_up(PLENTY)
    for i in range(count):
        admission.on_admitted(request(f"r{i}"))
    for _ in range(10):
        clock.now += 0.1
        for i in range(count):
            admission.on_tokens(f"r{i}", 1)
    return admission


@pytest.mark.parametrize(("bound_s", "taken"), [(5.0, 8), (30.0, 24), (600.0, 200)])
def test_unmeasured_admission_queues_as_many_as_a_slow_server_would_serve(bound_s: float, taken: int) -> None:
    admission = Admission(config(max_queue_wait_s=bound_s), Hand())  # 8 slots
    admission.on_gang_up(PLENTY)
    for i in range(200):
        if admission.overload() is not None:
            assert i == taken
            return
        admission.on_admitted(request(f"r{i}"))
    assert taken == 200


def test_admission_estimates_the_wait_before_any_request_has_ended() -> None:
    clock = Hand()
    admission = filled(clock)
    assert admission.expected_wait(1).seconds == pytest.approx(9.0, rel=0.2)  # 90 of 100 tokens are left
    full = admission.overload()
    assert full is not None
    assert full.retry_after_s == pytest.approx(9.0, rel=0.2)
    assert str(full) == (
        "the first token would come after about 9.0 s; the limit is 7 s, 0.7 of max_queue_wait_s (10 s)"
    )
    least = filled(Hand(), max_queue_wait_s=0.5).overload()
    assert str(least).endswith("the limit is 1 s, the least for any max_queue_wait_s (0.5 s)")
    assert filled(Hand(), max_queue_wait_s=20.0).overload() is None


def test_admission_bounds_queued_tokens() -> None:
    admission = Admission(config(max_queued_tokens=500), Hand())
    admission.check(request("huge", prompt=2000))  # an empty queue takes anything
    admission.on_admitted(request("r0", prompt=390, max_tokens=10))
    admission.check(request("fits", prompt=50, max_tokens=10))
    with pytest.raises(Overloaded, match="max_queued_tokens is 500"):
        admission.check(request("does not", prompt=100, max_tokens=10))


def test_admission_state_is_empty_after_all_requests_ended() -> None:
    clock = Hand()
    admission = filled(clock)
    admission.on_admitted(request("leaves before its first token"))
    assert admission.waiting == 1
    for name in (*(f"r{i}" for i in range(8)), "leaves before its first token"):
        admission.on_ended(name, stopped=False)
    assert admission.waiting == 0
    assert (admission.queued_tokens, admission.expected_wait(1).seconds, admission.overload()) == (0.0, 0.0, None)
    admission.on_ended("nobody", stopped=True)
    admission.on_tokens("nobody", 3)


def test_admission_gives_no_overload_while_the_gang_is_down() -> None:
    clock = Hand()
    admission = filled(clock)
    admission.on_gang_down()
    clock.now += 100.0
    assert admission.overload() is None
    admission.on_gang_up(PLENTY)
    assert admission.expected_wait(1).seconds == pytest.approx(9.0, rel=0.2)  # the 100 s do not count


def test_outage_does_not_count_towards_the_expected_wait() -> None:
    clock = Hand()
    admission = Admission(config(max_running_requests=64), clock)
    admission.on_gang_up(PLENTY)
    for i in range(32):
        admission.on_admitted(request(f"r{i}"))
    clock.now += 0.5
    admission.on_gang_down()
    for i in range(32, 64):
        admission.on_admitted(request(f"r{i}"))
    clock.now += 40.0
    admission.on_gang_up(PLENTY)
    clock.now += 0.5
    for _ in range(50):
        for i in range(64):
            admission.on_tokens(f"r{i}", 2)
        clock.now += 0.1
    assert admission.expected_wait(1).seconds < 1.0  # all slots are taken by streams that are about to end
    assert admission.overload() is None


def test_admission_learns_expected_output_lengths() -> None:
    clock = Hand()
    admission = Admission(config(), clock)
    assert admission.expected_new_tokens(request("r", max_tokens=4096)) == pytest.approx(PRIOR_TOKENS_PER_STOP)
    for i in range(200):
        admission.on_admitted(request(f"r{i}", max_tokens=4096))
        clock.now += 0.1
        admission.on_tokens(f"r{i}", 10)
        admission.on_ended(f"r{i}", stopped=True)
    assert admission.expected_new_tokens(request("r", max_tokens=4096)) == pytest.approx(10.0, rel=0.7)
