"""What `aerie inspect` says of quantised weights is what a rank holds, of targets, experts and drafts."""

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
from tests.families import made
from tests.loading import context, load_draft, load_target
from tests.tiny import draft_folder
from tests.unit.kernels.library import c_kernels
from tests.unit.models.quantised_folders import FORMATS, quantised


def taken(part: Any) -> int:
    """Bytes of the weights and tensors in `part` of a model."""
    if isinstance(part, Weight | Stack | Tensor):
        return part.nbytes
    if isinstance(part, list | tuple):
        return sum(taken(each) for each in part)
    if is_dataclass(part):
        return sum(taken(getattr(part, field.name)) for field in fields(part))
    return 0


def of_target(target: DecoderTarget) -> int:
    return taken([target._embed, target._layers, target._norm, target._head])


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["fp8 block", "int8 zeros", "int4", "awq", "gptq by activation"])
def test_inspect_reports_the_memory_of_a_quantised_target(kind: str, tp: int, experts: bool) -> None:
    c_kernels()
    folder = quantised(kind, experts)[0]
    report = inspect(folder, None, ServingSetup(tp, dtype="float32", device="cpu"))
    target = load_target(folder, context(torch.float32, part=Shard(0, tp)))
    assert report.problems == []
    padding = 2 * 64 * (16 - 3) * 4 if experts else 0  # of two routers of 3 columns, in panels of 16
    assert report.memory["target_bytes_per_rank"] == of_target(target) - padding
    assert report.target["quantised"] == target.quantised
    on_gpu = inspect(folder, None, ServingSetup(tp, dtype="float32"))
    assert on_gpu.memory["target_bytes_per_rank"] > 1.5 * of_target(target) or "activation" in kind
    assert all("were dequantised" in line for line in on_gpu.target["quantised"])


@pytest.mark.parametrize("kind", ["int4", "dense"])
def test_inspect_reports_the_memory_of_the_rank_with_the_most_experts(kind: str) -> None:
    """Of three or five whole ones in two parts the second has one more; those of the first are nobody's here."""
    c_kernels()
    folder = quantised(kind, True)[0] if kind == "int4" else made("mixtral", "three of five, window of 8").folder
    report = inspect(folder, None, ServingSetup(2, ep=2, dtype="float32", device="cpu"))
    given = context(torch.float32, part=Shard(0, 2))
    target = load_target(folder, replace(given, sharding=given.sharding._replace(experts=Shard(1, 2))))
    experts, layers = (3, 2) if kind == "int4" else (5, 4)
    panels = layers * target.arch.hidden * (16 - experts) * 4  # of routers, in panels of 16
    maps = layers * experts * 8  # which part has which expert
    assert report.memory["target_bytes_per_rank"] == of_target(target) - panels - maps
    assert report.problems == [] and report.memory["ep"] == 2
    first = experts // 2
    words = "0 on rank 0, 1 to 2 on rank 1" if kind == "int4" else "0 to 1 on rank 0, 2 to 4 on rank 1"
    assert report.features["experts_on"] == f"{experts} experts, {words}"
    for tensor in report.target["tensors"]:
        if ".experts." in tensor["goes_to"]:
            here = int(tensor["goes_to"].split(".experts.")[1].split(".")[0]) >= first
            assert (tensor["numbers"] > 0) is here and (not here or tensor["numbers"] >= 48 * 32)


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
    held, numbers = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            held[name] = weight
            continue
        written, numbers[name] = FORMATS[kind].write(weight)
        held |= {name.removesuffix("weight") + end: tensor.contiguous() for end, tensor in written.items()}
    save_file(held, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": FORMATS[kind].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = context()
    draft = load_draft(str(tmp_path), load_target(target, given), given)
    assert len(draft.quantised) == 1
    assert draft.quantised[0].startswith("4 quantised weights stay packed: ")
    down = next(numbers[name] for name in numbers if "down_proj" in name)
    assert torch.equal(draft._layers[0].mlp.down.dense(), down.t())
    report = inspect(target, str(tmp_path), ServingSetup(device="cpu"))
    assert report.problems == []
    assert report.draft is not None
    assert report.draft["quantised"] == draft.quantised


def test_engine_info_reports_packed_and_dequantised_weights() -> None:
    c_kernels()
    settings = {"dtype": "float32", "device": "cpu", "max_total_tokens": 256, "mixed_prefill_size": 8}
    config = EngineConfig(model_path=quantised("int4")[0], **settings)
    said = "target: 8 quantised weights {}: 8 int4 by groups of 32"
    assert build_engine(config).info().quantised == (said.format("stay packed"),)
    by_torch = build_engine(config.model_copy(update={"attention_backend": "torch"})).info()
    assert by_torch.quantised == (said.format("were dequantised on load"),)
