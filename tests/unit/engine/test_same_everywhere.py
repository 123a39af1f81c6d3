"""A gang whose ranks would compute different last digits is refused at start."""

import json

import pytest

from cluster.arch.resolve import resolve_models
from cluster.config import ConfigError
from cluster.engine.same_everywhere import same_everywhere
from cluster.kernels.torch_kernels import TorchKernels
from tests.parity.harness import config_of, tiny_pair


class Two:
    """A mesh of two ranks, the other of which has kernels of its own."""

    rank = 0

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def everyones(self, name: str, said: str) -> list[str]:
        return [said, json.dumps(json.loads(said) | {"kernels": self._digits})]


def test_kernels_with_other_digits_are_refused() -> None:
    resolved = resolve_models(config_of(tiny_pair()[0]))
    same_everywhere(resolved, TorchKernels(), Two("torch"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kernels is 'C with fused products' on rank 1 and 'torch' on rank 0"):
        same_everywhere(resolved, TorchKernels(), Two("C with fused products"))  # type: ignore[arg-type]
