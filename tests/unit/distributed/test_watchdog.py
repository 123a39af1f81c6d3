"""The watchdog's wait for a device: which rank it blames when the wait is too long, and after what time."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.device.wait_hook import wait_for_device, wait_hook_set
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

LIMIT_S = 0.4


class Timer:
    """A fake timer of a device. The device has reached the first `reached_count` of the `marked_count` moments; it has
    reached the last one too once `has_ended` returns True.
    """

    def __init__(self, has_ended: Callable[[], bool] = lambda: False) -> None:
        self.marked_count, self.reached_count, self._has_ended = 0, 0, has_ended

    def now(self) -> int:
        self.marked_count += 1
        return self.marked_count

    def between(self, start: int, end: int) -> float:
        return 0.0

    def make_current(self) -> None:
        self.thread = threading.get_native_id()

    def reached(self, moment: int) -> bool:
        return moment <= self.reached_count or (moment == self.marked_count and self._has_ended())


class FakeHeartbeatMonitor:
    """A fake heartbeat monitor. From its creation on, `silent_ranks` send no heartbeats, and `stalled_ranks` send
    heartbeats without progress. Without `store_answers`, the store does not answer either.
    """

    def __init__(
        self,
        world: int,
        silent_ranks: tuple[int, ...] = (),
        stalled_ranks: tuple[int, ...] = (),
        store_answers: bool = True,
    ) -> None:
        self.alarm, self._silent_ranks, self._stalled_ranks, self._store_answers = (
            threading.Event(),
            silent_ranks,
            stalled_ranks,
            store_answers,
        )
        now = time.monotonic()
        self._heartbeats = [PeerHeartbeat(now, now, 1, 4, "target", 10 + rank) for rank in range(world)]
        self._started_at = now

    @property
    def store_answered_at(self) -> float:
        return time.monotonic() if self._store_answers else self._started_at

    @property
    def peer_heartbeats(self) -> list[PeerHeartbeat]:
        now = time.monotonic()
        for rank, heartbeat in enumerate(self._heartbeats):
            if self._store_answers and rank not in self._silent_ranks:
                heartbeat.received_at = now
                heartbeat.last_progress_at = heartbeat.last_progress_at if rank in self._stalled_ranks else now
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
    published.clear()
    world = 1 if monitor is None else len(monitor._heartbeats)
    heartbeat_monitor: Any = monitor
    mesh = RecordingMesh(
        rank, Axis(rank, world, clock=ProgressClock()), position=(4, "target"), heartbeat_monitor=heartbeat_monitor
    )
    watchdog = DeviceWatchdog(mesh, timer)
    watchdog.start_serving(LIMIT_S)
    return watchdog


def wait_error(watchdog: DeviceWatchdog) -> Any:
    """Return the error that ends the watchdog's wait. It must come after about the limit."""
    started_at = time.monotonic()
    with pytest.raises((PeerLostError, StuckDeviceError)) as raised:
        watchdog.wait(watchdog.mark())
    assert LIMIT_S / 2 < time.monotonic() - started_at < LIMIT_S + 2
    assert not watchdog._clock.waits_for_device
    return raised.value


def test_silent_rank_is_blamed_while_other_ranks_progress() -> None:
    error = wait_error(start_watchdog(0, FakeHeartbeatMonitor(3, silent_ranks=(2,)), Timer()))
    assert error.rank == 2 and "rank 2 has given no sign for 0." in str(error) and "watchdog_timeout_s" in str(error)
    assert "its last in step 4, phase target" in str(error) and published[0].blamed_rank == 2


def test_rank_0_is_blamed_when_the_store_does_not_answer() -> None:
    error = wait_error(start_watchdog(1, FakeHeartbeatMonitor(3, store_answers=False), Timer()))
    assert error.rank == 0 and "store have not answered" in str(error)


def test_rank_furthest_behind_is_blamed_when_all_ranks_wait() -> None:
    error = wait_error(start_watchdog(2, FakeHeartbeatMonitor(3, stalled_ranks=(0, 1)), Timer()))
    assert isinstance(error, StuckDeviceError) and error.rank == 2 and published == []  # rank 2's own device is behind
    timer = Timer()
    watchdog = start_watchdog(2, FakeHeartbeatMonitor(3, stalled_ranks=(0, 1)), timer)
    for _ in range(20):
        watchdog._clock.mark()
    timer.reached_count = 20
    error = wait_error(watchdog)
    assert isinstance(error, PeerLostError) and error.rank == 0 and "furthest behind" in str(error)


def test_single_rank_watchdog_raises_stuck_device_error_after_the_limit() -> None:
    error = wait_error(start_watchdog(0, None, Timer()))
    assert isinstance(error, StuckDeviceError) and "the device of rank 0 has done nothing for 0." in str(error)


@pytest.mark.parametrize("peer_progresses", [True, False])
def test_no_rank_is_blamed_while_a_device_or_a_peer_progresses(peer_progresses: bool) -> None:
    done_at = time.monotonic() + 3 * LIMIT_S
    timer = Timer(lambda: time.monotonic() > done_at)
    watchdog = start_watchdog(0, FakeHeartbeatMonitor(2, stalled_ranks=() if peer_progresses else (1,)), timer)
    for _ in range(2000):
        watchdog._clock.mark()

    def advance_device() -> None:
        while time.monotonic() < done_at:
            timer.reached_count += not peer_progresses
            time.sleep(LIMIT_S / 20)

    thread = threading.Thread(target=advance_device)
    thread.start()
    watchdog.wait(watchdog.mark())
    thread.join()
    assert time.monotonic() > done_at and published == []


def test_alarm_ends_the_device_wait_immediately() -> None:
    monitor = FakeHeartbeatMonitor(3)
    watchdog = start_watchdog(0, monitor, Timer())
    watchdog.limit_s = 60.0
    threading.Timer(0.1, monitor.alarm.set).start()
    started_at = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 2 left: a peer left while"):
        watchdog.wait(watchdog.mark())
    assert time.monotonic() - started_at < 2


def test_watchdog_of_a_delayed_process_blames_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sleep of the process lasts longer than `MAX_POLL_GAP_S`. The device ends after 1.5 limits."""
    monkeypatch.setattr(watchdog_module, "MAX_POLL_GAP_S", LIMIT_S / 4)
    done_at = time.monotonic() + LIMIT_S * 1.5
    timer = Timer(lambda: time.monotonic() > done_at)
    watchdog = start_watchdog(0, None, timer)
    monkeypatch.setattr(time, "sleep", lambda seconds, original_sleep=time.sleep: original_sleep(LIMIT_S / 2))
    watchdog.wait(watchdog.mark())
    assert time.monotonic() > done_at and published == []


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


def test_wait_for_device_uses_the_watchdog_hook() -> None:
    wait_for_device()  # without a hook
    watchdog = start_watchdog(0, FakeHeartbeatMonitor(3, silent_ranks=(2,)), Timer())
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


def test_watchdog_selects_the_device_once_per_thread() -> None:
    """Each thread has its own current CUDA device, and the thread that loads is not the thread that steps."""
    timer = Timer()
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
