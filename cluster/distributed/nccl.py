"""NCCL under our own supervision: what torch must leave alone, communicators that are ready before a capture, how they
end, and what their errors mean.

The facts about torch are those of its headers and docstrings (`ProcessGroupNCCL.hpp`, `_abort_process_group`).
"""

import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from cluster.config import ConfigError
from cluster.distributed.process_group import Axis

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""What torch's own supervision must not do here.

ASYNC_ERROR_HANDLING is 3 by default: torch's watchdog tears the process down when a collective fails or is late, before
this rank has said why; and it does not see replayed collectives at all. With MONITORING, the default, a second thread
aborts the process when that watchdog stands still, as it may behind a device that hangs. With RETHROW_CUDA_ERRORS, the
default, the watchdog throws what CUDA says after an abort in a thread where nobody catches it, which ends the process.
With BLOCKING_WAIT each collective blocks the host, which then can neither capture nor look at its peers.
"""
OLD_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
}
ABORT_S = 1.0  # after which communicators that do not end are left to the end of the process
WARM_S = 120.0

ADVICE = (
    ("Duplicate GPU", "two ranks use one GPU: give each its own"),
    ("ncclRemoteError", "the process of a peer or the network to it is gone"),
    ("remote process exited", "the process of a peer or the network to it is gone"),
    ("ncclSystemError", "a call of the system failed: is NCCL_SOCKET_IFNAME an interface that all nodes reach, is "
     "/dev/shm large enough? NCCL_DEBUG=INFO says which"),
    ("ncclInvalidUsage", "ranks differ in NCCL's version or in their devices; NCCL_DEBUG=INFO says more"),
    ("ncclInvalidArgument", "ranks differ in NCCL's version or in their devices; NCCL_DEBUG=INFO says more"),
    ("ncclUnhandledCudaError", "a call of CUDA failed inside NCCL, often for memory; NCCL_DEBUG=INFO says which"),
    ("unhandled cuda error", "a call of CUDA failed inside NCCL, often for memory; NCCL_DEBUG=INFO says which"),
    ("ncclInternalError", "a fault of NCCL; NCCL_DEBUG=INFO says more"),
    ("communicator was aborted", "a peer has left, and took its communicators with it"),
    ("timed out", "a peer did not come to the same call; its log has the cause"),
    ("Timeout", "a peer did not come to the same call; its log has the cause"),
)  # fmt: skip
"""What to do about an error, by a word of its text, the most telling first."""


def settle(environment: MutableMapping[str, str]) -> None:
    """Set what torch reads when it makes a communicator.

    Raises:
        ConfigError: it is set already, to something else.
    """
    for name, value in SETTINGS.items():
        for given in (name, *(old for old, new in OLD_NAMES.items() if new == name)):
            if environment.get(given, value) != value:
                raise ConfigError(
                    f"{given} is {environment[given]} in the environment, and NCCL under the gang's own supervision "
                    f"needs {value}; unset it"
                )
        environment[name] = value


def warm(axes: Sequence[Axis], device: torch.device) -> None:
    """Run each kind of collective once on every axis, so that nothing is connected during a capture, and wait for it.

    Raises:
        RuntimeError: a communicator does not work; the message names the axis by its size.
    """
    for axis in axes:
        if axis.size == 1:
            continue
        one = torch.ones(axis.size, 1, device=device)
        axis.all_reduce(one.clone())
        axis.gather(one[:1], [1] * axis.size)
        axis.reduce_scatter(one, [1] * axis.size)
        axis.all_to_all(one, [1] * axis.size, [1] * axis.size)
        axis.broadcast(one[:1].clone())
        ended, until = axis.timer.now(), time.monotonic() + WARM_S
        while not axis.timer.reached(ended):
            if time.monotonic() > until:
                raise RuntimeError(
                    f"NCCL's communicator of {axis.size} ranks gave no sum within {WARM_S:g} s; is NCCL_SOCKET_IFNAME "
                    "an interface that all nodes reach? NCCL_DEBUG=INFO says how far it came"
                )
            time.sleep(1e-3)


def abort(groups: Sequence[Any], drop: Callable[[], object] = lambda: None, seconds: float = ABORT_S) -> bool:
    """Abort communicators, each in a thread of its own, since one may wait for the end of another, and `drop` graphs
    that hold their collectives; returns after `seconds` at the latest, and whether all have ended.

    NCCL tells the device at once to leave its collectives, and then waits until the last such graph is destroyed
    (`commDestroySync` in its init.cc). A graph under way may be destroyed only when the device has left it, so neither
    is to wait for the other here.
    """
    threads = [threading.Thread(target=_quietly, args=(group.abort,), daemon=True) for group in groups]
    for thread in (*threads, threading.Thread(target=drop, daemon=True)):
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError:  # what it says of a communicator that is broken is why it is aborted
        return


def advice(text: str) -> str:
    """What to do about an error of NCCL, in brackets; nothing about others."""
    found = next((words for sign, words in ADVICE if sign in text), "")
    return f" ({found})" if found and ("NCCL" in text or "nccl" in text) else ""


def of_collectives(error: BaseException) -> bool:
    """Whether an error can come from nothing but collectives: gloo's and NCCL's."""
    text = str(error)
    return isinstance(error, torch.distributed.DistError) or any(word in text for word in ("gloo", "NCCL", "nccl"))


def of_device(error: BaseException) -> bool:
    """Whether a device says so: CUDA tells of an abort amid a replay, and of a peer's memory that is gone, with the
    next call, whatever that is for.
    """
    device = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
    return device and not isinstance(error, torch.OutOfMemoryError)
