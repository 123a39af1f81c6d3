"""How a program marks the calls that a recorder cannot see by itself: `native`, `opaque`, `hosted` and `ahead`.

A program is recorded as a tape on a CPU (`cluster/capture/tape.py`), or as CUDA graphs on a GPU
(`cluster/capture/cuda_graph.py`). Both recorders see torch's operators. The program marks all other calls:
- `native` and `opaque`: device work that is repeated as one call.
- `hosted`: a call of the host in the middle of the program. A tape repeats it in its place. A CUDA graph ends before
  it, and another begins after it.
- `ahead`: a call of the host before each run. It is not recorded; the code that replays the program makes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cluster.device.transfers import Landing, brought
from cluster.device.wait_hook import catch_up

R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class CaptureError(RuntimeError):
    """The program cannot be replayed. The message names the operator and the reason."""


class Captured(Protocol[T_co]):
    """A recorded program, which can be replayed."""

    @property
    def output(self) -> T_co:
        """What the program returned: tensors that every replay overwrites."""

    @property
    def bytes(self) -> int:
        """The memory that this program added to that of all programs."""

    def replay(self) -> None:
        """Run the program again on the present contents of its input tensors."""


class Recorder(Protocol):
    """Records a program while it runs. Each method makes the call and records it."""

    def opaque(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """See the function `opaque`."""

    def native(self, run: Callable[..., None], given: tuple[Any, ...]) -> None:
        """See the function `native`."""

    def hosted(self, run: Callable[..., Tensor | None], given: tuple[Any, ...]) -> Tensor | None:
        """See the function `hosted`."""


@dataclass(slots=True)
class Ahead:
    """Calls of the host before each run of a program. A call that returns False makes the step run eagerly, because the
    recorded program does not fit what the call prepared. The program's first, eager run collects `calls`; then they are
    `known`.
    """

    calls: list[Callable[[], bool]] = field(default_factory=list)
    known: bool = False

    def ready(self) -> bool:
        """Make all calls; return whether the program may be recorded, or replayed, for this step."""
        # A list, not all() over a generator: every call must be made, even after one that returned False.
        made = [call() for call in self.calls]
        return all(made)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_ahead: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """Have `recorder` record the marked calls of this block; None: record nothing."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def repeated(ahead: Ahead) -> Iterator[None]:
    """Run a program that will be replayed later: this block is its first, eager run, or the run that is recorded."""
    token = _ahead.set(ahead)
    try:
        yield
    finally:
        _ahead.reset(token)
        ahead.known = True


def repeats() -> bool:
    """Return whether the running program will be replayed later."""
    return _ahead.get() is not None


def ahead(call: Callable[[], bool]) -> None:
    """Make `call` now, and have it made before each later run of this program. A repeated request is ignored.

    Raises:
        CaptureError: the program is being recorded, and its first run did not ask for this call.
    """
    found = _ahead.get()
    assert found is not None, "nobody repeats what runs"
    if call in found.calls:
        return
    if found.known:
        raise CaptureError(f"{call}: needed first while it is recorded, which is too late")
    found.calls.append(call)
    call()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing in this block, torch's operators included."""
    with recorded_by(None), _disable_current_modes():
        yield


def opaque(run: Callable[..., R], *given: Any) -> R:
    """Return `run(*given)`, a tensor whose shape must not change between replays.

    A tape records it as one call, so `run` may branch on the data in each replay. On a GPU its kernels are captured.
    """
    recorder = _recorder.get()
    if recorder is None:
        return run(*given)
    output: R = recorder.opaque(run, given)
    return output


def native(run: Callable[..., None], *given: Any) -> None:
    """Make `run(*given)`, which writes to memory and returns nothing. It is recorded as one call."""
    recorder = _recorder.get()
    if recorder is None:
        run(*given)
    else:
        recorder.native(run, given)


def hosted(run: Callable[..., Tensor | None], *given: Any) -> Tensor | None:
    """Make `run(*given)` on the host. Wait for the tensors in `given` (at least one) and pass copies in host memory.

    `run` returns None or a host tensor, whose shape must not change between replays; return it on the device.
    """
    recorder = _recorder.get()
    return answered(run, given) if recorder is None else recorder.hosted(run, given)


def answered(run: Callable[..., Tensor | None], given: tuple[Any, ...]) -> Tensor | None:
    """Make the call of `hosted` without recording it."""
    asked = [one for one in given if isinstance(one, Tensor)]
    landing = Landing(asked)
    catch_up()  # under the watchdog: `landing.wait` alone would block forever if a peer is lost
    landed = iter(landing.wait())
    made = run(*(next(landed) if isinstance(one, Tensor) else one for one in given))
    return None if made is None else brought(made, asked[0].device)
