"""The checks of captured steps that `tests/gpu` makes on a GPU also run on a CPU, with tapes. These tests show that the
checks themselves work; they show nothing about a GPU.
"""

import pytest

from tests.gpu import steps
from tests.parity.harness import tiny_pair
from tests.unit.kernels.library import skip_unless_c_backend


@pytest.mark.parametrize(("shape", "kind"), [("chain", "grammar"), ("tree", "penalties")])
def test_gpu_token_check_passes_on_cpu(shape: str, kind: str) -> None:
    skip_unless_c_backend()
    steps.check_tokens("cpu", *tiny_pair(), shape, kind, "0.8")


def test_gpu_wait_check_passes_on_cpu() -> None:
    """On a CPU the check compares tokens and counts replayed steps. Only on a GPU does it detect waits of the host."""
    skip_unless_c_backend()
    steps.check_waits("cpu", *tiny_pair(), "chain", "free", 20)


def test_gpu_result_copy_check_passes_on_cpu() -> None:
    """On a CPU the check compares the values of copies that are complete at once. Only on a GPU are copies under way
    while the device overwrites their source.
    """
    steps.check_host_copies("cpu")
