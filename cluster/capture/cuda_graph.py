"""A program captured on a GPU: a sequence of CUDA graphs, between which functions run on the host.

A capture records kernels without running them. But a program may need the host in its middle, to run a function on
results (`recorder.host_call`). Such a program is captured in segments: each segment is launched as soon as its capture
ends, the host runs the function on the results, and the capture of the next segment begins. A program without such
functions is one segment. So every program runs once while it is captured, as it does while a tape is recorded.

Run the program once eagerly before capturing it: library workspaces, cached constants and compiled kernels must exist.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from cluster.capture.recorder import call_on_host, recorded_by
from cluster.device.wait_hook import wait_for_device

T = TypeVar("T")


class Segments(Protocol):
    """Captures the segments of programs on one device: `CudaSegments`, or a fake in tests."""

    def ready(self) -> None:
        """Prepare for a capture: wait for all queued work, and release unused cached memory."""

    def begin(self) -> None:
        """Begin to capture a segment."""

    def end(self) -> Callable[[], object]:
        """End the segment; return a function that launches it."""

    def drop(self) -> None:
        """Discard the segment under capture, after an error."""

    def reserved_bytes(self) -> int:
        """Return the bytes of memory that captured programs work in."""


class Graph(Generic[T]):
    """A captured program. `output` is what it returned: tensors that every replay overwrites."""

    def __init__(self, program: Callable[[], T], segments: Segments) -> None:
        """Capture `program` and run it once."""
        self._segments = segments
        self._segments_and_calls: list[Callable[[], object]] = []
        wait_for_device()  # `ready` waits for the device too, but not under the watchdog: it could wait forever
        segments.ready()
        bytes_before = segments.reserved_bytes()
        with torch.inference_mode(), recorded_by(self):
            try:
                segments.begin()
                self.output: T = program()
            except BaseException:
                segments.drop()
                raise
            self._end()
        self._bytes = segments.reserved_bytes() - bytes_before

    @property
    def bytes(self) -> int:
        """How many bytes this capture added to the memory pool that all programs share."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._segments_and_calls)

    def replay(self) -> None:
        """Launch the segments on the current stream, and run the functions of the host between them."""
        with torch.inference_mode():
            for segment in self._segments_and_calls:
                segment()

    def opaque(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Make the call: the capture records the kernels that it launches."""
        return run(*arguments)

    def native(self, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Make the call: the capture records the kernels that it launches."""
        run(*arguments)

    def host_call(self, run: Callable[..., Tensor | None], arguments: tuple[Any, ...]) -> Tensor | None:
        """End the segment, call `run` on the host, and begin the next segment. Each replay calls `run` again."""
        self._end()
        # The output is allocated between two captures, so it lies outside the graph pool: no graph overwrites it.
        with recorded_by(None):
            output = call_on_host(run, arguments)

        def call_again() -> None:
            new_output = call_on_host(run, arguments)
            if output is not None and new_output is not None:
                output.copy_(new_output)

        self._segments_and_calls.append(call_again)
        self._segments.begin()
        return output

    def _end(self) -> None:
        launch = self._segments.end()
        self._segments_and_calls.append(launch)
        launch()


class CudaSegments:
    """CUDA graphs on the current device. All share one memory pool. That is safe, as no two of them run at a time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream_context: Any = None
        self._graph: Any = None

    def ready(self) -> None:
        """Synchronize and empty the cache: torch cannot release cached memory during a capture."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def begin(self) -> None:
        """Begin to capture. In the mode "thread_local", other threads may call CUDA meanwhile; their calls are not
        captured.
        """
        self._graph, self._stream_context = torch.cuda.CUDAGraph(), torch.cuda.stream(self._stream)
        self._stream_context.__enter__()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], object]:
        """End the capture; return the graph's `replay`."""
        graph: Any = self._graph
        try:
            graph.capture_end()
        finally:
            self._leave_stream()
        launch: Callable[[], object] = graph.replay
        return launch

    def drop(self) -> None:
        """End the capture under way, if any, and discard its graph."""
        if self._graph is None:  # no capture is under way: ending a segment failed, or the host's call after it
            return
        try:
            self._graph.capture_end()
        except RuntimeError:  # expected: the error that led here has made the capture invalid
            pass
        finally:
            self._leave_stream()

    def reserved_bytes(self) -> int:
        """Return the bytes of all memory that torch has reserved. Apart from the small outputs of host calls, only the
        graph pool grows during a capture.
        """
        return torch.cuda.memory_reserved()

    def _leave_stream(self) -> None:
        self._stream_context.__exit__(None, None, None)
        self._graph = self._stream_context = None
