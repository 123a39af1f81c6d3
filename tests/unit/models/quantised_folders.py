"""Writers of tiny checkpoints with quantised projections in their producers' layouts, and an oracle of each checkpoint.

This file writes the layouts number by number, so that it shares no code with the product's readers.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.families import random_model
from tests.support.family_sizes import SIZES
from tests.support.float64_transformers import Oracle, exact
from tests.support.tiny_checkpoints import folder_of_session
from tests.unit.models.checkpoints import Tensors

LLAMA = SIZES | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4}
MIXTRAL = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 3}
GROUP_SIZE = 32
UNEVEN_GROUP_SIZE = 80  # divides neither width, so the last group of each output has fewer inputs
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """A quantised matrix: `codes` `[O, I]` are integers from 0 on, `scales` and `zeros` are `[O, G]`.

    `values` `[O, I]` is the matrix that they encode.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    values: Tensor


def quantise_weight(weight: Tensor, bits: int, group: int, zeros: bool, dtype: torch.dtype) -> Codes:
    """Round `weight` to codes of `bits` bits by groups of `group` inputs.

    With `zeros` every group has a random zero point, else zero is the middle code.
    """
    outputs, inputs = weight.shape
    group_indices = torch.arange(inputs) // group
    magnitudes = torch.stack(
        [weight.float()[:, group_indices == g].abs().amax(-1) for g in range(int(group_indices[-1]) + 1)], 1
    )
    scales = (magnitudes / 2 ** (bits - 1)).to(dtype)
    zero_points = torch.full_like(scales, 2 ** (bits - 1))
    if zeros:
        zero_points = torch.randint(0, 2**bits, zero_points.shape, generator=torch.Generator().manual_seed(outputs)).to(
            dtype
        )
    per_input = [group_values.double()[:, group_indices] for group_values in (scales, zero_points)]
    codes = (weight.double() / per_input[0] + per_input[1]).round().clamp(0, 2**bits - 1)
    return Codes(codes.int(), scales, zero_points.int(), (codes - per_input[1]) * per_input[0])


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes `[n, m]` into int32 words `[n, m * bits / 32]`: code `order[i]` of each word is at bit i * bits."""
    codes_per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % codes_per_word))
    words = padded.unflatten(1, (-1, codes_per_word))
    words = words if order is None else words[..., order]
    return (words << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)  # a word of 2^31 or more becomes negative


# Each function below returns a writer. A writer takes a weight and returns its stored tensors, by the ends of their
# names, and the dequantised matrix.


def fp8(kind: str) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        block_shape, group_shape = (
            tuple(-(-n // 128) for n in weight.shape),
            (weight.shape[0], weight.shape[1] // GROUP_SIZE),
        )
        size = {"tensor": (), "row": (weight.shape[0], 1), "groups": group_shape}.get(kind, block_shape)
        scales = torch.rand(size) + 0.5
        if kind in ("powers", "groups"):
            scales = 2.0 ** torch.randint(-9, 3, size)
        expanded_scales = scales
        if size == group_shape:
            expanded_scales = scales.repeat_interleave(GROUP_SIZE, 1)
        elif size == block_shape:
            expanded_scales = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[
                :, : weight.shape[1]
            ]
        codes = (weight.float() / expanded_scales).to(torch.float8_e4m3fn)
        scale_name = "weight_scale_inv" if kind in ("block", "powers") else "weight_scale"
        stored_scales = {
            "powers": lambda: scales.to(torch.float8_e8m0fnu),
            "groups": lambda: (scales.log2() + 127).to(torch.uint8),
            "4-d scales": lambda: scales[:, None, :, None],
        }.get(kind, lambda: scales)
        tensors = {"weight": codes, scale_name: stored_scales(), "input_scale": torch.ones(())}
        return tensors, codes.double() * expanded_scales.double()

    return write


def int8(group: int | None, zeros: bool = False) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        quantised_weight = quantise_weight(weight, 8, group or weight.shape[1], zeros, torch.bfloat16)
        tensors = {"weight": (quantised_weight.codes - 128).to(torch.int8), "weight_scale": quantised_weight.scales}
        if zeros:
            tensors["weight_zero_point"] = (quantised_weight.zeros - 128).to(torch.int8)
        return tensors, quantised_weight.values

    return write


def compressed(bits: int, group: int | None, zeros: bool = False) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        quantised_weight = quantise_weight(weight, bits, group or weight.shape[1], zeros, torch.bfloat16)
        shape = torch.tensor(weight.shape)
        tensors = {
            "weight_packed": pack_words(quantised_weight.codes, bits),
            "weight_scale": quantised_weight.scales,
            "weight_shape": shape,
        }
        if zeros:
            tensors["weight_zero_point"] = pack_words(quantised_weight.zeros.T, bits).T
        return tensors, quantised_weight.values

    return write


def blocks(rows_per_block: int, columns_per_block: int) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    """Return a writer of FP8 by blocks of any size. The last blocks may be partial."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight.shape
        scales = torch.rand(-(-outputs // rows_per_block), -(-inputs // columns_per_block)) + 0.5
        expanded_scales = scales[torch.arange(outputs) // rows_per_block][:, torch.arange(inputs) // columns_per_block]
        codes = (weight.float() / expanded_scales).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}, codes.double() * expanded_scales.double()

    return write


def awq(group: int = GROUP_SIZE) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        quantised_weight = quantise_weight(weight, 4, group, True, torch.float16)
        tensors = {
            "qweight": pack_words(quantised_weight.codes.T, 4, AWQ_ORDER),
            "qzeros": pack_words(quantised_weight.zeros.T, 4, AWQ_ORDER),
        }
        return {**tensors, "scales": quantised_weight.scales.T}, quantised_weight.values

    return write


def gptq(
    bits: int = 4, zero_offset: int = 1, shuffled: bool = False, group: int = GROUP_SIZE
) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if shuffled else None
        order = torch.arange(inputs) if order is None else order
        quantised_weight = quantise_weight(weight[:, order], bits, group, True, torch.float16)
        inverse_order = order.argsort()
        codes_per_word = 32 // bits
        ones = sum(1 << bits * place for place in range(codes_per_word))
        zeros = (
            pack_words(quantised_weight.zeros.T, bits) - zero_offset * ones
        )  # a subtraction of words: a zero can borrow from the next one
        tensors = {
            "qweight": pack_words(quantised_weight.codes[:, inverse_order], bits).T,
            "qzeros": zeros,
            "scales": quantised_weight.scales.T,
        }
        return {**tensors, "g_idx": (inverse_order // group).int()}, quantised_weight.values[:, inverse_order]

    return write


@dataclass(frozen=True)
class Format:
    """A quantisation format: the writer of a projection, and the quantisation config.

    `description` is how the log names the packed format; None: the product never keeps such weights packed.
    """

    write: Callable[[Tensor], tuple[Tensors, Tensor]]
    description: str | None
    config: dict[str, Any] = field(default_factory=dict)


def quant_config(method: str, **keys: object) -> dict[str, Any]:
    return {"quant_method": method, **keys}


FORMATS = {
    "fp8 tensor": Format(fp8("tensor"), "fp8 by output", quant_config("compressed-tensors", format="float-quantized")),
    "fp8 row": Format(fp8("row"), "fp8 by output", quant_config("compressed-tensors", format="float-quantized")),
    "fp8 block": Format(fp8("block"), "fp8 by ", quant_config("fp8", weight_block_size=[128, 128])),
    "fp8 block powers": Format(
        fp8("powers"), "fp8 by ", quant_config("fp8", weight_block_size=[128, 128], scale_fmt="ue8m0")
    ),
    "fp8 block 4-d scales": Format(fp8("4-d scales"), "fp8 by ", quant_config("modelopt", quant_algo="FP8_PB_WO")),
    "fp8 row fbgemm": Format(fp8("row"), "fp8 by output", quant_config("fbgemm_fp8", activation_scale_ub=1200.0)),
    "mxfp8": Format(fp8("groups"), "fp8 by groups of 32", quant_config("modelopt", quant_algo="MXFP8")),
    "int8 row": Format(int8(None), "int8 by output", quant_config("compressed-tensors", format="int-quantized")),
    "int8 zeros": Format(
        int8(GROUP_SIZE, True), "int8 by groups of 32", quant_config("compressed-tensors", format="int-quantized")
    ),
    "int4": Format(
        compressed(4, GROUP_SIZE), "int4 by groups of 32", quant_config("compressed-tensors", format="pack-quantized")
    ),
    "int4 row": Format(
        compressed(4, None), "int4 by output", quant_config("compressed-tensors", format="pack-quantized")
    ),
    "int4 zeros": Format(
        compressed(4, GROUP_SIZE, True),
        "int4 by groups of 32",
        quant_config("compressed-tensors", format="pack-quantized"),
    ),
    "packed int8": Format(
        compressed(8, GROUP_SIZE, True),
        "int8 by groups of 32",
        quant_config("compressed-tensors", format="pack-quantized"),
    ),
    "awq": Format(awq(), "int4 by groups of 32", quant_config("awq", bits=4, group_size=GROUP_SIZE, version="gemm")),
    "gptq": Format(gptq(), "int4 by groups of 32", quant_config("gptq", bits=4, group_size=GROUP_SIZE, desc_act=False)),
    "gptq int8": Format(gptq(8), "int8 by groups of 32", quant_config("gptq", bits=8, group_size=GROUP_SIZE)),
    "gptq v2": Format(
        gptq(4, 0),
        "int4 by groups of 32",
        quant_config("gptq", bits=4, group_size=GROUP_SIZE, checkpoint_format="gptq_v2"),
    ),
    "auto-round": Format(
        gptq(),
        "int4 by groups of 32",
        quant_config("auto-round", packing_format="auto_round:auto_gptq", group_size=GROUP_SIZE),
    ),
    "gptq by activation": Format(
        gptq(4, 1, True), None, quant_config("gptq", bits=4, group_size=GROUP_SIZE, desc_act=True)
    ),
}


def group_config(group_size: int, bits: int, **keys: object) -> dict[str, Any]:
    """Return compressed-tensors' config for linear layers in which `group_size` inputs share a scale."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": False}
    return quant_config(
        "compressed-tensors", config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, **keys
    )


INT4 = "int4 by groups of 80"
AUTO_ROUND = quant_config("auto-round", packing_format="auto_round:auto_gptq", bits=4, group_size=UNEVEN_GROUP_SIZE)
PARTIAL_GROUP_FORMATS = {
    "fp8 groups, uneven": Format(
        blocks(1, UNEVEN_GROUP_SIZE),
        "fp8 by groups of 80",
        quant_config("fp8", weight_block_size=[1, UNEVEN_GROUP_SIZE]),
    ),
    "fp8 blocks, uneven": Format(
        blocks(72, UNEVEN_GROUP_SIZE),
        "fp8 by groups of 80",
        quant_config("fp8", weight_block_size=[72, UNEVEN_GROUP_SIZE]),
    ),
    "int8, uneven": Format(
        int8(UNEVEN_GROUP_SIZE, True),
        "int8 by groups of 80",
        group_config(UNEVEN_GROUP_SIZE, 8, format="int-quantized"),
    ),
    "int4, uneven": Format(
        compressed(4, UNEVEN_GROUP_SIZE, True), INT4, group_config(UNEVEN_GROUP_SIZE, 4, format="pack-quantized")
    ),
    "awq, uneven": Format(awq(UNEVEN_GROUP_SIZE), INT4, quant_config("awq", bits=4, group_size=UNEVEN_GROUP_SIZE)),
    "gptq, uneven": Format(
        gptq(group=UNEVEN_GROUP_SIZE), INT4, quant_config("gptq", bits=4, group_size=UNEVEN_GROUP_SIZE, desc_act=False)
    ),
    "gptq int8, uneven": Format(
        gptq(8, group=UNEVEN_GROUP_SIZE),
        "int8 by groups of 80",
        quant_config("gptq", bits=8, group_size=UNEVEN_GROUP_SIZE, desc_act=False),
    ),
    "auto-round, uneven": Format(gptq(group=UNEVEN_GROUP_SIZE), INT4, AUTO_ROUND),
    # `g_idx` gives the order of inputs, with or without `desc_act` in the config.
    "gptq by activation, uneven": Format(
        gptq(4, 1, True, UNEVEN_GROUP_SIZE),
        None,
        quant_config("gptq", bits=4, group_size=UNEVEN_GROUP_SIZE, desc_act=True),
    ),
    "gptq with an order, uneven": Format(
        gptq(4, 1, True, UNEVEN_GROUP_SIZE), None, quant_config("gptq", bits=4, group_size=UNEVEN_GROUP_SIZE)
    ),
}
"""Formats whose groups divide neither the 128 nor the 192 inputs of the target's layers."""


@cache
def quantised(name: str, experts: bool = False) -> tuple[str, Oracle]:
    """Write a Llama (a Mixtral if `experts`) with projections in the format `name`; return its folder and its oracle.

    The oracle is the same model with the dequantised weights.
    """
    weight_format = (FORMATS | PARTIAL_GROUP_FORMATS)[name]
    model_class, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)
    if experts:
        model_class, config = transformers.MixtralForCausalLM, transformers.MixtralConfig(**MIXTRAL)
    model = random_model(model_class, config)
    folder = folder_of_session() / f"quantised-{name.replace(' ', '-')}-{experts}"
    with exact():
        model.save_pretrained(folder)
    dense_tensors, stored_tensors = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    dequantised: Tensors = {}
    for key, weight in dense_tensors.items():
        if not re.search(r"layers.*(_proj|experts\.\d+\.w\d)\.weight", key):
            stored_tensors[key] = weight
            continue
        packed_tensors, dequantised[key] = weight_format.write(weight)
        stem = key.removesuffix("weight")
        stored_tensors |= {stem + suffix: tensor.contiguous() for suffix, tensor in packed_tensors.items()}
    save_file(stored_tensors, folder / "model.safetensors")
    fill(model, dequantised)
    config_dict = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_dict | {"quantization_config": weight_format.config}))
    return str(folder), Oracle(model)


def fill(model: Any, weights: Tensors) -> None:
    """Copy `weights`, named as in the files, into the model. `transformers` has a layer's experts in one tensor."""
    state = model.state_dict()
    for key, weight in weights.items():
        if (match := re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w(\d)\.weight", key)) is None:
            state[key].copy_(weight)
            continue
        layer, expert, projection = match[1], int(match[2]), int(match[3])
        if projection == 2:
            state[f"{layer}.mlp.experts.down_proj"][expert].copy_(weight)
        else:
            gate_up = state[f"{layer}.mlp.experts.gate_up_proj"][expert]
            half = gate_up.shape[0] // 2
            (gate_up[:half] if projection == 1 else gate_up[half:]).copy_(weight)
