"""The settings for NCCL, the meaning of its errors, the time limit of an abort, and the warm-up of collectives."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.config import ConfigError
from cluster.distributed import nccl
from cluster.distributed.process_group import Axis
from cluster.distributed.progress import ProgressClock

HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"


def test_nccl_settings_are_variables_that_torch_reads() -> None:
    text = HEADER.read_text()
    for name in (*nccl.SETTINGS, *nccl.OLD_VARIABLE_NAMES):
        assert f'"{name}"' in text, name
    assert "NoHandling = 0" in text


def test_nccl_settings_are_applied_and_conflicting_values_are_refused() -> None:
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    nccl.disable_torch_supervision(environment)
    assert environment == nccl.SETTINGS
    for name in (*nccl.SETTINGS, *nccl.OLD_VARIABLE_NAMES):
        with pytest.raises(ConfigError, match=f"{name} is 1 .* needs 0; unset it"):
            nccl.disable_torch_supervision({name: "1"})


@pytest.mark.parametrize(
    ("text", "expected_advice"),
    [
        ("NCCL error: remote process exited or there was a network error, ncclRemoteError", "a peer or the network"),
        ("NCCL error in ProcessGroupNCCL.cpp: unhandled system error, ncclSystemError: x", "NCCL_SOCKET_IFNAME"),
        ("NCCL error: ncclInvalidUsage: Duplicate GPU detected: rank 0 and rank 1 both on CUDA", "give each its own"),
        ("NCCL communicator was aborted on rank 1.", "a peer has left"),
        ("[Rank 0] Watchdog caught collective operation timeout: NCCL work timed out", "did not come"),
        ("[gloo/transport/tcp/pair.cc] Connection closed by peer, timed out", ""),
    ],
)
def test_nccl_advice_explains_nccl_errors_only(text: str, expected_advice: str) -> None:
    advice = nccl.advice(text)
    assert expected_advice in advice and bool(expected_advice) == bool(advice)


def test_collective_errors_and_device_errors_are_distinguished() -> None:
    nccl_error, gloo_error = dist.DistBackendError("NCCL error: x"), RuntimeError("[gloo/pair.cc] closed")
    cuda_error, memory_error = (
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        torch.OutOfMemoryError("CUDA"),
    )
    assert [nccl.is_collective_error(error) for error in (nccl_error, gloo_error, cuda_error, memory_error)] == [
        True,
        True,
        False,
        False,
    ]
    assert [nccl.is_device_error(error) for error in (nccl_error, gloo_error, cuda_error, memory_error)] == [
        False,
        False,
        True,
        False,
    ]


class FakeGroup:
    """A fake process group whose `abort` is `call`."""

    def __init__(self, call: Any) -> None:
        self.abort = call


def raises() -> None:
    raise RuntimeError("NCCL communicator was aborted")


def test_hanging_abort_does_not_block_other_communicators() -> None:
    """Both aborts begin although the first does not end, because the first may wait for the second."""
    ended, forever = threading.Event(), threading.Event()
    began = time.monotonic()
    assert not nccl.abort([FakeGroup(forever.wait), FakeGroup(ended.set)], timeout_s=0.2)
    assert ended.is_set() and time.monotonic() - began < nccl.ABORT_TIMEOUT_S
    forever.set()
    assert nccl.abort([FakeGroup(raises), FakeGroup(ended.set)]) and nccl.abort([])


def test_abort_drops_graphs_while_communicators_wait_for_the_drop() -> None:
    """NCCL's abort waits until graphs with its collectives are dropped. The drop may wait until the abort begins."""
    abort_started, dropped = threading.Event(), threading.Event()

    def abort() -> None:
        abort_started.set()
        dropped.wait()

    def drop() -> None:
        abort_started.wait()
        dropped.set()

    assert nccl.abort([FakeGroup(abort), FakeGroup(abort)], drop, 60.0)
    dropped.clear()
    assert not nccl.abort([FakeGroup(abort)], timeout_s=0.2)
    dropped.set()


class NeverReachedTimer:
    """A fake timer of a device that never reaches a moment."""

    def now(self) -> int:
        return 0

    def between(self, start: int, end: int) -> float:
        return 0.0

    def reached(self, moment: int) -> bool:
        return False


class RecordingAxis(Axis):
    """A fake axis that adds the name of each collective to `entered_collectives`."""

    def __getattribute__(self, name: str) -> Any:
        if name not in COLLECTIVES:
            return super().__getattribute__(name)
        entered_collectives.append(name)
        return lambda *args: torch.zeros(1)


COLLECTIVES = ("all_reduce", "all_to_all", "broadcast", "gather", "reduce_scatter")
entered_collectives: list[str] = []


def test_warm_up_runs_every_collective_once_and_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered_collectives.clear()
    nccl.warm_up([RecordingAxis(0, 2), RecordingAxis(0, 1)], torch.device("cpu"))
    assert tuple(sorted(entered_collectives)) == COLLECTIVES
    monkeypatch.setattr(nccl, "WARM_UP_TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match=r"communicator of 2 ranks gave no sum .* NCCL_SOCKET_IFNAME"):
        nccl.warm_up([RecordingAxis(0, 2, timer=NeverReachedTimer())], torch.device("cpu"))


def test_progress_clock_counts_marks_that_the_device_has_passed() -> None:
    clock = ProgressClock()
    clock.mark_layer()
    assert (clock.poll_device(), clock.progress_count) == (0, 1)  # a CPU is never behind its host

    class DelayedTimer(NeverReachedTimer):
        """A fake timer of a device that has reached the first `reached_count` moments."""

        reached_count = 0

        def __init__(self) -> None:
            self.marked_count = 0

        def now(self) -> int:
            self.marked_count += 1
            return self.marked_count

        def reached(self, moment: int) -> bool:
            return moment <= self.reached_count

    timer = clock.device_timer = DelayedTimer()
    clock.end(clock.begin(timer), timer)
    clock.mark_layer()
    assert (timer.marked_count, clock.poll_device()) == (3, 0)
    timer.reached_count = 2
    assert (clock.poll_device(), clock.poll_device(), clock.progress_count) == (2, 2, 6)
    clock.waits_for_device = True
    assert clock.is_waiting
