"""The dtype that `dtype: auto` selects."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from cluster.arch.dtypes import MIN_BFLOAT16_PARAMETERS
from cluster.arch.read import read_target
from cluster.arch.resolve import resolve_models
from cluster.arch.safetensors.tensors import count_parameters
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.engine.models import device_facts
from cluster.tools.summary import summary
from cluster.tools.tensor_report import ServingSetup, inspect
from tests.support.tiny_checkpoints import target_folder
from tests.unit.kernels.library import c_library
from tests.unit.models.checkpoints import copy_of

CPU = torch.device("cpu")


def test_auto_dtype_keeps_bfloat16_on_cpu_for_large_targets_with_c_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernels in C read bfloat16 in half the time of float32. torch multiplies single rows of bfloat16 slowly."""
    c_library()
    bfloat16_folder, float32_folder = (
        copy_of(target_folder(), tmp_path / dtype, None, torch_dtype=dtype, dtype=dtype)
        for dtype in ("bfloat16", "float32")
    )

    def dtype_of(folder: str, backend: Literal["auto", "torch"] = "auto") -> str:
        config = EngineConfig(model_path=folder, attention_backend=backend)
        return resolve_models(config, *device_facts(config, CPU)).dtype

    size = count_parameters(read_target(bfloat16_folder))
    assert size < MIN_BFLOAT16_PARAMETERS and dtype_of(bfloat16_folder) == "float32"
    monkeypatch.setattr("cluster.arch.dtypes.MIN_BFLOAT16_PARAMETERS", size)
    assert dtype_of(bfloat16_folder) == "bfloat16"
    assert dtype_of(float32_folder) == "float32", "the checkpoint is float32"
    assert dtype_of(bfloat16_folder, "torch") == "float32"


def test_inspect_reports_the_dtype_of_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    c_library()
    folder = copy_of(target_folder(), tmp_path / "target", None, torch_dtype="bfloat16", dtype="bfloat16")
    monkeypatch.setattr("cluster.arch.dtypes.MIN_BFLOAT16_PARAMETERS", 1)
    config = EngineConfig(model_path=folder, device="cpu", max_total_tokens=256, mixed_prefill_size=8)
    assert build_engine(config).info().dtype == "bfloat16"
    for report in (inspect(folder, None, ServingSetup(device="cpu")), summary(folder, device="cpu")):
        assert report is not None and report.memory["dtype"] == "bfloat16"
