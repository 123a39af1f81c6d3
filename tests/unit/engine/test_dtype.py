"""What `dtype: auto` computes in."""

from dataclasses import replace

import pytest
import torch

from cluster.arch.dtypes import MANY
from cluster.arch.resolve import resolve_models
from cluster.arch.safetensors.tensors import parameters
from cluster.config import EngineConfig
from cluster.engine.models import _dtype
from tests.tiny import target_folder
from tests.unit.kernels.library import c_library

CPU = torch.device("cpu")


def test_a_large_target_stays_narrow_on_a_cpu_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels in C, which read it in half the time; torch multiplies single rows of bfloat16 slowly."""
    c_library()
    resolved = resolve_models(EngineConfig(model_path=target_folder()))
    narrow = replace(resolved, target=replace(resolved.target, dtype="bfloat16"))
    assert parameters(narrow.target) < MANY and _dtype(narrow, CPU) == torch.float32
    monkeypatch.setattr("cluster.engine.models.MANY", parameters(narrow.target))
    assert _dtype(narrow, CPU) == torch.bfloat16
    wide = replace(resolved, target=replace(resolved.target, dtype="float32"))
    assert _dtype(wide, CPU) == torch.float32, "not stored so"
    by_torch = replace(narrow, config=narrow.config.model_copy(update={"attention_backend": "torch"}))
    assert _dtype(by_torch, CPU) == torch.float32
