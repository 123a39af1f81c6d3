"""The tests of captured steps on a GPU, on a CPU with tapes: that they run, not what a GPU does."""

import pytest

from tests.gpu import steps
from tests.parity.harness import tiny_pair
from tests.unit.kernels.library import c_serves


@pytest.mark.parametrize(("shape", "kind"), [("chain", "grammar"), ("tree", "penalties")])
def test_gpu_token_check_passes_on_cpu(shape: str, kind: str) -> None:
    c_serves()
    steps.check_tokens("cpu", *tiny_pair(), shape, kind, "0.8")


def test_gpu_wait_check_passes_on_cpu() -> None:
    c_serves()
    steps.check_waits("cpu", *tiny_pair(), "chain", "free", 20)


def test_gpu_result_copy_check_passes_on_cpu() -> None:
    steps.check_landing("cpu")
