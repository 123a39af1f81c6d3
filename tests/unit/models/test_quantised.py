"""Quantised targets in every format, packed and dequantised, complete and sliced, against a reference with the
dequantised weights.
"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cluster.arch import read_target
from cluster.arch.safetensors.tensors import check_tensors
from cluster.config import ConfigError
from cluster.kernels.quantised import Quantised
from cluster.kernels.torch_kernels import TorchKernels
from cluster.models.checkpoint import Checkpoint
from cluster.models.formats import Index, powers_of_two, unpack_nibbles
from tests.support.families import random_model
from tests.support.family_sizes import SIZES
from tests.support.float64_transformers import Oracle, exact
from tests.support.loading import check_target
from tests.support.tiny_checkpoints import folder_of_session
from tests.unit.kernels.library import c_kernels
from tests.unit.models.checkpoints import Tensors, copy_of
from tests.unit.models.quantised_folders import FORMATS, quantised
from tests.unit.models.sharded import run_text
from tests.unit.models.test_targets import relative_error, text

NAME = "model.layers.1.mlp.up_proj.weight"
SPLIT_GROUP_KINDS = (
    "fp8 block",
    "fp8 block powers",
    "fp8 block 4-d scales",
    "mxfp4",
)  # two ranks cut through a group: 192 inputs in groups of 128, an expert's 96 inputs in groups of 32
STEM = NAME.removesuffix(".weight")


@cache
def packed_experts() -> tuple[str, Oracle]:
    """Write a gpt-oss with MXFP4 experts; return its folder and its oracle.

    With two ranks, each has 48 of an expert's columns, which cuts a group of 32 in two.
    """
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2}
    sizes |= {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 2}
    model = random_model(transformers.GptOssForCausalLM, transformers.GptOssConfig(**sizes))
    folder = folder_of_session() / "mxfp4"
    with exact():
        model.save_pretrained(folder)
    stored_tensors = load_file(folder / "model.safetensors")
    for name in [name for name in stored_tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored_tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 127, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.state_dict()[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float64))
    save_file(stored_tensors, folder / "model.safetensors")
    return str(folder), Oracle(model)


def checkpoint_of(kind: str) -> tuple[str, Oracle]:
    return packed_experts() if kind == "mxfp4" else quantised(kind)


@pytest.mark.parametrize("kind", [*FORMATS, "mxfp4"])
def test_packed_targets_equal_the_reference_logits(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The C kernels run the targets in float64."""
    c_kernels()
    folder, oracle = checkpoint_of(kind)
    tokens = text(2, 40)
    logits, stream = oracle.forward(tokens)
    description = "fp4 by groups of 32" if kind == "mxfp4" else FORMATS[kind].description
    for size in (1, 2):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
            outputs = run_text(folder, tokens, [30, 1, 1, 8], size)
        stays_packed = description is not None and (size == 1 or kind not in SPLIT_GROUP_KINDS)
        for ours, boundaries in outputs:
            assert relative_error(ours, logits) < 1e-9
            assert max(relative_error(a, b) for a, b in zip(boundaries, stream, strict=True)) < 1e-9
        assert ("were dequantised" in caplog.text) == (not stays_packed)
        assert ("stay packed" in caplog.text) == (description is not None)
        assert description is None or description in caplog.text


@pytest.mark.parametrize("kind", [*FORMATS, "mxfp4"])
def test_dequantised_targets_equal_the_reference_logits(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The torch kernels run the targets on two ranks, whose shards are cut from the dequantised weights."""
    folder, oracle = checkpoint_of(kind)
    tokens = text(2, 40)
    logits, _ = oracle.forward(tokens)
    with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
        for ours, _ in run_text(folder, tokens, [30, 1, 1, 8], 2, TorchKernels()):
            assert relative_error(ours, logits) < 1e-9
    assert "were dequantised on load" in caplog.text
    assert "stay packed" not in caplog.text


@pytest.mark.parametrize("kind", ["fp8 row", "int8 row", "int4 zeros", "awq", "gptq"])
def test_quantised_experts_equal_the_reference_logits(kind: str) -> None:
    folder, oracle = quantised(kind, experts=True)
    tokens = text(3, 40)
    logits, _ = oracle.forward(tokens)
    for size in (1, 2):
        assert all(relative_error(ours, logits) < 1e-9 for ours, _ in run_text(folder, tokens, [30, 1, 1, 8], size))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if "block" not in kind])
@pytest.mark.parametrize("rows", [None, (8, 24), (3, 101)], ids=str)
@pytest.mark.parametrize("columns", [None, (32, 96), (7, 50), (64, 128)], ids=str)
def test_slices_of_quantised_weights_equal_slices_of_the_complete_weight(
    kind: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
) -> None:
    folder = quantised(kind)[0]
    checkpoint_and_name = Checkpoint(folder), "layers.1.mlp.up_proj.weight"
    complete_weight = checkpoint_and_name[0].tensor(checkpoint_and_name[1], (192, 128))
    weight_slice = complete_weight[slice(*rows) if rows else slice(None), slice(*columns) if columns else slice(None)]
    matrix_slice = checkpoint_and_name[0].matrix(checkpoint_and_name[1], (192, 128), rows, columns)
    assert isinstance(matrix_slice, Quantised)
    assert torch.equal(matrix_slice.dequantised(), weight_slice)
    aligned = columns != (7, 50) or "row" in kind or "tensor" in kind
    assert c_kernels().keeps_quantised(matrix_slice, torch.float32) == (aligned and kind != "gptq by activation")


HOST_TENSORS = "weight_shape", "g_idx"  # tensors whose values the loading code needs on the host


@pytest.mark.parametrize("kind", [*FORMATS, "mxfp4"])
def test_quantised_codes_are_unpacked_on_the_requested_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a GPU, and the default device is the meta device, whose tensors have no values. So a tensor
    that the loading code does not create on the requested device cannot give the right values. Only few tensors, those
    of `HOST_TENSORS`, are read on the host.
    """
    expert = 1 if kind == "mxfp4" else None
    name = "layers.1.mlp.experts.down_proj" if expert else "layers.1.mlp.up_proj.weight"
    cuts: list[tuple[tuple[int, int] | None, ...]] = [(None, None), ((3, 51), None), ((8, 24), (7, 50))]
    checkpoint, original_read, host_reads = (
        Checkpoint(checkpoint_of(kind)[0], read_target(checkpoint_of(kind)[0]).stored_name),
        Checkpoint.read,
        set[str](),
    )
    shape = (3, 64, 96) if expert else (192, 128)

    def read(self: Checkpoint, stored: str, index: Index = (), device: torch.device | None = None) -> torch.Tensor:
        host_reads.update([] if device else [stored])
        return original_read(self, stored, index, device)

    for rows, columns in cuts:
        expected = checkpoint.tensor(name, shape, rows, columns, expert)
        with monkeypatch.context() as patched, torch.device("meta"):
            patched.setattr(Checkpoint, "read", read)
            matrix = checkpoint.matrix(name, shape, rows, columns, expert, torch.device("cpu"))
            assert isinstance(matrix, Quantised)
            dequantised = matrix.dequantised()
        assert dequantised.device.type == "cpu" and torch.equal(dequantised, expected)
    assert all(stored.endswith(HOST_TENSORS) for stored in host_reads), host_reads


def test_slice_of_a_block_scaled_weight_uses_the_scales_of_its_position(tmp_path: Path) -> None:
    codes, scales = torch.randn(300, 280).to(torch.float8_e4m3fn), torch.rand(3, 3)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    complete_weight = checkpoint.tensor("a.weight", (300, 280))
    assert torch.equal(
        complete_weight[130:260, 100:200], checkpoint.tensor("a.weight", (300, 280), (130, 260), (100, 200))
    )
    assert float(complete_weight[299, 0]) == float(codes[299, 0].float() * scales[2, 0])


def test_mxfp4_dequantisation_equals_transformers_for_every_value() -> None:
    """The test covers all bytes, and scales at both ends of the exponent range."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    for exponent in (0, 1, 126, 127, 128, 250):
        scales = torch.full((16, 1), exponent, dtype=torch.uint8)
        expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float64)[0].T
        quantised_blocks = Quantised("fp4", unpack_nibbles(blocks).flatten(-2), powers_of_two(scales), None, 32)
        assert torch.equal(quantised_blocks.dequantised().double(), expected)


def test_log_says_that_activations_are_not_quantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": True}}}
    quantisation_config = FORMATS["int8 row"].config | {"config_groups": groups}
    folder = copy_of(quantised("int8 row")[0], tmp_path / "w8a8", quantization_config=quantisation_config)
    with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
        run_text(folder, text(2, 5), [5], 1)
    assert "activations are not quantised" in caplog.text


def test_weight_shape_tensor_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    wrong_shape = {STEM + ".weight_shape": torch.tensor([192, 127])}
    folder = copy_of(quantised("int4")[0], tmp_path / "other", lambda t: t.update(wrong_shape))
    with pytest.raises(
        ConfigError, match=r"weight_shape' in .* says \[192, 127\] but the config requires \[192, 128\]"
    ):
        Checkpoint(folder).matrix("layers.1.mlp.up_proj.weight", (192, 128))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "fp8 block",
            lambda t: t.pop(NAME + "_scale_inv"),
            r"up_proj\.weight' in .*\.safetensors' is FP8 and needs one",
        ),
        ("fp8 block", lambda t: t.update({NAME + "_scale": torch.ones(1)}), "needs one scale.*has"),
        (
            "fp8 block",
            lambda t: t.update({NAME + "_scale_inv": torch.ones(3, 2)}),
            r"up_proj\.weight_scale_inv' in .* is \[3, 2\] but .* of \[192, 128\] needs \[2, 1\]",
        ),
        ("fp8 row", lambda t: t.update({NAME + "_scale": torch.ones(4, 1)}), r"is \[4, 1\]"),
        ("fp8 tensor", lambda t: t.update({NAME + "_zero": torch.ones(1)}), r"does not know.*up_proj\.weight_zero"),
        ("int4", lambda t: t.pop(STEM + ".weight_scale"), r"up_proj\.weight_scale' is missing"),
        (
            "int4",
            lambda t: t.update({STEM + ".weight_packed": torch.ones(192, 15).int()}),
            r"weight_packed' in .* is I32 \[192, 15\], which holds 128 inputs neither in 4 nor 8 bits",
        ),
        ("int4 zeros", lambda t: t.update({STEM + ".weight_zero_point": torch.ones(192, 4).int()}), r"is \[192, 4\]"),
        ("awq", lambda t: t.pop(STEM + ".qzeros"), r"up_proj\.qzeros' is missing"),
        ("awq", lambda t: t.update({STEM + ".scales": torch.ones(4, 191)}), r"is \[4, 191\]"),
        ("gptq", lambda t: t.update({STEM + ".qweight": torch.ones(16, 191).int()}), r"requires \[16, 192\]"),
        ("mxfp4", lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"), "down_proj_scales' is missing"),
        (
            "mxfp4",
            lambda t: t.update({"model.layers.1.mlp.experts.down_proj_blocks": torch.ones(3, 64, 2, 16).byte()}),
            r"down_proj_blocks' in .* is \[3, 64, 2, 16\] but the config requires \[3, 64, 3, 16\]",
        ),
    ],
)
def test_wrong_quantisation_tensors_are_refused_by_name(
    kind: str, change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    folder = checkpoint_of(kind)[0]
    check_tensors(folder, read_target(folder))
    with pytest.raises(ConfigError, match=message) as caught:
        check_target(copy_of(folder, tmp_path / "bad", change))
    assert str(tmp_path / "bad") in str(caught.value)
