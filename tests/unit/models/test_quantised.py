"""Quantised targets: FP8 by tensor, row and block, and MXFP4, whole and by slice, against their numbers elsewhere."""

import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cluster.arch import read_target
from cluster.arch.safetensors.tensors import check_tensors
from cluster.config import ConfigError
from cluster.models.quant import block_scaled, mxfp4
from tests.exact import Oracle, exact
from tests.families import SIZES, random_model
from tests.loading import check_target
from tests.tiny import folder_of_session
from tests.unit.models.checkpoints import Tensors, copy_of
from tests.unit.models.sharded import run_text
from tests.unit.models.test_targets import relative, text

WIDE = SIZES | {"hidden_size": 160, "intermediate_size": 296, "num_hidden_layers": 2, "head_dim": 40}
NAME = "model.layers.1.mlp.up_proj.weight"


def by_block(weight: Tensor) -> tuple[str, Tensor, Tensor]:
    """Scale name, scales, and the scale of each number."""
    blocks = tuple(-(-size // 128) for size in weight.shape)
    scales = torch.rand(blocks) + 0.5
    spread = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return "weight_scale_inv", scales, spread


def by_row(weight: Tensor) -> tuple[str, Tensor, Tensor]:
    scales = torch.rand(weight.shape[0], 1) + 0.5
    return "weight_scale", scales, scales.expand_as(weight)


def by_tensor(weight: Tensor) -> tuple[str, Tensor, Tensor]:
    scale = torch.rand(()) + 0.5
    return "weight_scale", scale, scale.expand_as(weight)


SCALINGS: dict[str, Callable[[Tensor], tuple[str, Tensor, Tensor]]] = {
    "block": by_block,
    "row": by_row,
    "tensor": by_tensor,
}


@cache
def fp8(kind: str) -> tuple[str, Oracle]:
    """A Llama whose projections are FP8, and the same numbers in an oracle."""
    model = random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**WIDE))
    folder = folder_of_session() / f"fp8-{kind}"
    with exact():
        model.save_pretrained(folder)
    held: Tensors = {}
    for name, weight in model.state_dict().items():
        if not re.search(r"layers.*_proj", name):
            held[name] = weight.clone()
            continue
        end, scales, spread = SCALINGS[kind](weight)
        packed = (weight.to(torch.float32) / spread).to(torch.float8_e4m3fn)
        weight.copy_(packed.to(torch.float32) * spread)
        stem = name.removesuffix("weight")
        held |= {name: packed, stem + end: scales, stem + "input_scale": torch.ones(())}
    save_file(held, folder / "model.safetensors")
    return str(folder), Oracle(model)


@cache
def packed_experts() -> tuple[str, Oracle]:
    """A gpt-oss whose experts are MXFP4. On two ranks an expert's 48 columns cut a group of 32 in two."""
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2}
    sizes |= {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 2}
    model = random_model(transformers.GptOssForCausalLM, transformers.GptOssConfig(**sizes))
    folder = folder_of_session() / "mxfp4"
    with exact():
        model.save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        e, inputs, outputs = held.pop(name).shape
        blocks = torch.randint(256, (e, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 127, (e, outputs, inputs // 32), dtype=torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.state_dict()[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float64))
    save_file(held, folder / "model.safetensors")
    return str(folder), Oracle(model)


@pytest.mark.parametrize("kind", [*SCALINGS, "mxfp4"])
def test_quantised_targets_are_their_numbers(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, oracle = packed_experts() if kind == "mxfp4" else fp8(kind)
    tokens = text(2, 40)
    logits, stream = oracle.forward(tokens)
    with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
        for size in (1, 2):
            for ours, boundaries in run_text(folder, tokens, [30, *[1] * 10], size):
                assert relative(ours, logits) < 1e-9
                assert max(relative(a, b) for a, b in zip(boundaries, stream, strict=True)) < 1e-9
    assert "quantised tensors were dequantised on load" in caplog.text


def test_a_cut_of_blocks_has_the_scales_of_its_place() -> None:
    values = torch.randn(300, 280).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3)
    whole = block_scaled(values, scales, 0, 0)
    assert torch.equal(whole[130:260, 100:200], block_scaled(values[130:260, 100:200], scales, 130, 100))
    assert float(whole[299, 0]) == float(values[299, 0].float() * scales[2, 0])


def test_every_mxfp4_value() -> None:
    """All bytes, and scales to both ends of the exponents."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    for exponent in (0, 1, 126, 127, 128, 250):
        scales = torch.full((16, 1), exponent, dtype=torch.uint8)
        theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float64)[0].T
        assert torch.equal(mxfp4(blocks, scales).double(), theirs)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("block", lambda t: t.pop(NAME + "_scale_inv"), r"up_proj\.weight' in .*\.safetensors' is FP8 and needs one"),
        ("block", lambda t: t.update({NAME + "_scale": torch.ones(1)}), "needs one scale.*has"),
        (
            "block",
            lambda t: t.update({NAME + "_scale_inv": torch.ones(2, 3)}),
            r"up_proj\.weight_scale_inv' in .* is \[2, 3\] but .* of \[296, 160\] needs \[3, 2\]",
        ),
        ("row", lambda t: t.update({NAME + "_scale": torch.ones(4, 1)}), r"is \[4, 1\]"),
        ("tensor", lambda t: t.update({NAME + "_zero": torch.ones(1)}), r"does not know.*up_proj\.weight_zero"),
        ("mxfp4", lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"), "down_proj_scales' is missing"),
        (
            "mxfp4",
            lambda t: t.update({"model.layers.1.mlp.experts.down_proj_blocks": torch.ones(3, 64, 2, 16).byte()}),
            r"down_proj_blocks' in .* is \[3, 64, 2, 16\] but the config requires \[3, 64, 3, 16\]",
        ),
    ],
)
def test_wrong_scales_are_named(kind: str, change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    folder = packed_experts()[0] if kind == "mxfp4" else fp8(kind)[0]
    check_tensors(folder, read_target(folder))
    with pytest.raises(ConfigError, match=message) as caught:
        check_target(copy_of(folder, tmp_path / "bad", change))
    assert str(tmp_path / "bad") in str(caught.value)
