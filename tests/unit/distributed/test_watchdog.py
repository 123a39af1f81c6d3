"""The watchdog's wait for a device: which rank it blames when the wait is too long, and after what time."""

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.device.wait_hook import wait_for_device, wait_hook_set
from cluster.distributed import errors
from cluster.distributed import watchdog as watchdog_module
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
from tests.parity.harness import SAMPLING, config_of, make_request, tiny_pair

LIMIT_S = 2.0


class FakeClock:
    """A fake of the module `time`. A sleep takes no time, but the clock shows that it took at least `min_sleep_s`."""

    def __init__(self) -> None:
        self.now = self.min_sleep_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, self.min_sleep_s)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake_clock = FakeClock()
    for module in (watchdog_module, errors):
        monkeypatch.setattr(module, "time", fake_clock)
    published.clear()
    return fake_clock


class Timer:
    """A fake timer of a device. The device reaches a moment every `period_s` seconds, and the last one at `ends_at`."""

    def __init__(self, clock: FakeClock, period_s: float = math.inf, ends_at: float = math.inf) -> None:
        self._clock, self._period_s, self._ends_at, self.marked_count = clock, period_s, ends_at, 0

    def now(self) -> int:
        self.marked_count += 1
        return self.marked_count

    def between(self, start: int, end: int) -> float:
        return 0.0

    def make_current(self) -> None:
        self.thread = threading.get_native_id()

    def reached(self, moment: int) -> bool:
        is_last = moment == self.marked_count
        return self._clock.now >= (self._ends_at if is_last else moment * self._period_s)


class FakeHeartbeatMonitor:
    """A fake heartbeat monitor. `silent_ranks` send no heartbeats, and `stalled_ranks` send heartbeats without
    progress. Without `store_answers`, the store does not answer either. The alarm is set at `alarm_at`.
    """

    def __init__(
        self,
        clock: FakeClock,
        world: int,
        silent_ranks: tuple[int, ...] = (),
        stalled_ranks: tuple[int, ...] = (),
        store_answers: bool = True,
        alarm_at: float = math.inf,
    ) -> None:
        self._clock, self._silent_ranks, self._stalled_ranks = clock, silent_ranks, stalled_ranks
        self._store_answers = store_answers
        self.alarm = SimpleNamespace(is_set=lambda: clock.now >= alarm_at)
        self._heartbeats = [PeerHeartbeat(clock.now, clock.now, 1, 4, "target", 10 + rank) for rank in range(world)]

    @property
    def store_answered_at(self) -> float:
        return self._clock.now if self._store_answers else 0.0

    @property
    def peer_heartbeats(self) -> list[PeerHeartbeat]:
        for rank, heartbeat in enumerate(self._heartbeats):
            if self._store_answers and rank not in self._silent_ranks:
                heartbeat.received_at = self._clock.now
                if rank not in self._stalled_ranks:
                    heartbeat.last_progress_at = self._clock.now
        return self._heartbeats

    def set_limit(self, limit_s: float) -> None:
        """Do nothing: this fake sends no heartbeats itself."""


class RecordingMesh(Mesh):
    """A mesh that records the published exit reasons in `published`. It explains every cause by the loss of rank 2."""

    def publish_exit_reason(self, exit_reason: ExitReason) -> None:
        published.append(exit_reason)

    def explain(self, cause: str) -> PeerLostError:
        return PeerLostError(f"rank 2 left: {cause}", 2, *self.position)


published: list[ExitReason] = []


def start_watchdog(rank: int, monitor: FakeHeartbeatMonitor | None, timer: Timer) -> DeviceWatchdog:
    """Return the started watchdog of `rank`. Without a monitor, the rank is alone."""
    world = 1 if monitor is None else len(monitor._heartbeats)
    heartbeat_monitor: Any = monitor
    mesh = RecordingMesh(
        rank, Axis(rank, world, clock=ProgressClock()), position=(4, "target"), heartbeat_monitor=heartbeat_monitor
    )
    watchdog = DeviceWatchdog(mesh, timer)
    watchdog.start_serving(LIMIT_S)
    return watchdog


def wait_error(watchdog: DeviceWatchdog, clock: FakeClock) -> Any:
    """Return the error that ends the watchdog's wait. It must come soon after the limit."""
    started_at = clock.now
    with pytest.raises((PeerLostError, StuckDeviceError)) as raised:
        watchdog.wait(watchdog.mark())
    assert LIMIT_S < clock.now - started_at < LIMIT_S + 0.01
    assert not watchdog._clock.waits_for_device
    return raised.value


def test_silent_rank_is_blamed_while_other_ranks_progress(clock: FakeClock) -> None:
    error = wait_error(start_watchdog(0, FakeHeartbeatMonitor(clock, 3, silent_ranks=(2,)), Timer(clock)), clock)
    assert error.rank == 2 and "rank 2 has given no sign for 2.0 s" in str(error) and "watchdog_timeout_s" in str(error)
    assert "its last in step 4, phase target" in str(error) and published[0].blamed_rank == 2


def test_rank_0_is_blamed_when_the_store_does_not_answer(clock: FakeClock) -> None:
    error = wait_error(start_watchdog(1, FakeHeartbeatMonitor(clock, 3, store_answers=False), Timer(clock)), clock)
    assert error.rank == 0 and "store have not answered" in str(error)


def test_rank_furthest_behind_is_blamed_when_all_ranks_wait(clock: FakeClock) -> None:
    monitor = FakeHeartbeatMonitor(clock, 3, stalled_ranks=(0, 1))
    error = wait_error(start_watchdog(2, monitor, Timer(clock)), clock)
    assert isinstance(error, StuckDeviceError) and error.rank == 2 and published == []  # rank 2's own device is behind
    monitor, timer = FakeHeartbeatMonitor(clock, 3, stalled_ranks=(0, 1)), Timer(clock, period_s=0.0)
    watchdog = start_watchdog(2, monitor, timer)
    for _ in range(20):
        watchdog._clock.mark()
    error = wait_error(watchdog, clock)
    assert isinstance(error, PeerLostError) and error.rank == 0 and "furthest behind" in str(error)


def test_single_rank_watchdog_raises_stuck_device_error_after_the_limit(clock: FakeClock) -> None:
    error = wait_error(start_watchdog(0, None, Timer(clock)), clock)
    assert isinstance(error, StuckDeviceError) and "the device of rank 0 has done nothing for 2.0 s" in str(error)


@pytest.mark.parametrize("peer_progresses", [True, False])
def test_no_rank_is_blamed_while_a_device_or_a_peer_progresses(peer_progresses: bool, clock: FakeClock) -> None:
    timer = Timer(clock, math.inf if peer_progresses else LIMIT_S * 0.9, ends_at=3 * LIMIT_S)
    watchdog = start_watchdog(0, FakeHeartbeatMonitor(clock, 2, stalled_ranks=() if peer_progresses else (1,)), timer)
    for _ in range(10):
        watchdog._clock.mark()
    watchdog.wait(watchdog.mark())
    assert 3 * LIMIT_S <= clock.now < 3 * LIMIT_S + 0.01 and published == []


def test_alarm_ends_the_device_wait_immediately(clock: FakeClock) -> None:
    watchdog = start_watchdog(0, FakeHeartbeatMonitor(clock, 3, alarm_at=0.1), Timer(clock, ends_at=LIMIT_S))
    with pytest.raises(PeerLostError, match="rank 2 left: a peer left while"):
        watchdog.wait(watchdog.mark())
    assert 0.1 <= clock.now < 0.11


def test_watchdog_of_a_delayed_process_blames_no_rank(clock: FakeClock) -> None:
    """Every sleep of the process lasts longer than `MAX_POLL_GAP_S`."""
    clock.min_sleep_s = watchdog_module.MAX_POLL_GAP_S * 1.1
    watchdog = start_watchdog(0, None, Timer(clock, ends_at=3 * LIMIT_S))
    watchdog.wait(watchdog.mark())
    assert clock.now >= 3 * LIMIT_S and published == []


def test_rank_at_fault_prefers_a_rank_with_its_own_failure() -> None:
    own_failure, reason_without_blame, blames_rank_2 = (
        ExitReason(1, "ValueError"),
        ExitReason(None, "closed"),
        ExitReason(2, "rank 2 has given no sign"),
    )
    assert rank_at_fault({}) is None and rank_at_fault({0: reason_without_blame}) is None
    assert rank_at_fault({0: blames_rank_2, 1: own_failure}) == ExitReason(1, "rank 1 left: ValueError")
    assert rank_at_fault({0: reason_without_blame, 3: blames_rank_2}) == ExitReason(
        2, "rank 2 has given no sign (so rank 3)"
    )


def test_run_with_timeout_abandons_a_blocking_call() -> None:
    forever = threading.Event()
    assert not run_with_timeout(forever.wait, 0.05) and run_with_timeout(lambda: None, 5.0)
    forever.set()


def test_wait_for_device_uses_the_watchdog_hook(clock: FakeClock) -> None:
    wait_for_device()  # without a hook
    watchdog = start_watchdog(0, FakeHeartbeatMonitor(clock, 3, silent_ranks=(2,)), Timer(clock))
    with wait_hook_set(watchdog.wait_for_device), pytest.raises(PeerLostError, match="rank 2 has given no sign"):
        wait_for_device()
    wait_for_device()


class FakeExitReasons(ExitReasons):
    """Fake exit reasons of two ranks. If `peer_is_gone`, rank 1 has published the end of its process."""

    def __init__(self, peer_is_gone: bool) -> None:
        super().__init__(None, 0, 2)
        self._peer_is_gone = peer_is_gone

    def _publish(self, exit_reason: ExitReason, rank: int) -> None:
        published.append(exit_reason)

    def published_reasons(self) -> dict[int, ExitReason]:
        return {1: ExitReason(1, "its process is gone")} if self._peer_is_gone else {}


@pytest.mark.parametrize(
    ("error", "text_without_reason", "text_with_reason"),
    [
        (RuntimeError("[gloo/pair.cc] Connection closed"), "rank 0 and 1 is gone", "rank 1 left"),
        (dist.DistBackendError("NCCL error: ncclRemoteError"), "rank 0 and 1 is gone", "rank 1 left"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), "", "rank 1 left"),
        (torch.OutOfMemoryError("CUDA out of memory"), "", ""),
        (RuntimeError("a bug"), "", ""),
    ],
)
def test_peer_loss_accepts_only_errors_that_a_lost_peer_can_cause(
    error: RuntimeError, text_without_reason: str, text_with_reason: str
) -> None:
    """The texts are expected in the peer loss without and with an exit reason of rank 1; empty: no peer loss."""
    for peer_is_gone, expected_text in ((False, text_without_reason), (True, text_with_reason)):
        mesh = Mesh(0, Axis(0, 2), _exit_reasons=FakeExitReasons(peer_is_gone))
        loss = mesh.peer_loss(error)
        assert (loss is None) == (not expected_text) and expected_text in str(loss or ""), loss
    assert Mesh().peer_loss(error) is None


def test_heartbeat_monitor_tracks_the_thread_that_runs_steps() -> None:
    """The thread that loaded the engine must not be tracked, because it does nothing afterwards."""
    engine = build_engine(config_of(tiny_pair()[0]))
    heartbeat_monitor: Any = SimpleNamespace(step_thread=StepThread())
    engine.lockstep.mesh.heartbeat_monitor = heartbeat_monitor
    loading_thread, step_thread_ids = heartbeat_monitor.step_thread.thread, list[int]()
    engine.submit(make_request("a", [3, 1, 4], SAMPLING["greedy"], max_tokens=2))

    def run_step() -> None:
        step_thread_ids.append(threading.get_native_id())
        engine.step()

    thread = threading.Thread(target=run_step)
    thread.start()
    thread.join()
    assert [heartbeat_monitor.step_thread.thread] == step_thread_ids != [loading_thread]


def test_watchdog_selects_the_device_once_per_thread(clock: FakeClock) -> None:
    """Each thread has its own current CUDA device, and the thread that loads is not the thread that steps."""
    timer = Timer(clock)
    watchdog = DeviceWatchdog(Mesh(), timer)
    watchdog.use_current_thread()
    assert timer.thread == threading.get_native_id()
    timer.thread = 0
    watchdog.use_current_thread()
    assert timer.thread == 0, "selected twice in one thread"
    other_thread = threading.Thread(target=watchdog.use_current_thread)
    other_thread.start()
    other_thread.join()
    assert timer.thread not in (0, threading.get_native_id())
