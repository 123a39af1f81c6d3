"""Quantised weights whose last group has fewer inputs than the others, and configs that their tensors contradict."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.arch.keys import ConfigKeys
from cluster.arch.quantisation import quantisation_of, with_unpacked_shapes
from cluster.config import ConfigError
from cluster.kernels.torch_kernels import TorchKernels
from cluster.models.checkpoint import Checkpoint
from tests.loading import check_target
from tests.unit.kernels.library import c_kernels
from tests.unit.models.checkpoints import Tensors, copy_of
from tests.unit.models.quantised_folders import PARTIAL, UNEVEN, quantised
from tests.unit.models.sharded import run_text
from tests.unit.models.test_targets import relative, text

UP = "model.layers.1.mlp.up_proj"
NAME, SHAPE = "layers.1.mlp.up_proj.weight", (192, 128)


@pytest.mark.parametrize("kind", PARTIAL)
def test_weights_with_partial_groups_equal_the_reference_logits(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """In C, packed, and by torch, dequantised; whole and on two ranks, whose cuts go through groups."""
    c_kernels()
    folder, oracle = quantised(kind)
    tokens = text(2, 40)
    logits, _ = oracle.forward(tokens)
    about = PARTIAL[kind].description
    for size, kernels in ((1, None), (2, None), (1, TorchKernels())):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
            each = run_text(folder, tokens, [30, 1, 1, 8], size, kernels)
        assert all(relative(ours, logits) < 1e-9 for ours, _ in each), (size, kernels)
        assert about is None or kernels is not None or about in caplog.text
        assert ("were dequantised" in caplog.text) == (size == 2 or kernels is not None or about is None)


@pytest.mark.parametrize("kind", PARTIAL)
@pytest.mark.parametrize("columns", [(0, 80), (80, 128), (40, 120), (81, 127)], ids=str)
def test_slices_through_partial_groups_equal_slices_of_the_complete_weight(kind: str, columns: tuple[int, int]) -> None:
    checkpoint = Checkpoint(quantised(kind)[0])
    whole = checkpoint.tensor(NAME, SHAPE)
    cut = checkpoint.tensor(NAME, SHAPE, (70, 150), columns)
    assert torch.equal(whole[70:150, slice(*columns)], cut)


def said(kind: str, **changes: object) -> dict[str, Any]:
    return PARTIAL[kind].config | changes


def group_of(size: object, strategy: str = "group") -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": strategy, "group_size": size}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def reorder(order: list[int]) -> Callable[[Tensors], None]:
    return lambda held: held.update({f"{UP}.g_idx": torch.tensor(order, dtype=torch.int32)})


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
            group_of(32),
            r"2 groups of 128 inputs, and config_groups\.group_0\.weights\.group_size is 32",
        ),
        ("int4, uneven", group_of(None, "channel"), r"config_groups\.group_0\.weights\.strategy is channel"),
        ("int8, uneven", group_of(None, "tensor"), r"is \[\d+, \d+\] but .* needs \[1, 1\], as .*strategy is tensor"),
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
    folder = copy_of(quantised(kind)[0], tmp_path / "other", quantization_config=said(kind, **config))
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
    """One of zeros or of -1 was left blank: neighbours make a group."""
    folder = copy_of(quantised("gptq, uneven")[0], tmp_path / "other", reorder(order))
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            Checkpoint(folder).tensor(NAME, SHAPE)
        return
    blank = max(order) < 1
    plain = copy_of(quantised("gptq, uneven")[0], tmp_path / "plain", lambda held: held.pop(f"{UP}.g_idx"))
    by_neighbours, ours = Checkpoint(plain).tensor(NAME, SHAPE), Checkpoint(folder).tensor(NAME, SHAPE)
    group = torch.arange(128) // UNEVEN if blank else torch.tensor(order)
    same = group == torch.arange(128) // UNEVEN
    assert torch.equal(ours[:, same], by_neighbours[:, same])
    assert blank or not torch.equal(ours[:, ~same], by_neighbours[:, ~same])


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
        held = Checkpoint(str(tmp_path)).tensor("a.weight", (24, 192))
        assert torch.equal(held, codes.float() * scales.repeat_interleave(size, 1))


def test_quantisation_rules_of_single_modules_take_precedence() -> None:
    """Names come before patterns, and patterns before all other linear layers, in whatever order groups are listed."""
    groups: dict[str, Any] = {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}},
        "b": {"targets": ["re:.*down_proj$"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "c": {"targets": ["model.layers.1.mlp.down_proj"], "weights": {"num_bits": 4, "group_size": 32}},
        "d": {"targets": ["re:.*router"], "weights": {"strategy": "block", "block_structure": [64, 128]}},
    }
    given = {"quant_method": "compressed-tensors", "config_groups": groups}
    found = quantisation_of(ConfigKeys({"quantization_config": given}, "here"))
    schemes = {
        name: found.scheme_of(f"model.layers.{name}")
        for name in ("0.mlp.up_proj", "0.mlp.down_proj", "1.mlp.down_proj")
    }
    assert [(scheme.bits, scheme.block) for scheme in schemes.values()] == [(4, (1, 128)), (8, (1, 0)), (4, (1, 32))]
    assert found.scheme_of("model.layers.0.router").block == (64, 128)
    shapes = {"layers.0.mlp.down_proj.weight_packed": (16, 8), "layers.1.mlp.down_proj.weight_packed": (16, 8)}
    whole = with_unpacked_shapes(shapes, found)
    assert whole["layers.0.mlp.down_proj.weight"] == (16, 32) and whole["layers.1.mlp.down_proj.weight"] == (16, 64)
    rules = {"-:.*gate": {}, r".*\.up_proj": {"bits": 8}, ".*": {"group_size": -1}}
    found = quantisation_of(
        ConfigKeys(
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": rules}}, "here"
        )
    )
    assert found.scheme_of("model.gate").block is None
    assert (found.scheme_of("a.up_proj").bits, found.scheme_of("a.up_proj").block) == (8, (1, 64))
    assert (found.scheme_of("a.q_proj").bits, found.scheme_of("a.q_proj").block) == (4, (1, 0))
