"""A step is sent one tensor, gives back one, and on a GPU asks the host for nothing in between."""

from array import array
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cluster.engine import build_engine
from cluster.request import Request
from tests.parity.harness import SAMPLING, config_of, tiny_pair
from tests.static.trap import Trap, reads

LOOKS = "attention.cells.host_values"  # on a CPU alone: how long requests are, and in which pages
FINITE = "attention.torch_backend.mask_bad_cells"  # on a CPU alone: whether cells are finite


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_each_step_makes_one_copy_to_the_device_and_one_back(backend: str, topk: int, sampling: str) -> None:
    """Prompts in chunks that share pages, trees, ends of requests: admission to release."""
    target, draft = tiny_pair()
    engine = build_engine(config_of(target, draft, topk=topk, attention_backend=backend))
    torchs = engine.info().attention_backend == "torch"
    for i in range(5):
        engine.submit(Request(f"r{i}", tuple(1 + n % 20 for n in range(3 + 7 * i)), SAMPLING[sampling]))
    asked, sent, back, steps = Counter[str](), Counter[str](), Counter[str](), 0
    while engine.has_work:
        with Trap() as trap, reads() as read:
            engine.step()
        asked, sent, back, steps = asked + trap.asked, sent + trap.sent, back + read, steps + 1
    assert set(asked) <= ({FINITE} if torchs else set())
    assert sent == {"device.staging.int64_tensor": steps}
    assert (back.pop(LOOKS, 0) > 0) == torchs
    assert back == {"spec.result.read": steps}
    assert steps > 5


ROWS, SIZES = torch.arange(4), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("ask", "asks"),
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
def test_trap_detects_operations_that_read_device_values(ask: Callable[[], object], asks: bool) -> None:
    with Trap() as trap:
        ask()
    assert bool(trap.asked) == asks


@pytest.mark.parametrize(
    "send",
    [
        lambda: torch.tensor([1, 2]),
        lambda: torch.frombuffer(array("q", [1, 2]), dtype=torch.int64),
        lambda: torch.from_numpy(np.arange(2)),
    ],
)
def test_trap_detects_tensors_sent_to_and_read_from_the_device(send: Callable[[], torch.Tensor]) -> None:
    with Trap() as trap, reads() as read:
        send().tolist()
    assert trap.sent.total() == 1 and read
