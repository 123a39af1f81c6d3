"""Tests of captured programs: a CUDA graph on a GPU and a tape on a CPU give the results of the program itself."""

import pytest
import torch
from torch import Tensor

from cluster.capture.cuda_graph import CudaSegments, Graph
from cluster.capture.recorder import host_call
from cluster.capture.tape import Tape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
]


def program(x: Tensor, memory: Tensor) -> list[Tensor]:
    rows = (x @ x.t()).sin()  # no equal values: topk orders those differently on each device
    memory.index_copy_(0, torch.arange(2, device=x.device), rows[:2])
    values, ids = rows.topk(2)
    return [values, ids, rows.softmax(-1), memory.sum(0)]


def test_graph_replays_on_new_inputs_without_synchronising() -> None:
    x, memory = torch.randn(4, 4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)
    device_tensors = [tensor.cuda() for tensor in (x, memory)]
    program(*device_tensors)
    graph, tape = Graph(lambda: program(*device_tensors), CudaSegments()), Tape(lambda: program(x, memory))
    for _ in range(20):
        x.copy_(torch.randn(4, 4))
        device_tensors[0].copy_(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tape.replay()
        assert all(torch.allclose(a.cpu(), b) for a, b in zip(graph.output, tape.output, strict=True))
    assert graph.bytes > 0, "the graph's tensors need memory in a new pool"
    assert len(graph) == 1


def program_with_host_calls(x: Tensor, sums: list[float]) -> list[Tensor]:
    """Run a program that calls the host twice. The program does not use the result of the second call.

    The host calls append the sums of their inputs to `sums`.
    """

    def record(doubled: Tensor) -> Tensor:
        sums.append(float(doubled.sum()))
        return doubled * 10

    doubled = x * 2
    host_result = host_call(record, doubled)
    assert host_result is not None
    total = host_result + doubled
    host_call(lambda tensor: sums.append(float(tensor.sum())), total)
    return [total, total.sum(-1)]


def test_graph_calls_the_host_between_its_segments() -> None:
    """Other graphs use the same memory pool. They overwrite all memory that the program does not need any more."""
    x, graph_sums, eager_sums = torch.randn(4, 4, dtype=torch.float64), list[float](), list[float]()
    device_x, segments = x.cuda(), CudaSegments()
    memory = torch.zeros(6, 4, dtype=x.dtype, device="cuda")
    program_with_host_calls(device_x, graph_sums)
    program(device_x, memory)
    graph = Graph(lambda: program_with_host_calls(device_x, graph_sums), segments)
    other_graphs = [Graph(lambda: program(device_x, memory), segments) for _ in "ab"]
    assert len(graph) == 5
    for _ in range(20):
        x.copy_(torch.randn(4, 4))
        device_x.copy_(x)
        graph_sums.clear()
        eager_sums.clear()
        graph.replay()
        expected = program_with_host_calls(x, eager_sums)
        assert all(torch.allclose(a.cpu(), b) for a, b in zip(graph.output, expected, strict=True))
        assert torch.allclose(torch.tensor(graph_sums), torch.tensor(eager_sums)) and len(graph_sums) == 2
        for other_graph in other_graphs:
            other_graph.replay()
