"""What is settled for NCCL, what its errors mean, and that an abort takes no longer than it may."""

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
    ("text", "words"),
    [
        ("NCCL error: remote process exited or there was a network error, ncclRemoteError", "a peer or the network"),
        ("NCCL error in ProcessGroupNCCL.cpp: unhandled system error, ncclSystemError: x", "NCCL_SOCKET_IFNAME"),
        ("NCCL error: ncclInvalidUsage: Duplicate GPU detected: rank 0 and rank 1 both on CUDA", "give each its own"),
        ("NCCL communicator was aborted on rank 1.", "a peer has left"),
        ("[Rank 0] Watchdog caught collective operation timeout: NCCL work timed out", "did not come"),
        ("[gloo/transport/tcp/pair.cc] Connection closed by peer, timed out", ""),
    ],
)
def test_nccl_advice_explains_nccl_errors_only(text: str, words: str) -> None:
    said = nccl.advice(text)
    assert words in said and bool(words) == bool(said)


def test_collective_errors_and_device_errors_are_distinguished() -> None:
    of_nccl, of_gloo = dist.DistBackendError("NCCL error: x"), RuntimeError("[gloo/pair.cc] closed")
    of_cuda, memory = torch.AcceleratorError("CUDA error: unspecified launch failure"), torch.OutOfMemoryError("CUDA")
    assert [nccl.is_collective_error(error) for error in (of_nccl, of_gloo, of_cuda, memory)] == [
        True,
        True,
        False,
        False,
    ]
    assert [nccl.is_device_error(error) for error in (of_nccl, of_gloo, of_cuda, memory)] == [False, False, True, False]


class Group:
    def __init__(self, call: Any) -> None:
        self.abort = call


def raises() -> None:
    raise RuntimeError("NCCL communicator was aborted")


def test_hanging_abort_does_not_block_other_communicators() -> None:
    """Both begin although the first does not end: it may wait for the second."""
    ended, forever = threading.Event(), threading.Event()
    began = time.monotonic()
    assert not nccl.abort([Group(forever.wait), Group(ended.set)], timeout_s=0.2)
    assert ended.is_set() and time.monotonic() - began < nccl.ABORT_TIMEOUT_S
    forever.set()
    assert nccl.abort([Group(raises), Group(ended.set)]) and nccl.abort([])


def test_abort_drops_graphs_while_communicators_wait_for_the_drop() -> None:
    """As NCCL's does, which waits until the graphs with its collectives are gone; they may wait for it to begin."""
    aborts, dropped = threading.Event(), threading.Event()

    def abort() -> None:
        aborts.set()
        dropped.wait()

    def drop() -> None:
        aborts.wait()
        dropped.set()

    assert nccl.abort([Group(abort), Group(abort)], drop, 60.0)
    dropped.clear()
    assert not nccl.abort([Group(abort)], timeout_s=0.2)
    dropped.set()


class Slow:
    """A timer of a device that comes to nothing."""

    def now(self) -> int:
        return 0

    def between(self, start: int, end: int) -> float:
        return 0.0

    def reached(self, moment: int) -> bool:
        return False


class Warmed(Axis):
    """Notes which collectives were entered."""

    def _note(self, *given: Any) -> torch.Tensor:
        entered.append(1)
        return torch.zeros(1)

    gather = reduce_scatter = all_to_all = all_reduce = broadcast = _note  # type: ignore[assignment]


entered: list[int] = []


def test_warm_up_runs_every_collective_once_and_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered.clear()
    nccl.warm_up([Warmed(0, 2), Warmed(0, 1)], torch.device("cpu"))
    assert len(entered) == 5
    monkeypatch.setattr(nccl, "WARM_UP_TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match=r"communicator of 2 ranks gave no sum .* NCCL_SOCKET_IFNAME"):
        nccl.warm_up([Warmed(0, 2, timer=Slow())], torch.device("cpu"))


def test_progress_clock_counts_marks_that_the_device_has_passed() -> None:
    clock = ProgressClock()
    clock.mark_layer()
    assert (clock.poll_device(), clock.progress_count) == (0, 1)  # a CPU is where its host is

    class Late(Slow):
        come = 0

        def __init__(self) -> None:
            self.noted = 0

        def now(self) -> int:
            self.noted += 1
            return self.noted

        def reached(self, moment: int) -> bool:
            return moment <= self.come

    timer = clock.device_timer = Late()
    clock.end(clock.begin(timer), timer)
    clock.mark_layer()
    assert (timer.noted, clock.poll_device()) == (3, 0)
    timer.come = 2
    assert (clock.poll_device(), clock.poll_device(), clock.progress_count) == (2, 2, 6)
    clock.waits_for_device = True
    assert clock.is_waiting
