"""Requests begin one after another, with pauses between them while no core of the machine is idle."""

import asyncio
import os
from pathlib import Path

import pytest

from cluster.api.proxy.throttle import (
    BEGIN_S,
    CHECK_S,
    CPU_SHARE,
    MAX_PAUSE_S,
    REFUSE_S,
    SATURATED_S,
    CpuLoad,
    Throttle,
    pause_s,
)
from tests.support.simulated_time import SimulatedTimeLoop


class FakeMachine:
    """A fake machine of two cores. Its CPU counters are in the file `stat`; one tick is a hundredth of a second."""

    def __init__(self, folder: Path) -> None:
        self.stat = folder / "stat"
        self.now = 0.0
        self._busy = self._idle = self._disk = 0
        self.advance(1.0, busy=0.0)

    def advance(self, seconds: float, busy: float, disk: float = 0.0) -> None:
        """Advance the time. The cores work for the share `busy` of it and wait for a disk for the share `disk`."""
        ticks = round(seconds * 200)
        self._busy, self._disk = self._busy + round(ticks * busy), self._disk + round(ticks * disk)
        self._idle += ticks - round(ticks * busy) - round(ticks * disk)
        self.now += seconds
        self.stat.write_text(f"cpu  {self._busy} 0 0 {self._idle} {self._disk} 0 0 0 9 9\ncpu0 0 0 0 0 0 0 0 0 0 0\n")

    def cpu_load(self) -> CpuLoad:
        return CpuLoad(self.stat, lambda: self.now)


def test_cpu_is_saturated_when_no_core_was_idle(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    cpu_load = machine.cpu_load()
    assert not cpu_load.saturated()
    for busy, disk, full in ((1.0, 0.0, True), (0.5, 0.0, False), (0.9, 0.0, True), (0.5, 0.5, False)):
        machine.advance(SATURATED_S, busy, disk)
        assert cpu_load.saturated() is full


def test_saturated_cpu_counts_as_saturated_for_a_second(tmp_path: Path) -> None:
    """Otherwise a short idle time would let a burst of requests begin at once."""
    machine = FakeMachine(tmp_path)
    cpu_load = machine.cpu_load()
    cpu_load.saturated()
    machine.advance(CHECK_S, busy=1.0)
    assert cpu_load.saturated()
    machine.advance(SATURATED_S * 0.9, busy=0.0)
    assert cpu_load.saturated()
    machine.advance(SATURATED_S * 0.2, busy=0.0)
    assert not cpu_load.saturated()


def test_cpu_counters_are_read_once_per_check_interval(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    cpu_load = machine.cpu_load()
    assert not cpu_load.saturated()
    machine.advance(CHECK_S / 2, busy=1.0)
    assert not cpu_load.saturated()
    machine.advance(CHECK_S / 2, busy=1.0)
    assert cpu_load.saturated()


@pytest.mark.parametrize("text", [None, "", "cpu a b c d e f g h\n"])
def test_cpu_is_never_saturated_without_readable_counters(tmp_path: Path, text: str | None) -> None:
    machine = FakeMachine(tmp_path)
    machine.stat.unlink() if text is None else machine.stat.write_text(text)
    cpu_load = machine.cpu_load()
    for _ in range(3):
        machine.now += 1.0
        assert not cpu_load.saturated()


def test_cpu_counters_of_this_machine_are_readable() -> None:
    assert CpuLoad()._read_ticks() is not None


def test_pause_keeps_request_starts_within_an_eighth_of_the_cpus() -> None:
    assert pause_s(0, 2) == pytest.approx(0.024)
    assert pause_s(0, 64) == pytest.approx(0.024 / 32)
    assert pause_s(100_000, 2) == pytest.approx(0.036)
    assert pause_s(1 << 20, 2) == MAX_PAUSE_S


class FakeCpuLoad(CpuLoad):
    def __init__(self, full: bool) -> None:
        super().__init__()
        self._full = full

    def saturated(self) -> bool:
        return self._full


def begin_times(full: bool, charged: bool = True) -> list[float]:
    """The times at which four requests that come at once begin, in seconds after the first. The pause after a charged
    request is `MAX_PAUSE_S`.
    """

    async def all_begin() -> list[float]:
        throttle, times = Throttle(FakeCpuLoad(full)), []
        clock = asyncio.get_running_loop().time

        async def start_request() -> None:
            await throttle.wait()
            times.append(clock())
            if charged:
                throttle.on_begin(1 << 30)

        await asyncio.gather(*(start_request() for _ in range(4)))
        return [each - times[0] for each in times]

    return asyncio.run(all_begin())


def test_requests_on_a_saturated_cpu_begin_with_pauses_between() -> None:
    for turn, at in enumerate(begin_times(full=True)):
        assert at >= turn * MAX_PAUSE_S * 0.99


@pytest.mark.parametrize(("full", "charged"), [(False, True), (True, False)])
def test_no_pause_on_an_idle_cpu_or_after_a_request_that_did_not_begin(full: bool, charged: bool) -> None:
    assert begin_times(full, charged)[-1] < 3 * MAX_PAUSE_S


def test_interrupt_ends_all_waits_and_preserves_their_order() -> None:
    """A cancelled request does not begin, and delays no other request."""

    async def all_wait() -> list[tuple[int, bool]]:
        throttle, wait_results = Throttle(FakeCpuLoad(True)), []

        async def wait_for_turn(number: int) -> None:
            while not (turn := await throttle.wait()):
                wait_results.append((number, turn))
            wait_results.append((number, turn))

        assert await throttle.wait()
        throttle.on_begin(1 << 30)
        tasks = [asyncio.ensure_future(wait_for_turn(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        throttle.interrupt()
        await asyncio.sleep(MAX_PAUSE_S / 10)
        assert wait_results == [(0, False), (2, False), (3, False)]
        tasks[2].cancel()
        await asyncio.wait(tasks)
        return wait_results

    assert asyncio.run(all_wait())[3:] == [(0, True), (3, True)]


def test_refused_request_lets_the_next_request_begin_sooner() -> None:
    """Three requests are refused as soon as they begin, so the fourth begins after three pauses for `REFUSE_S`."""

    async def all_begin() -> float:
        turns = Throttle(FakeCpuLoad(True))
        clock = asyncio.get_running_loop().time
        start_time = clock()
        for refused in (True, True, True, False):
            assert await turns.wait()
            turns.on_begin(0)
            if refused:
                asyncio.get_running_loop().call_soon(turns.on_refused)  # while the next one waits
        return clock() - start_time

    pause = pause_s(0, os.cpu_count() or 1)
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        assert runner.run(all_begin()) == pytest.approx(3 * pause * REFUSE_S / BEGIN_S, rel=0.01)


class RefusedAtOnce(Throttle):
    """A throttle that gets a refusal of an earlier request each time it has let a request begin, before that request
    calls `on_begin`.
    """

    def _begin_next(self) -> None:
        super()._begin_next()
        self.on_refused()


def test_refusal_before_on_begin_does_not_skip_a_pause() -> None:
    """Each request waits for a pause after the previous request, even if its start was scheduled early."""

    async def all_begin() -> list[float]:
        turns, times = RefusedAtOnce(FakeCpuLoad(True)), []
        clock = asyncio.get_running_loop().time

        async def one() -> None:
            await turns.wait()
            times.append(clock())
            turns.on_begin(1 << 30)

        await asyncio.gather(*(one() for _ in range(3)))
        return [each - times[0] for each in times]

    longest = MAX_PAUSE_S - (BEGIN_S - REFUSE_S) / (CPU_SHARE * (os.cpu_count() or 1))
    for turn, at in enumerate(asyncio.run(all_begin())):
        assert at >= turn * longest * 0.9
