"""Quantised weights whose last group has fewer inputs than the others, and configs that contradict the tensors."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.arch.keys import ConfigKeys
from cluster.arch.quantisation import quantisation_of, with_unpacked_shapes
from cluster.config import ConfigError
from cluster.kernels.torch_kernels import TorchKernels
from cluster.models.checkpoint import Checkpoint
from tests.support.loading import check_target
from tests.unit.kernels.library import c_kernels
from tests.unit.models.checkpoints import Tensors, copy_of
from tests.unit.models.quantised_folders import PARTIAL_GROUP_FORMATS, UNEVEN_GROUP_SIZE, quantised
from tests.unit.models.sharded import run_text
from tests.unit.models.test_targets import relative_error, text

UP = "model.layers.1.mlp.up_proj"
NAME, SHAPE = "layers.1.mlp.up_proj.weight", (192, 128)


@pytest.mark.parametrize("kind", PARTIAL_GROUP_FORMATS)
def test_weights_with_partial_groups_equal_the_reference_logits(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The C kernels use packed weights on one rank; two ranks cut through groups; the torch kernels dequantise."""
    c_kernels()
    folder, oracle = quantised(kind)
    tokens = text(2, 40)
    logits, _ = oracle.forward(tokens)
    description = PARTIAL_GROUP_FORMATS[kind].description
    for size, kernels in ((1, None), (2, None), (1, TorchKernels())):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
            outputs = run_text(folder, tokens, [30, 1, 1, 8], size, kernels)
        assert all(relative_error(ours, logits) < 1e-9 for ours, _ in outputs), (size, kernels)
        assert description is None or kernels is not None or description in caplog.text
        assert ("were dequantised" in caplog.text) == (size == 2 or kernels is not None or description is None)


@pytest.mark.parametrize("kind", PARTIAL_GROUP_FORMATS)
@pytest.mark.parametrize("columns", [(0, 80), (80, 128), (40, 120), (81, 127)], ids=str)
def test_slices_through_partial_groups_equal_slices_of_the_complete_weight(kind: str, columns: tuple[int, int]) -> None:
    checkpoint = Checkpoint(quantised(kind)[0])
    complete_weight = checkpoint.tensor(NAME, SHAPE)
    weight_slice = checkpoint.tensor(NAME, SHAPE, (70, 150), columns)
    assert torch.equal(complete_weight[70:150, slice(*columns)], weight_slice)


def quantisation_config(kind: str, **changes: object) -> dict[str, Any]:
    return PARTIAL_GROUP_FORMATS[kind].config | changes


def config_groups(size: object, strategy: str = "group") -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": strategy, "group_size": size}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def reorder(order: list[int]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{UP}.g_idx": torch.tensor(order, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (
            "fp8 groups, uneven",
            {"weight_block_size": [1, 32]},
            r"2 groups of 128 inputs, and weight_block_size is \[1, 32\], which makes 4",
        ),
        (
            "fp8 blocks, uneven",
            {"weight_block_size": [128, 128]},
            r"needs \[1, 1\], as weight_block_size is \[128, 128\]",
        ),
        ("fp8 groups, uneven", {"weight_block_size": [1]}, "weight_block_size must be two positive integers"),
        (
            "int4, uneven",
            config_groups(32),
            r"2 groups of 128 inputs, and config_groups\.group_0\.weights\.group_size is 32",
        ),
        ("int4, uneven", config_groups(None, "channel"), r"config_groups\.group_0\.weights\.strategy is channel"),
        (
            "int8, uneven",
            config_groups(None, "tensor"),
            r"is \[\d+, \d+\] but .* needs \[1, 1\], as .*strategy is tensor",
        ),
        ("awq, uneven", {"group_size": 32}, "2 groups of 128 inputs, and group_size is 32, which makes 4"),
        ("awq, uneven", {"group_size": -1}, "2 groups of 128 inputs, and group_size is -1, which makes 1"),
        ("awq, uneven", {"quant_method": "gptq"}, r"qweight' in .* holds 128 inputs neither in 4 nor 8 bits"),
        ("gptq, uneven", {"bits": 8}, r"qweight' in .* holds 128 inputs in 4 bits, but .* says that it has 8"),
        ("gptq, uneven", {"group_size": 120}, "3 groups of 192 inputs, and group_size is 120, which makes 2"),
        (
            "gptq, uneven",
            {"dynamic": {r"+:.*up_proj": {"group_size": 32}}},
            r"dynamic\.\+:\.\*up_proj\.group_size is 32",
        ),
        ("gptq, uneven", {"dynamic": {"(": {}}}, "dynamic '.' is no regular expression"),
        (
            "auto-round, uneven",
            {"extra_config": {UP: {"group_size": 64, "bits": 8}}},
            "in 4 bits, but .* that it has 8",
        ),
        (
            "auto-round, uneven",
            {"extra_config": {"up_p.*": {"group_size": 32}}},
            r"extra_config\.up_p\.\*\.group_size is 32",
        ),
    ],
)
def test_quantisation_config_that_contradicts_the_tensors_is_refused(
    kind: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = copy_of(quantised(kind)[0], tmp_path / "other", quantization_config=quantisation_config(kind, **config))
    with pytest.raises(ConfigError, match=message):
        check_target(folder)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([i // 64 for i in range(128)], None),
        ([i // 40 for i in range(128)], "names group 3, but there are scales of 2 groups"),
        ([i // 100 for i in range(128)], "puts 100 inputs into one group, and group_size is 80"),
        ([0] * 127, r"g_idx' in .* is \[127\] but the config requires \[128\]"),
        ([0] * 128, None),
        ([-1] * 128, None),
    ],
)
def test_gptq_g_idx_order_is_validated_and_applied(order: list[int], message: str | None, tmp_path: Path) -> None:
    """A `g_idx` of only 0 or only -1 is blank: consecutive inputs form a group."""
    folder = copy_of(quantised("gptq, uneven")[0], tmp_path / "other", reorder(order))
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            Checkpoint(folder).tensor(NAME, SHAPE)
        return
    blank = max(order) < 1
    groups = torch.arange(128) // UNEVEN_GROUP_SIZE if blank else torch.tensor(order)
    expected = gptq_weight(load_file(Path(folder) / "model.safetensors"), groups)
    assert torch.equal(Checkpoint(folder).tensor(NAME, SHAPE), expected)


def gptq_weight(tensors: Tensors, groups: torch.Tensor) -> torch.Tensor:
    """Return the matrix `UP` of a GPTQ checkpoint: (code - zero) * scale, by the group of each input.

    A word holds eight numbers of 4 bits, the first in the lowest bits. One was subtracted from each stored zero.
    """
    shifts = torch.arange(0, 32, 4)
    codes = (tensors[f"{UP}.qweight"][:, None] >> shifts[:, None]).flatten(0, 1) & 15
    zeros = ((tensors[f"{UP}.qzeros"] + 0x11111111)[:, :, None] >> shifts).flatten(1) & 15
    return ((codes - zeros[groups]).float() * tensors[f"{UP}.scales"].float()[groups]).T


def test_group_size_is_inferred_from_shapes_only_if_unambiguous(tmp_path: Path) -> None:
    codes = torch.randn(24, 192).to(torch.float8_e4m3fn)
    for groups, size in ((1, 192), (3, 64), (4, 48), (6, 32), (2, None)):
        scales = torch.rand(24, groups) + 0.5
        save_file({"a.weight": codes, "a.weight_scale": scales}, tmp_path / "model.safetensors")
        if size is None:
            with pytest.raises(
                ConfigError, match=r"a\.weight_scale' in .* 2 groups of 192 inputs, .* 96 or 128; .*group_size"
            ):
                Checkpoint(str(tmp_path)).tensor("a.weight", (24, 192))
            continue
        dequantised = Checkpoint(str(tmp_path)).tensor("a.weight", (24, 192))
        assert torch.equal(dequantised, codes.float() * scales.repeat_interleave(size, 1))


def test_quantisation_rules_of_single_modules_take_precedence() -> None:
    """A module's name has precedence over patterns, and patterns over "Linear", in any order of the groups."""
    groups: dict[str, Any] = {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}},
        "b": {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "c": {"targets": ["model.layers.1.mlp.down_proj"], "weights": {"num_bits": 4, "group_size": 32}},
        "d": {"targets": ["re:.*router"], "weights": {"strategy": "block", "block_structure": [64, 128]}},
    }
    config_dict = {"quant_method": "compressed-tensors", "config_groups": groups}
    quantisation = quantisation_of(ConfigKeys({"quantization_config": config_dict}, "here"))
    schemes = {
        name: quantisation.scheme_of(f"model.layers.{name}")
        for name in ("0.mlp.up_proj", "0.mlp.down_proj", "1.mlp.down_proj")
    }
    assert [(scheme.bits, scheme.block) for scheme in schemes.values()] == [(4, (1, 128)), (8, (1, 0)), (4, (1, 32))]
    assert quantisation.scheme_of("model.layers.0.router").block == (64, 128)
    shapes = {"layers.0.mlp.down_proj.weight_packed": (16, 8), "layers.1.mlp.down_proj.weight_packed": (16, 8)}
    unpacked_shapes = with_unpacked_shapes(shapes, quantisation)
    assert unpacked_shapes["layers.0.mlp.down_proj.weight"] == (16, 32) and unpacked_shapes[
        "layers.1.mlp.down_proj.weight"
    ] == (16, 64)
    rules = {"-:.*gate": {}, r".*\.up_proj": {"bits": 8}, ".*": {"group_size": -1}}
    quantisation = quantisation_of(
        ConfigKeys(
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": rules}}, "here"
        )
    )
    assert quantisation.scheme_of("model.gate").block is None
    assert (quantisation.scheme_of("a.up_proj").bits, quantisation.scheme_of("a.up_proj").block) == (8, (1, 64))
    assert (quantisation.scheme_of("a.q_proj").bits, quantisation.scheme_of("a.q_proj").block) == (4, (1, 0))
