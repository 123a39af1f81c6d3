"""A captured program on a GPU equals the program, and so does its twin on a CPU."""

import pytest
import torch
from torch import Tensor

from cluster.graph import Graph
from cluster.tape import Tape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
]


def program(x: Tensor, memory: Tensor) -> list[Tensor]:
    rows = (x @ x.t()).relu()
    memory.index_copy_(0, torch.arange(2, device=x.device), rows[:2])
    values, ids = rows.topk(2)
    return [values, ids, rows.softmax(-1), memory.sum(0)]


def test_a_graph_replays_on_new_inputs_without_waiting() -> None:
    x, memory = torch.randn(4, 4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)
    there = [one.cuda() for one in (x, memory)]
    program(*there)
    graph, tape = Graph(lambda: program(*there)), Tape(lambda: program(x, memory))
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
    assert graph.bytes >= 0
