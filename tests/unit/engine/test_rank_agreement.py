"""A gang whose ranks would compute different last digits is refused at start."""

import json
import os
import subprocess
import sys

import pytest

from cluster.arch.resolve import resolve_models
from cluster.config import ConfigError
from cluster.engine.rank_agreement import check_rank_agreement
from cluster.kernels.library import level_of_cpu
from cluster.kernels.torch_kernels import TorchKernels
from tests.parity.harness import config_of, tiny_pair


class Two:
    """A mesh of two ranks, the other of which has kernels of its own."""

    rank = 0

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def all_gather_text(self, name: str, said: str) -> list[str]:
        return [said, json.dumps(json.loads(said) | {"kernels": self._digits})]


def test_gang_with_different_kernels_between_ranks_is_refused() -> None:
    resolved = resolve_models(config_of(tiny_pair()[0]))
    check_rank_agreement(resolved, TorchKernels(), Two("torch"))  # type: ignore[arg-type]
    said = "kernels is 'C with fused products' on rank 1 and 'torch' on rank 0; .* set ATEN_CPU_CAPABILITY=avx2"
    with pytest.raises(ConfigError, match=said):
        check_rank_agreement(resolved, TorchKernels(), Two("C with fused products"))  # type: ignore[arg-type]


@pytest.mark.skipif(level_of_cpu() == "baseline", reason="this CPU, or torch's setting, has no AVX2")
def test_aten_cpu_capability_avx2_selects_c_kernels_compiled_for_avx2() -> None:
    """With it a CPU that multiplies bfloat16 in pairs or tiles computes as one that has AVX2 alone."""
    ask = (
        "import torch; from cluster.engine.backends import select_kernels; "
        "print(select_kernels('auto', torch.device('cpu'), torch.bfloat16).description)"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    said = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() in ("C, compiled for avx2", "torch; C is not compiled here")
