"""Quantised checkpoints with the extra tensors and settings of their producers, and the settings that are refused."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.arch import read_target
from cluster.arch.safetensors.tensors import check_tensors
from cluster.config import ConfigError
from tests.support.loading import check_target
from tests.unit.kernels.library import c_kernels
from tests.unit.models.checkpoints import Tensors, copy_of
from tests.unit.models.quantised_folders import FORMATS, GROUP_SIZE, quantised
from tests.unit.models.sharded import run_text
from tests.unit.models.test_targets import relative_error, text

TOKENS = text(2, 40)


def check_logits(folder: str, kind: str, experts: bool = False) -> None:
    """Check that a changed copy of a checkpoint passes the tensor checks, loads, and gives the reference's logits."""
    c_kernels()
    tokens = text(3, 40) if experts else TOKENS
    logits, _ = quantised(kind, experts)[1].forward(tokens)
    check_tensors(folder, read_target(folder))
    check_target(folder)
    for size in (1, 2):
        assert all(relative_error(ours, logits) < 1e-9 for ours, _ in run_text(folder, tokens, [30, 1, 1, 8], size))


def add_biases(tensors: Tensors, value: float = 0.0) -> None:
    """Add a bias to every packed matrix, as AutoGPTQ and optimum do even if the model has no biases."""
    for name, scales in list(tensors.items()):
        if name.endswith(".scales"):
            tensors[name.replace("scales", "bias")] = torch.full((scales.shape[1],), value, dtype=torch.float16)


@pytest.mark.parametrize("experts", [False, True])
def test_all_zero_biases_of_packed_matrices_are_ignored(
    experts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(quantised("gptq", experts)[0], tmp_path / "biases", add_biases)
    with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
        check_logits(folder, "gptq", experts)
    assert "biases that hold only zeros were left out" in caplog.text
    nonzero_folder = copy_of(
        quantised("gptq", experts)[0], tmp_path / "numbers", lambda tensors: add_biases(tensors, 0.5)
    )
    with pytest.raises(ConfigError, match=r"that the model does not know: \['model\.layers\.0.*\.bias'"):
        run_text(nonzero_folder, TOKENS, [40], 1)


def test_bias_of_an_unpacked_matrix_is_refused_as_unknown(tmp_path: Path) -> None:
    bias = {"model.layers.0.mlp.up_proj.bias": torch.zeros(192)}
    folder = copy_of(quantised("fp8 row")[0], tmp_path / "bias", lambda tensors: tensors.update(bias))
    with pytest.raises(ConfigError, match="does not know"):
        check_tensors(folder, read_target(folder))
    with pytest.raises(ConfigError, match="does not know"):
        check_target(folder)


def test_gptq_dynamic_rule_sets_the_group_size(tmp_path: Path) -> None:
    quantisation_config = FORMATS["gptq"].config | {"group_size": 64, "dynamic": {r"+:.*": {"group_size": GROUP_SIZE}}}
    check_logits(copy_of(quantised("gptq")[0], tmp_path / "dynamic", quantization_config=quantisation_config), "gptq")


def test_attention_and_activation_scales_are_accepted(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for layer in (0, 1):
            for name in ("q_scale", "prob_scale", "q_proj.output_scale", "k_scale"):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.ones(1)
            tensors[f"model.layers.{layer}.mlp.up_proj.input_scale"] = torch.ones(1)
            tensors[f"model.layers.{layer}.mlp.up_proj.input_scale_ub"] = torch.ones(1)
            tensors[f"model.layers.{layer}.mlp.down_proj.act_scale"] = torch.ones(1)

    for kind in ("int4", "fp8 row"):
        check_logits(copy_of(quantised(kind)[0], tmp_path / kind.replace(" ", "-"), change), kind)


@pytest.mark.parametrize("kind", ["gptq", "int4"])
def test_blank_g_idx_order_is_ignored(kind: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith(".g_idx"):
                tensors[name] = torch.zeros_like(tensor)
            elif name.endswith(".weight_packed"):
                order = torch.full((tensor.shape[1] * 8,), -1, dtype=torch.int32)
                tensors[name.replace("weight_packed", "weight_g_idx")] = order

    quantisation_config = FORMATS[kind].config | ({"desc_act": True} if kind == "gptq" else {})
    check_logits(copy_of(quantised(kind)[0], tmp_path / "blank", change, quantization_config=quantisation_config), kind)


@pytest.mark.parametrize("expert_index", [0, 1])
def test_experts_with_different_input_orders_are_dequantised(
    expert_index: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint can have one expert whose inputs are in the order of activations, and others without that order."""
    stem = f"model.layers.1.block_sparse_moe.experts.{expert_index}.w1"

    def change(tensors: Tensors) -> None:
        """Reverse the order of the groups; the dequantised matrix stays the same."""
        for suffix in ("scales", "qzeros"):
            tensors[f"{stem}.{suffix}"] = tensors[f"{stem}.{suffix}"].flip(0)
        tensors[f"{stem}.g_idx"] = tensors[f"{stem}.g_idx"].max() - tensors[f"{stem}.g_idx"]

    quantisation_config = FORMATS["gptq"].config | {"desc_act": True}
    folder = copy_of(quantised("gptq", True)[0], tmp_path / "odd", change, quantization_config=quantisation_config)
    with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
        check_logits(folder, "gptq", True)
    assert "were dequantised" in caplog.text and "stay packed" in caplog.text


def test_single_weight_file_is_read_under_any_name(tmp_path: Path) -> None:
    folder = copy_of(quantised("gptq")[0], tmp_path / "named")
    Path(folder, "model.safetensors").rename(Path(folder, "gptq_model-4bit-32g.safetensors"))
    check_logits(folder, "gptq")
    Path(folder, "other.safetensors").write_bytes(Path(folder, "gptq_model-4bit-32g.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_target(folder)


@pytest.mark.parametrize("where", ["compression_config", "text_config"])
def test_quantisation_config_is_read_from_alternative_places(where: str, tmp_path: Path) -> None:
    folder = copy_of(quantised("gptq v2")[0], tmp_path / "elsewhere")
    config = json.loads(Path(folder, "config.json").read_text())
    quantisation_config = config.pop("quantization_config")
    config[where] = (
        quantisation_config if where == "compression_config" else {"quantization_config": quantisation_config}
    )
    Path(folder, "config.json").write_text(json.dumps(config))
    check_logits(folder, "gptq v2")


@pytest.mark.parametrize(
    ("quantisation_config", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' is not served"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not served"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not served; known: 4, 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:gptq"}, "packing_format 'auto_round:gptq'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "mx_fp"}, "data_type"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 7}}}},
            "num_bits 7 is not served; known: 4, 8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}},
            },
            "location 'input' is not served",
        ),
    ],
)
def test_unsupported_quantisation_settings_are_refused_by_name(
    quantisation_config: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = copy_of(quantised("int4")[0], tmp_path / "other", quantization_config=quantisation_config)
    with pytest.raises(ConfigError, match=message):
        read_target(folder)


def test_integer_scales_are_refused(tmp_path: Path) -> None:
    for kind, suffix in (("fp8 row", "weight_scale"), ("int4", "weight_scale"), ("gptq", "scales")):
        name = f"model.layers.1.mlp.up_proj.{suffix}"
        scales = load_file(Path(quantised(kind)[0]) / "model.safetensors")[name]
        integer_scales = {name: torch.ones_like(scales, dtype=torch.int32)}
        folder = copy_of(
            quantised(kind)[0],
            tmp_path / kind.replace(" ", "-"),
            lambda t, replacement=integer_scales: t.update(replacement),
        )
        with pytest.raises(ConfigError, match=rf"{suffix}' in .* is I32, which scales are not"):
            check_target(folder)
