"""`aerie inspect` reports the memory that a rank's quantised weights take: for targets, experts and drafts."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.cli import main
from cluster.config import EngineConfig
from cluster.distributed.mesh import Shard
from cluster.engine import build_engine
from cluster.kernels.interface import Stack, Weight
from cluster.models.target import DecoderTarget
from cluster.tools.tensor_report import ServingSetup, inspect
from tests.support.families import family_checkpoint
from tests.support.loading import context, load_draft, load_target
from tests.support.tiny_checkpoints import draft_folder
from tests.unit.kernels.library import c_kernels
from tests.unit.models.quantised_folders import FORMATS, quantised


def weight_bytes(component: Any) -> int:
    """Return the bytes of the weights and tensors in `component`, a part of a model."""
    if isinstance(component, Weight | Stack | Tensor):
        return component.nbytes
    if isinstance(component, list | tuple):
        return sum(weight_bytes(item) for item in component)
    if is_dataclass(component):
        return sum(weight_bytes(getattr(component, field.name)) for field in fields(component))
    return 0


def target_bytes(target: DecoderTarget) -> int:
    return weight_bytes([target._embed, target._layers, target._norm, target._head])


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["fp8 block", "int8 zeros", "int4", "awq", "gptq by activation"])
def test_inspect_reports_the_memory_of_a_quantised_target(kind: str, tp: int, experts: bool) -> None:
    c_kernels()
    folder = quantised(kind, experts)[0]
    report = inspect(folder, None, ServingSetup(tp, dtype="float32", device="cpu"))
    target = load_target(folder, context(torch.float32, shard=Shard(0, tp)))
    assert report.problems == []
    padding = 2 * 64 * (16 - 3) * 4 if experts else 0  # bytes: two routers of 3 columns, in panels of 16
    assert report.memory["target_bytes_per_rank"] == target_bytes(target) - padding
    assert report.target["quantised"] == target.quantised
    gpu_report = inspect(folder, None, ServingSetup(tp, dtype="float32"))
    assert gpu_report.memory["target_bytes_per_rank"] > 1.5 * target_bytes(target) or "activation" in kind
    assert all("were dequantised" in line for line in gpu_report.target["quantised"])


@pytest.mark.parametrize("kind", ["int4", "dense"])
def test_inspect_reports_the_memory_of_the_rank_with_the_most_experts(kind: str) -> None:
    """Two ranks share three or five experts; rank 1 has one more than rank 0. The report is for rank 1: it counts no
    bytes for the experts of rank 0.
    """
    c_kernels()
    folder = (
        quantised(kind, True)[0]
        if kind == "int4"
        else family_checkpoint("mixtral", "three of five, window of 8").folder
    )
    report = inspect(folder, None, ServingSetup(2, ep=2, dtype="float32", device="cpu"))
    load_context = context(torch.float32, shard=Shard(0, 2))
    target = load_target(folder, replace(load_context, sharding=load_context.sharding._replace(experts=Shard(1, 2))))
    experts, layers = (3, 2) if kind == "int4" else (5, 4)
    panel_padding = layers * target.arch.hidden * (16 - experts) * 4  # bytes of the routers' padding to panels of 16
    expert_map_bytes = layers * experts * 8  # bytes of the tables of which rank has which expert
    assert report.memory["target_bytes_per_rank"] == target_bytes(target) - panel_padding - expert_map_bytes
    assert report.problems == [] and report.memory["ep"] == 2
    first_local_expert = experts // 2
    placement_text = "0 on rank 0, 1 to 2 on rank 1" if kind == "int4" else "0 to 1 on rank 0, 2 to 4 on rank 1"
    assert report.features["experts_on"] == f"{experts} experts, {placement_text}"
    for tensor in report.target["tensors"]:
        if ".experts." in tensor["goes_to"]:
            is_local = int(tensor["goes_to"].split(".experts.")[1].split(".")[0]) >= first_local_expert
            assert (tensor["numbers"] > 0) is is_local and (not is_local or tensor["numbers"] >= 48 * 32)


def test_inspect_prints_whether_weights_stay_packed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantised("int4")[0]
    assert main(["inspect", folder, "--device", "cpu"]) == 0
    assert "8 quantised weights stay packed: 8 int4 by groups of 32" in capsys.readouterr().out
    assert main(["inspect", folder]) == 0
    assert "8 quantised weights were dequantised on load: 8 int4 by groups of 32" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["fp8 row", "int8 row", "int4", "awq", "gptq"])
def test_quantised_draft_stays_packed(kind: str, tmp_path: Path) -> None:
    c_kernels()
    target = quantised("int4")[0]
    source = Path(draft_folder(target))
    stored_tensors, dequantised = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored_tensors[name] = weight
            continue
        packed_tensors, dequantised[name] = FORMATS[kind].write(weight)
        stored_tensors |= {
            name.removesuffix("weight") + suffix: tensor.contiguous() for suffix, tensor in packed_tensors.items()
        }
    save_file(stored_tensors, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": FORMATS[kind].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_context = context()
    draft = load_draft(str(tmp_path), load_target(target, load_context), load_context)
    assert len(draft.quantised) == 1
    assert draft.quantised[0].startswith("4 quantised weights stay packed: ")
    expected_down = next(dequantised[name] for name in dequantised if "down_proj" in name)
    assert torch.equal(draft._layers[0].mlp.down.dense(), expected_down.t())
    report = inspect(target, str(tmp_path), ServingSetup(device="cpu"))
    assert report.problems == []
    assert report.draft is not None
    assert report.draft["quantised"] == draft.quantised


def test_engine_info_reports_packed_and_dequantised_weights() -> None:
    c_kernels()
    settings = {"dtype": "float32", "device": "cpu", "max_total_tokens": 256, "mixed_prefill_size": 8}
    config = EngineConfig(model_path=quantised("int4")[0], **settings)
    message_format = "target: 8 quantised weights {}: 8 int4 by groups of 32"
    assert build_engine(config).info().quantised == (message_format.format("stay packed"),)
    torch_info = build_engine(config.model_copy(update={"attention_backend": "torch"})).info()
    assert torch_info.quantised == (message_format.format("were dequantised on load"),)
