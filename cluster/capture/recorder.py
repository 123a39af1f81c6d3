"""How a program marks the calls that a recorder cannot see by itself: `native`, `opaque`, `host_call` and
`run_before_replays`.

A program is recorded as a tape on a CPU (`cluster/capture/tape.py`), or as CUDA graphs on a GPU
(`cluster/capture/cuda_graph.py`). Both recorders see torch's operators. The program marks all other calls:
- `native` and `opaque`: device work. A tape repeats it as one call; on a GPU, its kernels are captured.
- `host_call`: a function that runs on the host in the middle of the program. A tape repeats the call in its place. On a
  GPU, one CUDA graph ends before the call, and the next begins after it.
- `run_before_replays`: a function that the host must call before each run of the program. The call is not recorded; the
  code that replays the program makes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cluster.device.transfers import HostCopies, copy_to_device
from cluster.device.wait_hook import wait_for_device

R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class CaptureError(RuntimeError):
    """The program cannot be replayed. The message names the operator or call, and the reason."""


class Captured(Protocol[T_co]):
    """A recorded program, which can be replayed."""

    @property
    def output(self) -> T_co:
        """What the program returned: tensors that every replay overwrites."""

    @property
    def bytes(self) -> int:
        """How many bytes this program added to the memory that all programs share."""

    def replay(self) -> None:
        """Run the program again on the present contents of its input tensors."""


class Recorder(Protocol):
    """Records a program while it runs. Each method makes the call and records it."""

    def opaque(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """See the function `opaque`."""

    def native(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """See the function `native`."""

    def host_call(self, run: Callable[..., Tensor | None], arguments: tuple[Any, ...]) -> Tensor | None:
        """See the function `host_call`."""


@dataclass(slots=True)
class CallsBeforeReplay:
    """Functions that the host calls before each run of a program. Each function prepares the step, and returns False if
    the recorded program does not fit the step; then the step runs eagerly. The first run of the program, which is
    eager, fills the list `calls`. After that run, `collected` is True.
    """

    calls: list[Callable[[], bool]] = field(default_factory=list)
    collected: bool = False

    def ready(self) -> bool:
        """Make all calls; return whether the program may be recorded, or replayed, for this step."""
        # A list, not all() over a generator: every call must be made, even after one that returned False.
        results = [call() for call in self.calls]
        return all(results)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_calls_before_replay: ContextVar[CallsBeforeReplay | None] = ContextVar("calls_before_replay", default=None)


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """In this block, `recorder` records the marked calls. If `recorder` is None, nothing records them."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def replayable(calls_before_replay: CallsBeforeReplay) -> Iterator[None]:
    """In this block, run a program that will be replayed later. The block is the first run of the program, which is
    eager, or the run that is recorded.
    """
    token = _calls_before_replay.set(calls_before_replay)
    try:
        yield
    finally:
        _calls_before_replay.reset(token)
        calls_before_replay.collected = True


def is_replayable() -> bool:
    """Return whether the running program will be replayed later."""
    return _calls_before_replay.get() is not None


def run_before_replays(call: Callable[[], bool]) -> None:
    """Call `call` now, and let the host call it before each later run of this program. If the program has asked for an
    equal call before, do nothing.

    Raises:
        CaptureError: the program is being recorded, and its first run did not ask for this call.
    """
    calls_before_replay = _calls_before_replay.get()
    assert calls_before_replay is not None, "the running program is not replayable"
    if call in calls_before_replay.calls:
        return
    if calls_before_replay.collected:
        raise CaptureError(f"{call}: needed first while it is recorded, which is too late")
    calls_before_replay.calls.append(call)
    call()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing in this block, torch's operators included."""
    with recorded_by(None), _disable_current_modes():
        yield


def opaque(run: Callable[..., R], *arguments: Any) -> R:
    """Return `run(*arguments)`, a tensor whose shape must not change between replays.

    A tape records it as one call, so `run` may branch on the data in each replay. On a GPU its kernels are captured.
    """
    recorder = _recorder.get()
    if recorder is None:
        return run(*arguments)
    output: R = recorder.opaque(run, arguments)
    return output


def native(run: Callable[..., None], *arguments: Any) -> None:
    """Call `run(*arguments)`, which writes to memory and returns nothing. A tape records it as one call."""
    recorder = _recorder.get()
    if recorder is None:
        run(*arguments)
    else:
        recorder.native(run, arguments)


def host_call(run: Callable[..., Tensor | None], *arguments: Any) -> Tensor | None:
    """Call `run(*arguments)` on the host, and return its result on the device. `arguments` has at least one tensor.
    This function waits for the tensors. It passes copies of them in host memory to `run`; on a CPU, the tensors
    themselves.

    `run` returns None or a host tensor, whose shape must not change between replays.
    """
    recorder = _recorder.get()
    return call_on_host(run, arguments) if recorder is None else recorder.host_call(run, arguments)


def call_on_host(run: Callable[..., Tensor | None], arguments: tuple[Any, ...]) -> Tensor | None:
    """Do what `host_call` does, but record nothing; `arguments` are the arguments of `run`."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    copies = HostCopies(tensors)
    wait_for_device()  # under the watchdog: `copies.wait` alone would block forever if a peer is lost
    host_tensors = iter(copies.wait())
    output = run(*(next(host_tensors) if isinstance(argument, Tensor) else argument for argument in arguments))
    return None if output is None else copy_to_device(output, tensors[0].device)
