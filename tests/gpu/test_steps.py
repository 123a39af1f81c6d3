"""Tests of steps that are captured as CUDA graphs: in float64 they give the tokens of eager steps and of a CPU.

These tests have not run on a GPU yet. `tests/capture/test_gpu_dry.py` runs the same functions on a CPU.
"""

import pytest
import torch

from tests.capture.test_stream import KINDS, SHAPES
from tests.gpu import steps
from tests.parity.harness import tiny_pair
from tests.parity.pairs import algorithm_of, diagonal, draft_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_on_cuda_give_the_tokens_of_the_cpu(kind: str, shape: str, sampling: str) -> None:
    steps.check_tokens("cuda", *tiny_pair(), shape, kind, sampling)


@pytest.mark.parametrize("number", range(0, len(diagonal()), 4))
def test_captured_steps_of_each_model_family_give_the_tokens_of_the_cpu(number: int) -> None:
    pair = diagonal()[number]
    settings = {"speculative_algorithm": algorithm_of(pair.spec())}
    shape, kind = ("chain", "tree")[number % 2], KINDS[number // 4 % len(KINDS)]
    steps.check_tokens("cuda", pair.target, draft_of(pair.draft), shape, kind, "0.8", **settings)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_steps_run_without_a_device_synchronisation(kind: str, shape: str) -> None:
    steps.check_waits("cuda", *tiny_pair(), shape, kind, 200)


def test_copied_results_equal_the_values_at_copy_time() -> None:
    steps.check_host_copies("cuda")
