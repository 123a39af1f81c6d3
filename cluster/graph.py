"""A program captured on a GPU, as a CUDA graph; its twin on a CPU is the tape.

Capturing only notes what the program would launch, so it is replayed once to take effect. What is made on first use
(workspaces of libraries, constants that are kept) must have been made before: run the program once as it is.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Graph(Generic[T]):
    """Captured on the current device. `output` is what the program returned: tensors that every replay fills anew."""

    pool: Any = None
    """The memory that all graphs of a process share, as they never run at the same time."""

    def __init__(self, program: Callable[[], T]) -> None:
        """Capture `program`, and run it."""
        if Graph.pool is None:
            Graph.pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self._graph, pool=Graph.pool):
            self.output: T = program()
        self._bytes = torch.cuda.memory_reserved() - before
        self.replay()

    @property
    def bytes(self) -> int:
        """Memory that the pool grew by for this program."""
        return self._bytes

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()
