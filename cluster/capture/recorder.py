"""What a program tells whoever records it: its calls that a recorder cannot look into, and those of the host.

A program is recorded as a tape on a CPU (`cluster/capture/tape.py`), or as CUDA graphs on a GPU
(`cluster/capture/cuda_graph.py`). Both recorders see torch's operators by themselves; the program tells them the rest:
`native` and `opaque` are calls of device work that a recorder repeats as they are. `hosted` is a call of the host
inside the program: a tape repeats it where it stands, while a graph ends before it and another begins after it. `ahead`
is a call of the host before each run; no recorder sees it, and the code that replays the program makes it.
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
    """A program that cannot be replayed; the message names the operator and what is wrong with it."""


class Captured(Protocol[T_co]):
    """A program that was run once and can be run again. `output` is what it returned: tensors that every replay fills
    anew. `bytes` is the memory that it holds for itself.
    """

    @property
    def output(self) -> T_co:
        """What the program returned."""
        ...

    @property
    def bytes(self) -> int:
        """Memory of its buffers."""
        ...

    def replay(self) -> None:
        """Run it again on what now lies in its inputs."""
        ...


class Recorder(Protocol):
    """Records a program while that runs; each method makes the call, or has it made, and notes it."""

    def opaque(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """See the function `opaque`."""
        ...

    def native(self, run: Callable[..., None], given: tuple[Any, ...]) -> None:
        """See the function `native`."""
        ...

    def hosted(self, run: Callable[..., Tensor | None], given: tuple[Any, ...]) -> Tensor | None:
        """See the function `hosted`."""
        ...


@dataclass(slots=True)
class Ahead:
    """What the host does before each run of a program that is repeated: `calls`, which say whether what is recorded
    fits what they made. The program's first run finds them, and is run as it is; then they are `known`.
    """

    calls: list[Callable[[], bool]] = field(default_factory=list)
    known: bool = False

    def ready(self) -> bool:
        """Make them all; whether the program may be recorded, or repeated, for what the step at hand needs."""
        made = [call() for call in self.calls]
        return all(made)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_ahead: ContextVar[Ahead | None] = ContextVar("ahead", default=None)


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """What is called in this block is recorded by `recorder`; by nobody if None."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def repeated(ahead: Ahead) -> Iterator[None]:
    """What runs in this block is a program that is to be repeated: its first run, or the one that is recorded."""
    token = _ahead.set(ahead)
    try:
        yield
    finally:
        _ahead.reset(token)
        ahead.known = True


def repeats() -> bool:
    """Whether what runs is a program that is to be repeated."""
    return _ahead.get() is not None


def ahead(call: Callable[[], bool]) -> None:
    """Have the host make `call` now, and before each run of the program that runs; once, if it is asked for again.

    Raises:
        CaptureError: the program is being recorded, and did not need this when it first ran.
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
    """In this block nothing is recorded, operators of torch included."""
    with recorded_by(None), _disable_current_modes():
        yield


def opaque(run: Callable[..., R], *given: Any) -> R:
    """`run(*given)`, whose output is a tensor of a shape that must not change, and which is recorded as one call: what
    happens inside, it decides anew in each replay on a CPU. On a GPU it is captured as it runs.
    """
    recorder = _recorder.get()
    if recorder is None:
        return run(*given)
    output: R = recorder.opaque(run, given)
    return output


def native(run: Callable[..., None], *given: Any) -> None:
    """`run(*given)`, a call on memory that gives nothing back and is recorded as one."""
    recorder = _recorder.get()
    if recorder is None:
        run(*given)
    else:
        recorder.native(run, given)


def hosted(run: Callable[..., Tensor | None], *given: Any) -> Tensor | None:
    """`run(*given)` by the host, which waits for the tensors among `given` and gets them in its own memory. Its output
    is none, or a tensor of the host's, whose shape must not change; what is returned lies on the device. At least one
    of `given` is a tensor.
    """
    recorder = _recorder.get()
    return answered(run, given) if recorder is None else recorder.hosted(run, given)


def answered(run: Callable[..., Tensor | None], given: tuple[Any, ...]) -> Tensor | None:
    """The call of `hosted` itself, which nobody records."""
    asked = [one for one in given if isinstance(one, Tensor)]
    landing = Landing(asked)
    catch_up()
    landed = iter(landing.wait())
    made = run(*(next(landed) if isinstance(one, Tensor) else one for one in given))
    return None if made is None else brought(made, asked[0].device)
