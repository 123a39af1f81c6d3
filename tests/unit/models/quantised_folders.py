"""Tiny checkpoints whose projections are quantised, in the layouts of their producers, and an oracle of their numbers.

The layouts are written number by number here, so that they share no code with what reads them.
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

from tests.exact import Oracle, exact
from tests.families import SIZES, random_model
from tests.tiny import folder_of_session
from tests.unit.models.checkpoints import Tensors

LLAMA = SIZES | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4}
MIXTRAL = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 3}
GROUP = 32
UNEVEN = 80  # inputs of a group that divide neither width: the last group of each output has fewer
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """Whole numbers `[O, I]` from 0 on, `scales` and `zeros` `[O, G]`, and the matrix that they mean."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    numbers: Tensor


def codes_of(weight: Tensor, bits: int, group: int, zeros: bool, dtype: torch.dtype) -> Codes:
    """`weight` rounded to whole numbers of some bits by groups; without `zeros` zero is the middle."""
    outputs, inputs = weight.shape
    of = torch.arange(inputs) // group
    most = torch.stack([weight.float()[:, of == g].abs().amax(-1) for g in range(int(of[-1]) + 1)], 1)
    scales = (most / 2 ** (bits - 1)).to(dtype)
    zero = torch.full_like(scales, 2 ** (bits - 1))
    if zeros:
        zero = torch.randint(0, 2**bits, zero.shape, generator=torch.Generator().manual_seed(outputs)).to(dtype)
    spread = [part.double()[:, of] for part in (scales, zero)]
    codes = (weight.double() / spread[0] + spread[1]).round().clamp(0, 2**bits - 1)
    return Codes(codes.int(), scales, zero.int(), (codes - spread[1]) * spread[0])


def packed(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Whole numbers `[n, m]` -> int32 `[n, m * bits / 32]`: the number `order[i]` of each lot at bit i * bits."""
    lot = 32 // bits
    rows = []
    for row in torch.nn.functional.pad(codes, (0, -codes.shape[1] % lot)).tolist():
        words = []
        for at in range(0, len(row), lot):
            word = sum(row[at + (order[i] if order else i)] << i * bits for i in range(lot))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def fp8(kind: str) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks, groups = tuple(-(-n // 128) for n in weight.shape), (weight.shape[0], weight.shape[1] // GROUP)
        size = {"tensor": (), "row": (weight.shape[0], 1), "groups": groups}.get(kind, blocks)
        scales = torch.rand(size) + 0.5
        if kind in ("powers", "groups"):
            scales = 2.0 ** torch.randint(-9, 3, size)
        spread = scales
        if size == groups:
            spread = scales.repeat_interleave(GROUP, 1)
        elif size == blocks:
            spread = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        codes = (weight.float() / spread).to(torch.float8_e4m3fn)
        end = "weight_scale_inv" if kind in ("block", "powers") else "weight_scale"
        stored = {
            "powers": lambda: scales.to(torch.float8_e8m0fnu),
            "groups": lambda: (scales.log2() + 127).to(torch.uint8),
            "apart": lambda: scales[:, None, :, None],
        }.get(kind, lambda: scales)
        held = {"weight": codes, end: stored(), "input_scale": torch.ones(())}
        return held, codes.double() * spread.double()

    return write


def int8(group: int | None, zeros: bool = False) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = codes_of(weight, 8, group or weight.shape[1], zeros, torch.bfloat16)
        held = {"weight": (made.codes - 128).to(torch.int8), "weight_scale": made.scales}
        if zeros:
            held["weight_zero_point"] = (made.zeros - 128).to(torch.int8)
        return held, made.numbers

    return write


def compressed(bits: int, group: int | None, zeros: bool = False) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = codes_of(weight, bits, group or weight.shape[1], zeros, torch.bfloat16)
        shape = torch.tensor(weight.shape)
        held = {"weight_packed": packed(made.codes, bits), "weight_scale": made.scales, "weight_shape": shape}
        if zeros:
            held["weight_zero_point"] = packed(made.zeros.T, bits).T
        return held, made.numbers

    return write


def blocks(tall: int, wide: int) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    """FP8 by blocks of any size, the last ones partial."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight.shape
        scales = torch.rand(-(-outputs // tall), -(-inputs // wide)) + 0.5
        spread = scales[torch.arange(outputs) // tall][:, torch.arange(inputs) // wide]
        codes = (weight.float() / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}, codes.double() * spread.double()

    return write


def awq(group: int = GROUP) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        made = codes_of(weight, 4, group, True, torch.float16)
        held = {"qweight": packed(made.codes.T, 4, AWQ_ORDER), "qzeros": packed(made.zeros.T, 4, AWQ_ORDER)}
        return {**held, "scales": made.scales.T}, made.numbers

    return write


def gptq(
    bits: int = 4, less: int = 1, shuffled: bool = False, group: int = GROUP
) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if shuffled else None
        order = torch.arange(inputs) if order is None else order
        made = codes_of(weight[:, order], bits, group, True, torch.float16)
        back = order.argsort()
        lot = 32 // bits
        ones = sum(1 << bits * place for place in range(lot))
        zeros = packed(made.zeros.T, bits) - less * ones  # of the whole word, so that a zero borrows of its neighbour
        held = {"qweight": packed(made.codes[:, back], bits).T, "qzeros": zeros, "scales": made.scales.T}
        return {**held, "g_idx": (back // group).int()}, made.numbers[:, back]

    return write


@dataclass(frozen=True)
class Format:
    """How to write a projection, what the config says of it, and what keeps it packed, None: nothing."""

    write: Callable[[Tensor], tuple[Tensors, Tensor]]
    description: str | None
    config: dict[str, Any] = field(default_factory=dict)


def says(method: str, **more: object) -> dict[str, Any]:
    return {"quant_method": method, **more}


FORMATS = {
    "fp8 tensor": Format(fp8("tensor"), "fp8 by output", says("compressed-tensors", format="float-quantized")),
    "fp8 row": Format(fp8("row"), "fp8 by output", says("compressed-tensors", format="float-quantized")),
    "fp8 block": Format(fp8("block"), "fp8 by ", says("fp8", weight_block_size=[128, 128])),
    "fp8 block powers": Format(fp8("powers"), "fp8 by ", says("fp8", weight_block_size=[128, 128], scale_fmt="ue8m0")),
    "fp8 block apart": Format(fp8("apart"), "fp8 by ", says("modelopt", quant_algo="FP8_PB_WO")),
    "fp8 row fbgemm": Format(fp8("row"), "fp8 by output", says("fbgemm_fp8", activation_scale_ub=1200.0)),
    "mxfp8": Format(fp8("groups"), "fp8 by groups of 32", says("modelopt", quant_algo="MXFP8")),
    "int8 row": Format(int8(None), "int8 by output", says("compressed-tensors", format="int-quantized")),
    "int8 zeros": Format(int8(GROUP, True), "int8 by groups of 32", says("compressed-tensors", format="int-quantized")),
    "int4": Format(compressed(4, GROUP), "int4 by groups of 32", says("compressed-tensors", format="pack-quantized")),
    "int4 row": Format(compressed(4, None), "int4 by output", says("compressed-tensors", format="pack-quantized")),
    "int4 zeros": Format(
        compressed(4, GROUP, True), "int4 by groups of 32", says("compressed-tensors", format="pack-quantized")
    ),
    "packed int8": Format(
        compressed(8, GROUP, True), "int8 by groups of 32", says("compressed-tensors", format="pack-quantized")
    ),
    "awq": Format(awq(), "int4 by groups of 32", says("awq", bits=4, group_size=GROUP, version="gemm")),
    "gptq": Format(gptq(), "int4 by groups of 32", says("gptq", bits=4, group_size=GROUP, desc_act=False)),
    "gptq int8": Format(gptq(8), "int8 by groups of 32", says("gptq", bits=8, group_size=GROUP)),
    "gptq v2": Format(
        gptq(4, 0), "int4 by groups of 32", says("gptq", bits=4, group_size=GROUP, checkpoint_format="gptq_v2")
    ),
    "auto-round": Format(
        gptq(), "int4 by groups of 32", says("auto-round", packing_format="auto_round:auto_gptq", group_size=GROUP)
    ),
    "gptq by activation": Format(gptq(4, 1, True), None, says("gptq", bits=4, group_size=GROUP, desc_act=True)),
}


def by_groups(size: int, bits: int, **more: object) -> dict[str, Any]:
    """compressed-tensors' way to say how many inputs of every linear layer share a scale."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": False}
    return says("compressed-tensors", config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, **more)


INT4 = "int4 by groups of 80"
AUTO = says("auto-round", packing_format="auto_round:auto_gptq", bits=4, group_size=UNEVEN)
PARTIAL = {
    "fp8 groups, uneven": Format(blocks(1, UNEVEN), "fp8 by groups of 80", says("fp8", weight_block_size=[1, UNEVEN])),
    "fp8 blocks, uneven": Format(
        blocks(72, UNEVEN), "fp8 by groups of 80", says("fp8", weight_block_size=[72, UNEVEN])
    ),
    "int8, uneven": Format(int8(UNEVEN, True), "int8 by groups of 80", by_groups(UNEVEN, 8, format="int-quantized")),
    "int4, uneven": Format(compressed(4, UNEVEN, True), INT4, by_groups(UNEVEN, 4, format="pack-quantized")),
    "awq, uneven": Format(awq(UNEVEN), INT4, says("awq", bits=4, group_size=UNEVEN)),
    "gptq, uneven": Format(gptq(group=UNEVEN), INT4, says("gptq", bits=4, group_size=UNEVEN, desc_act=False)),
    "gptq int8, uneven": Format(
        gptq(8, group=UNEVEN), "int8 by groups of 80", says("gptq", bits=8, group_size=UNEVEN, desc_act=False)
    ),
    "auto-round, uneven": Format(gptq(group=UNEVEN), INT4, AUTO),
    # The order of inputs counts whether or not the config speaks of one.
    "gptq by activation, uneven": Format(
        gptq(4, 1, True, UNEVEN), None, says("gptq", bits=4, group_size=UNEVEN, desc_act=True)
    ),
    "gptq with an order, uneven": Format(gptq(4, 1, True, UNEVEN), None, says("gptq", bits=4, group_size=UNEVEN)),
}
"""Formats whose groups divide neither the 128 nor the 192 inputs of the target's layers."""


@cache
def quantised(name: str, experts: bool = False) -> tuple[str, Oracle]:
    """A Llama, or a Mixtral, whose projections are in this format, and the same numbers in an oracle."""
    chosen = (FORMATS | PARTIAL)[name]
    kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)
    if experts:
        kind, config = transformers.MixtralForCausalLM, transformers.MixtralConfig(**MIXTRAL)
    model = random_model(kind, config)
    folder = folder_of_session() / f"quantised-{name.replace(' ', '-')}-{experts}"
    with exact():
        model.save_pretrained(folder)
    stored, held = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    numbers: Tensors = {}
    for key, weight in stored.items():
        if not re.search(r"layers.*(_proj|experts\.\d+\.w\d)\.weight", key):
            held[key] = weight
            continue
        written, numbers[key] = chosen.write(weight)
        stem = key.removesuffix("weight")
        held |= {stem + end: tensor.contiguous() for end, tensor in written.items()}
    save_file(held, folder / "model.safetensors")
    fill(model, numbers)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | {"quantization_config": chosen.config}))
    return str(folder), Oracle(model)


def fill(model: Any, numbers: Tensors) -> None:
    """Put `numbers`, under the names of the files, into the model; `transformers` holds a layer's experts together."""
    state = model.state_dict()
    for key, weight in numbers.items():
        if (found := re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w(\d)\.weight", key)) is None:
            state[key].copy_(weight)
            continue
        layer, expert, which = found[1], int(found[2]), int(found[3])
        if which == 2:
            state[f"{layer}.mlp.experts.down_proj"][expert].copy_(weight)
        else:
            both = state[f"{layer}.mlp.experts.gate_up_proj"][expert]
            half = both.shape[0] // 2
            (both[:half] if which == 1 else both[half:]).copy_(weight)
