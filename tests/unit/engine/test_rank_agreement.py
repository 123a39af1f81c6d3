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


class TwoRankMesh:
    """A fake mesh of two ranks. Rank 1 reports `peer_kernels` as its kernels; all else is as on rank 0."""

    rank = 0

    def __init__(self, peer_kernels: str) -> None:
        self._peer_kernels = peer_kernels

    def all_gather_text(self, name: str, text: str) -> list[str]:
        return [text, json.dumps(json.loads(text) | {"kernels": self._peer_kernels})]


def test_gang_with_different_kernels_between_ranks_is_refused() -> None:
    resolved = resolve_models(config_of(tiny_pair()[0]))
    check_rank_agreement(resolved, TorchKernels(), TwoRankMesh("torch"))  # type: ignore[arg-type]
    expected_message = (
        "kernels is 'C with fused products' on rank 1 and 'torch' on rank 0; .* set ATEN_CPU_CAPABILITY=avx2"
    )
    with pytest.raises(ConfigError, match=expected_message):
        check_rank_agreement(resolved, TorchKernels(), TwoRankMesh("C with fused products"))  # type: ignore[arg-type]


@pytest.mark.skipif(level_of_cpu() == "baseline", reason="this CPU, or torch's setting, has no AVX2")
def test_aten_cpu_capability_avx2_selects_c_kernels_compiled_for_avx2() -> None:
    """With this setting, a CPU that multiplies bfloat16 in pairs or tiles computes like a CPU with AVX2 only."""
    code = (
        "import torch; from cluster.engine.backends import select_kernels; "
        "print(select_kernels('auto', torch.device('cpu'), torch.bfloat16).description)"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() in ("C, compiled for avx2", "torch; C is not compiled here")
