"""Admission with a manual clock: which requests are admitted, which are refused, and the retry time of the refused.

`test_expected_wait.py` compares expected waits with real waits, under overload too.
"""

from typing import Any

import pytest

from cluster.actors.admission import Admission
from cluster.actors.messages import Overloaded
from cluster.actors.open_requests import OpenRequest
from cluster.actors.output_lengths import PRIOR_TOKENS_PER_STOP
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.request import Request, RequestParams

PLENTY = 1 << 24  # tokens of KV: slots run out first


def config(**settings: Any) -> ResolvedSettings:
    fields = {"model_path": "m", "max_running_requests": 8, "max_queue_wait_s": 10.0, **settings}
    return ResolvedSettings.from_settings(EngineConfig.model_validate(fields))


def request(name: str, max_tokens: int = 100, prompt: int = 10) -> Request:
    return Request(name, tuple(range(prompt)), RequestParams(max_tokens=max_tokens))


def admit(admission: Admission, *args: Any, **fields: Any) -> None:
    """Admit a request that the function `request` makes of the other arguments."""
    admission.on_admitted(OpenRequest(request(*args, **fields)))


def give_tokens(admission: Admission, name: str, tokens: int) -> None:
    """Give an open request `tokens` tokens, and report this to admission."""
    admission._open[name].sent_tokens += [0] * tokens
    admission.on_tokens(name, tokens)


class ManualClock:
    """A clock whose time `now` (seconds) the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def full_admission(clock: ManualClock, count: int = 8, **settings: Any) -> Admission:
    """Return an admission with `count` running requests. Each may generate 100 tokens, and got 10 tokens in the first
    second. By default the requests fill all 8 slots.
    """
    admission = Admission(config(**settings), clock)
    admission.on_gang_up(PLENTY)
    for i in range(count):
        admit(admission, f"r{i}")
    for _ in range(10):
        clock.now += 0.1
        for i in range(count):
            give_tokens(admission, f"r{i}", 1)
    return admission


@pytest.mark.parametrize(("max_queue_wait_s", "admitted_count"), [(5.0, 8), (30.0, 24), (600.0, 200)])
def test_unmeasured_admission_queues_as_many_as_a_slow_server_would_serve(
    max_queue_wait_s: float, admitted_count: int
) -> None:
    admission = Admission(config(max_queue_wait_s=max_queue_wait_s), ManualClock())  # 8 slots
    admission.on_gang_up(PLENTY)
    for i in range(200):
        if admission.overload() is not None:
            assert i == admitted_count
            return
        admit(admission, f"r{i}")
    assert admitted_count == 200


def test_admission_estimates_the_wait_before_any_request_has_ended() -> None:
    clock = ManualClock()
    admission = full_admission(clock)
    assert admission.expected_wait(1).seconds == pytest.approx(9.0, rel=0.2)  # 90 of 100 tokens are left
    overload = admission.overload()
    assert overload is not None
    assert overload.retry_after_s == pytest.approx(9.0, rel=0.2)
    assert str(overload) == (
        "the first token would come after about 9.0 s; the limit is 7 s, 0.7 of max_queue_wait_s (10 s)"
    )
    overload_at_least_limit = full_admission(ManualClock(), max_queue_wait_s=0.5).overload()
    assert str(overload_at_least_limit).endswith("the limit is 1 s, the least for any max_queue_wait_s (0.5 s)")
    assert full_admission(ManualClock(), max_queue_wait_s=20.0).overload() is None


def test_admission_bounds_queued_tokens() -> None:
    admission = Admission(config(max_queued_tokens=500), ManualClock())
    admission.check(request("huge", prompt=2000))  # an empty queue admits any request
    admit(admission, "r0", prompt=390, max_tokens=10)
    admission.check(request("fits", prompt=50, max_tokens=10))
    with pytest.raises(Overloaded, match="max_queued_tokens is 500"):
        admission.check(request("does not", prompt=100, max_tokens=10))


def test_admission_state_is_empty_after_all_requests_ended() -> None:
    clock = ManualClock()
    admission = full_admission(clock)
    admit(admission, "leaves before its first token")
    assert admission.waiting == 1
    for name in (*(f"r{i}" for i in range(8)), "leaves before its first token"):
        admission.on_ended(name, stopped=False)
    assert admission.waiting == 0
    assert (admission.queued_tokens, admission.expected_wait(1).seconds, admission.overload()) == (0.0, 0.0, None)
    admission.on_ended("nobody", stopped=True)
    admission.on_tokens("nobody", 3)


def test_request_that_ends_without_a_token_leaves_the_queue_once() -> None:
    admission = Admission(config(), ManualClock())
    admission.on_gang_up(PLENTY)
    admit(admission, "waits")
    for name in ("scored", "aborted"):
        admit(admission, name, max_tokens=0)
        give_tokens(admission, name, 0)
        admission.on_ended(name, stopped=False)
    assert admission.waiting == 1


def test_admission_gives_no_overload_while_the_gang_is_down() -> None:
    clock = ManualClock()
    admission = full_admission(clock)
    admission.on_gang_down()
    clock.now += 100.0
    assert admission.overload() is None
    admission.on_gang_up(PLENTY)
    assert admission.expected_wait(1).seconds == pytest.approx(9.0, rel=0.2)  # the 100 s do not count


def test_outage_does_not_count_towards_the_expected_wait() -> None:
    clock = ManualClock()
    admission = Admission(config(max_running_requests=64), clock)
    admission.on_gang_up(PLENTY)
    for i in range(32):
        admit(admission, f"r{i}")
    clock.now += 0.5
    admission.on_gang_down()
    for i in range(32, 64):
        admit(admission, f"r{i}")
    clock.now += 40.0
    admission.on_gang_up(PLENTY)
    clock.now += 0.5
    for _ in range(50):
        for i in range(64):
            give_tokens(admission, f"r{i}", 2)
        clock.now += 0.1
    assert admission.expected_wait(1).seconds < 1.0  # all slots are taken, but their requests end soon
    assert admission.overload() is None


def test_admission_learns_expected_output_lengths() -> None:
    clock = ManualClock()
    admission = Admission(config(), clock)
    assert admission.expected_new_tokens(request("r", max_tokens=4096)) == pytest.approx(PRIOR_TOKENS_PER_STOP)
    for i in range(200):
        admit(admission, f"r{i}", max_tokens=4096)
        clock.now += 0.1
        give_tokens(admission, f"r{i}", 10)
        admission.on_ended(f"r{i}", stopped=True)
    assert admission.expected_new_tokens(request("r", max_tokens=4096)) == pytest.approx(10.0, rel=0.7)
