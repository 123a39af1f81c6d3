"""What `dtype: auto` computes in."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.arch.dtypes import MANY
from cluster.arch.resolve import resolve_models
from cluster.arch.safetensors.tensors import parameters
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.engine.models import _dtype
from cluster.tools.summary import summary
from cluster.tools.tensor_report import ServingSetup, inspect
from tests.tiny import target_folder
from tests.unit.kernels.library import c_library
from tests.unit.models.checkpoints import copy_of

CPU = torch.device("cpu")


def test_a_large_target_stays_narrow_on_a_cpu_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels in C, which read it in half the time; torch multiplies single rows of bfloat16 slowly."""
    c_library()
    resolved = resolve_models(EngineConfig(model_path=target_folder()))
    narrow = replace(resolved, target=replace(resolved.target, dtype="bfloat16"))
    assert parameters(narrow.target) < MANY and _dtype(narrow, CPU) == torch.float32
    monkeypatch.setattr("cluster.arch.dtypes.MANY", parameters(narrow.target))
    assert _dtype(narrow, CPU) == torch.bfloat16
    wide = replace(resolved, target=replace(resolved.target, dtype="float32"))
    assert _dtype(wide, CPU) == torch.float32, "not stored so"
    by_torch = replace(narrow, config=narrow.config.model_copy(update={"attention_backend": "torch"}))
    assert _dtype(by_torch, CPU) == torch.float32


def test_inspect_says_what_the_engine_computes_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    c_library()
    folder = copy_of(target_folder(), tmp_path / "target", None, torch_dtype="bfloat16", dtype="bfloat16")
    monkeypatch.setattr("cluster.arch.dtypes.MANY", 1)
    config = EngineConfig(model_path=folder, device="cpu", max_total_tokens=256, mixed_prefill_size=8)
    assert build_engine(config).info().dtype == "bfloat16"
    for report in (inspect(folder, None, ServingSetup(device="cpu")), summary(folder, device="cpu")):
        assert report is not None and report.memory["dtype"] == "bfloat16"
