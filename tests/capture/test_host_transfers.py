"""The host sends one tensor to a step and reads one tensor from it. In between, a step on a GPU needs nothing from the
host.
"""

from array import array
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cluster.engine import build_engine
from cluster.request import Request
from tests.capture.trap import TransferTrap, count_tensor_reads
from tests.parity.harness import SAMPLING, config_of, tiny_pair

CELL_VALUE_READS = "attention.cells.host_values"  # only on a CPU: reads the lengths of requests and their pages
FINITE_CHECK_READS = "attention.torch_backend.mask_bad_cells"  # only on a CPU: reads whether cells are finite


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_each_step_makes_one_copy_to_the_device_and_one_back(backend: str, topk: int, sampling: str) -> None:
    """The requests run from admission to release. Their prompts come in chunks and share pages; trees are drafted."""
    target, draft = tiny_pair()
    engine = build_engine(config_of(target, draft, topk=topk, attention_backend=backend))
    is_torch_backend = engine.info().attention_backend == "torch"
    for i in range(5):
        engine.submit(Request(f"r{i}", tuple(1 + n % 20 for n in range(3 + 7 * i)), SAMPLING[sampling]))
    total_host_reads, total_host_sends, tensor_reads, steps = Counter[str](), Counter[str](), Counter[str](), 0
    while engine.has_work:
        with TransferTrap() as trap, count_tensor_reads() as step_tensor_reads:
            engine.step()
        total_host_reads, total_host_sends, tensor_reads, steps = (
            total_host_reads + trap.host_reads,
            total_host_sends + trap.host_sends,
            tensor_reads + step_tensor_reads,
            steps + 1,
        )
    assert set(total_host_reads) <= ({FINITE_CHECK_READS} if is_torch_backend else set())
    assert total_host_sends == {"device.staging.int64_tensor": steps}
    assert (tensor_reads.pop(CELL_VALUE_READS, 0) > 0) == is_torch_backend
    assert tensor_reads == {"spec.result.read": steps}
    assert steps > 5


ROWS, SIZES = torch.arange(4), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("operation", "reads_device"),
    [
        (lambda: int(ROWS[1]), True),
        (lambda: bool(ROWS[1] == 1), True),
        (lambda: ROWS[ROWS > 1], True),
        (lambda: ROWS.nonzero(), True),
        (lambda: ROWS.bincount(), True),
        (lambda: SIZES.repeat_interleave(SIZES), True),
        (lambda: SIZES.repeat_interleave(SIZES, output_size=3), False),
        (lambda: ROWS.masked_fill(ROWS > 1, 0), False),
    ],
)
def test_trap_detects_operations_that_read_device_values(operation: Callable[[], object], reads_device: bool) -> None:
    with TransferTrap() as trap:
        operation()
    assert bool(trap.host_reads) == reads_device


@pytest.mark.parametrize(
    "make_tensor",
    [
        lambda: torch.tensor([1, 2]),
        lambda: torch.frombuffer(array("q", [1, 2]), dtype=torch.int64),
        lambda: torch.from_numpy(np.arange(2)),
    ],
)
def test_trap_detects_tensors_sent_to_and_read_from_the_device(make_tensor: Callable[[], torch.Tensor]) -> None:
    with TransferTrap() as trap, count_tensor_reads() as tensor_reads:
        make_tensor().tolist()
    assert trap.host_sends.total() == 1 and tensor_reads
