"""A program captured on a GPU: CUDA graphs, one after the other, and between them what the host does.

Capturing only notes what a program would launch, so a program that calls the host amid its work (`recorder.hosted`)
is captured in segments: each is launched as soon as it ends, the host makes its call on what came of it, and the next
begins. So a capture runs the program once, as a tape does. A program without such calls is one segment.

What is made on first use (workspaces of libraries, constants that are kept, kernels compiled) must have been made
before: run the program once as it is.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from cluster.capture.recorder import answered, recorded_by
from cluster.device.wait_hook import catch_up

T = TypeVar("T")


class Segments(Protocol):
    """A device that can note what it is told to do, in place of doing it."""

    def ready(self) -> None:
        """Wait for all work, and give back memory that nobody uses: a program is about to be captured."""
        ...

    def begin(self) -> None:
        """From now on note what is launched."""
        ...

    def end(self) -> Callable[[], object]:
        """Note no more; returns what launches all that was noted."""
        ...

    def drop(self) -> None:
        """Note no more and forget what was noted, after an error."""
        ...

    def held(self) -> int:
        """Bytes of the memory in which captured programs work."""
        ...


class Graph(Generic[T]):
    """A captured program. `output` is what it returned: tensors that every replay fills anew."""

    def __init__(self, program: Callable[[], T], segments: Segments) -> None:
        """Capture `program`, and run it."""
        self._segments = segments
        self._parts: list[Callable[[], object]] = []
        catch_up()  # what makes ready waits for all work too, but not under watch
        segments.ready()
        before = segments.held()
        with torch.inference_mode(), recorded_by(self):
            try:
                segments.begin()
                self.output: T = program()
            except BaseException:
                segments.drop()
                raise
            self._end()
        self._bytes = segments.held() - before

    @property
    def bytes(self) -> int:
        """Memory by which that of all programs grew for this one."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._parts)

    def replay(self) -> None:
        """Launch the segments on the current stream, and make the calls of the host between them."""
        with torch.inference_mode():
            for part in self._parts:
                part()

    def opaque(self, run: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """See `recorder.opaque`: whatever it launches is noted."""
        return run(*given)

    def native(self, run: Callable[..., None], given: tuple[Any, ...]) -> None:
        """See `recorder.native`: whatever it launches is noted."""
        run(*given)

    def hosted(self, run: Callable[..., Tensor | None], given: tuple[Any, ...]) -> Tensor | None:
        """See `recorder.hosted`. Its output lies outside the memory of programs, at a place of its own."""
        self._end()
        with recorded_by(None):
            made = answered(run, given)

        def again() -> None:
            answer = answered(run, given)
            if made is not None and answer is not None:
                made.copy_(answer)

        self._parts.append(again)
        self._segments.begin()
        return made

    def _end(self) -> None:
        launch = self._segments.end()
        self._parts.append(launch)
        launch()


class CudaSegments:
    """CUDA graphs on the current device, all in one pool of memory, since no two of them run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._noting: Any = None
        self._graph: Any = None

    def ready(self) -> None:
        """See `Segments`. While it notes, torch cannot give back memory that it holds unused."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def begin(self) -> None:
        """See `Segments`. What other threads do with CUDA meanwhile is no part of the capture, and no error."""
        self._graph, self._noting = torch.cuda.CUDAGraph(), torch.cuda.stream(self._stream)
        self._noting.__enter__()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], object]:
        """See `Segments`."""
        graph: Any = self._graph
        try:
            graph.capture_end()
        finally:
            self._left()
        launch: Callable[[], object] = graph.replay
        return launch

    def drop(self) -> None:
        """See `Segments`."""
        if self._graph is None:  # the error came from the end of a segment, or from the host's call behind it
            return
        try:
            self._graph.capture_end()
        except RuntimeError:  # the capture is invalid, which is why we are here
            pass
        finally:
            self._left()

    def held(self) -> int:
        """See `Segments`: all that torch holds, of which only the pool grows while a program is captured."""
        return torch.cuda.memory_reserved()

    def _left(self) -> None:
        self._noting.__exit__(None, None, None)
        self._graph = self._noting = None
