"""The wait for a device: whom it blames, and how long it takes to."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.device.wait_hook import wait_for_device, wait_hook_set
from cluster.distributed import watchdog as watches
from cluster.distributed.errors import (
    ExitReason,
    ExitReasons,
    PeerLostError,
    StuckDeviceError,
    rank_at_fault,
    run_with_timeout,
)
from cluster.distributed.heartbeat import PeerHeartbeat, StepThread
from cluster.distributed.mesh import Axis, Mesh
from cluster.distributed.progress import ProgressClock
from cluster.distributed.watchdog import DeviceWatchdog
from cluster.engine import build_engine
from tests.parity.harness import SAMPLING, config_of, request, tiny_pair

LIMIT_S = 0.4


class Timer:
    """A device that has come to `come` of the moments, and to the end when `ends` says so."""

    def __init__(self, ends: Callable[[], bool] = lambda: False) -> None:
        self.noted, self.come, self._ends = 0, 0, ends

    def now(self) -> int:
        self.noted += 1
        return self.noted

    def between(self, start: int, end: int) -> float:
        return 0.0

    def make_current(self) -> None:
        self.thread = threading.get_native_id()

    def reached(self, moment: int) -> bool:
        return moment <= self.come or (moment == self.noted and self._ends())


class Signs:
    """What a herald has heard: `silent` and `still` ranks neither say nor do anything from now on."""

    def __init__(
        self, world: int, silent: tuple[int, ...] = (), still: tuple[int, ...] = (), store: bool = True
    ) -> None:
        self.alarm, self._silent, self._still, self._store = threading.Event(), silent, still, store
        now = time.monotonic()
        self._signs = [PeerHeartbeat(now, now, 1, 4, "target", 10 + rank) for rank in range(world)]
        self._began = now

    @property
    def store_answered_at(self) -> float:
        return time.monotonic() if self._store else self._began

    @property
    def peer_heartbeats(self) -> list[PeerHeartbeat]:
        now = time.monotonic()
        for rank, sign in enumerate(self._signs):
            if self._store and rank not in self._silent:
                sign.received_at = now
                sign.last_progress_at = sign.last_progress_at if rank in self._still else now
        return self._signs

    def set_limit(self, limit_s: float) -> None:
        """Nothing to hurry."""


class Told(Mesh):
    """A mesh that notes what is said."""

    def publish_exit_reason(self, exit_reason: ExitReason) -> None:
        said.append(exit_reason)

    def explain(self, cause: str) -> PeerLostError:
        return PeerLostError(f"rank 2 left: {cause}", 2, *self.position)


said: list[ExitReason] = []


def watch(rank: int, signs: Signs | None, timer: Timer) -> DeviceWatchdog:
    said.clear()
    world = 1 if signs is None else len(signs._signs)
    given: Any = signs
    mesh = Told(rank, Axis(rank, world, clock=ProgressClock()), position=(4, "target"), heartbeat_monitor=given)
    made = DeviceWatchdog(mesh, timer)
    made.start_serving(LIMIT_S)
    return made


def lost(made: DeviceWatchdog) -> Any:
    began = time.monotonic()
    with pytest.raises((PeerLostError, StuckDeviceError)) as caught:
        made.wait(made.mark())
    assert LIMIT_S / 2 < time.monotonic() - began < LIMIT_S + 2
    assert not made._clock.waits_for_device
    return caught.value


def test_silent_rank_is_blamed_while_other_ranks_progress() -> None:
    error = lost(watch(0, Signs(3, silent=(2,)), Timer()))
    assert error.rank == 2 and "rank 2 has given no sign for 0." in str(error) and "watchdog_timeout_s" in str(error)
    assert "its last in step 4, phase target" in str(error) and said[0].blamed_rank == 2


def test_rank_0_is_blamed_when_the_store_does_not_answer() -> None:
    error = lost(watch(1, Signs(3, store=False), Timer()))
    assert error.rank == 0 and "store have not answered" in str(error)


def test_rank_furthest_behind_is_blamed_when_all_ranks_wait() -> None:
    error = lost(watch(2, Signs(3, still=(0, 1)), Timer()))
    assert isinstance(error, StuckDeviceError) and error.rank == 2 and said == []  # its own device passed nothing
    timer = Timer()
    made = watch(2, Signs(3, still=(0, 1)), timer)
    for _ in range(20):
        made._clock.mark()
    timer.come = 20
    error = lost(made)
    assert isinstance(error, PeerLostError) and error.rank == 0 and "furthest behind" in str(error)


def test_single_rank_watchdog_raises_stuck_device_error_after_the_limit() -> None:
    error = lost(watch(0, None, Timer()))
    assert isinstance(error, StuckDeviceError) and "the device of rank 0 has done nothing for 0." in str(error)


@pytest.mark.parametrize("peer", [True, False])
def test_no_rank_is_blamed_while_a_device_or_a_peer_progresses(peer: bool) -> None:
    until = time.monotonic() + 3 * LIMIT_S
    timer = Timer(lambda: time.monotonic() > until)
    made = watch(0, Signs(2, still=() if peer else (1,)), timer)
    for _ in range(2000):
        made._clock.mark()

    def work() -> None:
        while time.monotonic() < until:
            timer.come += not peer
            time.sleep(LIMIT_S / 20)

    thread = threading.Thread(target=work)
    thread.start()
    made.wait(made.mark())
    thread.join()
    assert time.monotonic() > until and said == []


def test_alarm_ends_the_device_wait_immediately() -> None:
    signs = Signs(3)
    made = watch(0, signs, Timer())
    made.limit_s = 60.0
    threading.Timer(0.1, signs.alarm.set).start()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 2 left: a peer left while"):
        made.wait(made.mark())
    assert time.monotonic() - began < 2


def test_watchdog_of_a_delayed_process_blames_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps through ten limits, and its device is done soon after."""
    monkeypatch.setattr(watches, "MAX_POLL_GAP_S", LIMIT_S / 4)
    until = time.monotonic() + LIMIT_S * 1.5
    timer = Timer(lambda: time.monotonic() > until)
    made = watch(0, None, timer)
    monkeypatch.setattr(time, "sleep", lambda seconds, true=time.sleep: true(LIMIT_S / 2))
    made.wait(made.mark())


def test_rank_at_fault_prefers_a_rank_with_its_own_failure() -> None:
    own, seen, other = (
        ExitReason(1, "ValueError"),
        ExitReason(None, "closed"),
        ExitReason(2, "rank 2 has given no sign"),
    )
    assert rank_at_fault({}) is None and rank_at_fault({0: seen}) is None
    assert rank_at_fault({0: other, 1: own}) == ExitReason(1, "rank 1 left: ValueError")
    assert rank_at_fault({0: seen, 3: other}) == ExitReason(2, "rank 2 has given no sign (so rank 3)")


def test_run_with_timeout_abandons_a_blocking_call() -> None:
    forever = threading.Event()
    assert not run_with_timeout(forever.wait, 0.05) and run_with_timeout(lambda: None, 5.0)
    forever.set()


def test_wait_for_device_uses_the_watchdog_hook() -> None:
    wait_for_device()  # nobody watches
    made = watch(0, Signs(3, silent=(2,)), Timer())
    with wait_hook_set(made.wait_for_device), pytest.raises(PeerLostError, match="rank 2 has given no sign"):
        wait_for_device()
    wait_for_device()


class Heard(ExitReasons):
    """Farewells of two ranks, of which rank 1 has left if it is `gone`."""

    def __init__(self, gone: bool) -> None:
        super().__init__(None, 0, 2)
        self._gone = gone

    def _publish(self, exit_reason: ExitReason, rank: int) -> None:
        said.append(exit_reason)

    def published_reasons(self) -> dict[int, ExitReason]:
        return {1: ExitReason(1, "its process is gone")} if self._gone else {}


@pytest.mark.parametrize(
    ("error", "alone", "after"),
    [
        (RuntimeError("[gloo/pair.cc] Connection closed"), "rank 0 and 1 is gone", "rank 1 left"),
        (dist.DistBackendError("NCCL error: ncclRemoteError"), "rank 0 and 1 is gone", "rank 1 left"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), "", "rank 1 left"),
        (torch.OutOfMemoryError("CUDA out of memory"), "", ""),
        (RuntimeError("a bug"), "", ""),
    ],
)
def test_peer_loss_accepts_only_errors_that_a_lost_peer_can_cause(error: RuntimeError, alone: str, after: str) -> None:
    for gone, words in ((False, alone), (True, after)):
        mesh = Mesh(0, Axis(0, 2), _exit_reasons=Heard(gone))
        lost = mesh.peer_loss(error)
        assert (lost is None) == (not words) and words in str(lost or ""), lost
    assert Mesh().peer_loss(error) is None


def test_heartbeat_monitor_tracks_the_thread_that_runs_steps() -> None:
    """Not the one that has loaded the engine, which does nothing from then on."""
    engine = build_engine(config_of(tiny_pair()[0]))
    heartbeat_monitor: Any = SimpleNamespace(step_thread=StepThread())
    engine.lockstep.mesh.heartbeat_monitor = heartbeat_monitor
    loaded, ids = heartbeat_monitor.step_thread.thread, list[int]()
    engine.submit(request("a", [3, 1, 4], SAMPLING["greedy"], max_tokens=2))

    def loop() -> None:
        ids.append(threading.get_native_id())
        engine.step()

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert [heartbeat_monitor.step_thread.thread] == ids != [loaded]


def test_watchdog_selects_the_device_once_per_thread() -> None:
    """CUDA's current device is a thread's own, and the one that loads is another."""
    timer = Timer()
    watch = DeviceWatchdog(Mesh(), timer)
    watch.use_current_thread()
    assert timer.thread == threading.get_native_id()
    timer.thread = 0
    watch.use_current_thread()
    assert timer.thread == 0, "once a thread"
    other = threading.Thread(target=watch.use_current_thread)
    other.start()
    other.join()
    assert timer.thread not in (0, threading.get_native_id())
