"""NCCL without torch's supervision, as the gang (the ranks of one replica) supervises its collectives itself: settings
of torch, warm-up before a capture, aborts, and advice on errors.

The statements about torch come from its headers and docstrings (`ProcessGroupNCCL.hpp`, `_abort_process_group`).
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
"""Parts of torch's own supervision that are switched off. If they were on, they would do the following.

ASYNC_ERROR_HANDLING (default 3): torch's watchdog kills the process when a collective fails or is late, before this
rank can publish its exit reason. It also does not see collectives of replayed graphs. MONITORING (default on): a second
thread kills the process when that watchdog hangs, as it may when the device hangs. RETHROW_CUDA_ERRORS (default on):
after an abort the watchdog rethrows CUDA's error in its own thread, uncaught, which ends the process. BLOCKING_WAIT:
each collective blocks the host, which then can neither capture nor check its peers.
"""
OLD_VARIABLE_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
}
ABORT_TIMEOUT_S = 1.0  # communicators that take longer to end are left to the end of the process
WARM_UP_TIMEOUT_S = 120.0

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
"""Pairs (text in the message of an error, advice on the error), the most specific texts first."""


def disable_torch_supervision(environment: MutableMapping[str, str]) -> None:
    """Set the variables of `SETTINGS`, which torch reads when it makes a communicator.

    Raises:
        ConfigError: one of them is already set to another value.
    """
    for name, value in SETTINGS.items():
        for variable in (name, *(old_name for old_name, new_name in OLD_VARIABLE_NAMES.items() if new_name == name)):
            if environment.get(variable, value) != value:
                raise ConfigError(
                    f"{variable} is {environment[variable]} in the environment, and NCCL under the gang's own "
                    f"supervision needs {value}; unset it"
                )
        environment[name] = value


def warm_up(axes: Sequence[Axis], device: torch.device) -> None:
    """Run each kind of collective once on every axis and wait: NCCL must not open connections during a capture.

    Raises:
        RuntimeError: a communicator does not work. If it only gave no result in time, the message names the number of
            its ranks.
    """
    for axis in axes:
        if axis.size == 1:
            continue
        ones = torch.ones(axis.size, 1, device=device)
        axis.all_reduce(ones.clone())
        axis.gather(ones[:1], [1] * axis.size)
        axis.reduce_scatter(ones, [1] * axis.size)
        axis.all_to_all(ones, [1] * axis.size, [1] * axis.size)
        axis.broadcast(ones[:1].clone())
        moment, deadline = axis.timer.now(), time.monotonic() + WARM_UP_TIMEOUT_S
        while not axis.timer.reached(moment):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"NCCL's communicator of {axis.size} ranks gave no sum within {WARM_UP_TIMEOUT_S:g} s; is "
                    "NCCL_SOCKET_IFNAME an interface that all nodes reach? NCCL_DEBUG=INFO says how far it came"
                )
            time.sleep(1e-3)


def abort(
    groups: Sequence[Any], release_graphs: Callable[[], object] = lambda: None, timeout_s: float = ABORT_TIMEOUT_S
) -> bool:
    """Abort the communicators of `groups`, and call `release_graphs`, which releases the graphs that hold their
    collectives. Wait for at most `timeout_s` seconds, and return whether all communicators have ended by then.

    Each of these calls runs in its own thread, because the calls wait for each other. An abort tells the device to
    leave its collectives, then waits until the last graph with collectives is destroyed (`commDestroySync` in NCCL's
    init.cc). A running graph can be destroyed only when the device has left it. And one communicator may wait for the
    end of another.
    """
    threads = [threading.Thread(target=_ignoring_errors, args=(group.abort,), daemon=True) for group in groups]
    for thread in (*threads, threading.Thread(target=release_graphs, daemon=True)):
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _ignoring_errors(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError:  # the error of a broken communicator, which is why it is aborted
        return


def advice(text: str) -> str:
    """Return advice on an error of NCCL, in brackets; an empty string for other errors."""
    hint = next((hint_text for pattern, hint_text in ADVICE if pattern in text), "")
    return f" ({hint})" if hint and ("NCCL" in text or "nccl" in text) else ""


def is_collective_error(error: BaseException) -> bool:
    """Return whether an error comes from a collective, of gloo or NCCL."""
    text = str(error)
    return isinstance(error, torch.distributed.DistError) or any(word in text for word in ("gloo", "NCCL", "nccl"))


def is_device_error(error: BaseException) -> bool:
    """Return whether CUDA reports an error of the device, other than lack of memory.

    It may be caused by a peer: CUDA reports an abort during a replay, or the loss of a peer's memory, with the next
    call, whatever that call does.
    """
    is_device = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
    return is_device and not isinstance(error, torch.OutOfMemoryError)
