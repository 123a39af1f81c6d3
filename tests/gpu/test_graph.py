"""A captured program on a GPU equals the program, and so does its twin on a CPU."""

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
    rows = (x @ x.t()).relu()
    memory.index_copy_(0, torch.arange(2, device=x.device), rows[:2])
    values, ids = rows.topk(2)
    return [values, ids, rows.softmax(-1), memory.sum(0)]


def test_graph_replays_on_new_inputs_without_synchronising() -> None:
    x, memory = torch.randn(4, 4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)
    there = [one.cuda() for one in (x, memory)]
    program(*there)
    graph, tape = Graph(lambda: program(*there), CudaSegments()), Tape(lambda: program(x, memory))
    for _ in range(20):
        x.copy_(torch.randn(4, 4))
        there[0].copy_(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tape.replay()
        assert all(torch.allclose(a.cpu(), b) for a, b in zip(graph.output, tape.output, strict=True))
    assert graph.bytes >= 0 and len(graph) == 1


def called(x: Tensor, said: list[float]) -> list[Tensor]:
    """A program that calls the host in its midst, twice, the second time for nothing that it uses."""

    def say(doubled: Tensor) -> Tensor:
        said.append(float(doubled.sum()))
        return doubled * 10

    doubled = x * 2
    answer = host_call(say, doubled)
    assert answer is not None
    total = answer + doubled
    host_call(lambda one: said.append(float(one.sum())), total)
    return [total, total.sum(-1)]


def test_graph_calls_the_host_between_its_segments() -> None:
    """Beside other graphs in the same pool, which write over all that a program does not need any more."""
    x, said, own = torch.randn(4, 4, dtype=torch.float64), list[float](), list[float]()
    there, segments = x.cuda(), CudaSegments()
    memory = torch.zeros(6, 4, dtype=x.dtype, device="cuda")
    called(there, said)
    program(there, memory)
    graph = Graph(lambda: called(there, said), segments)
    others = [Graph(lambda: program(there, memory), segments) for _ in "ab"]
    assert len(graph) == 5
    for _ in range(20):
        x.copy_(torch.randn(4, 4))
        there.copy_(x)
        said.clear()
        own.clear()
        graph.replay()
        wanted = called(x, own)
        assert all(torch.allclose(a.cpu(), b) for a, b in zip(graph.output, wanted, strict=True))
        assert torch.allclose(torch.tensor(said), torch.tensor(own)) and len(said) == 2
        for other in others:
            other.replay()
