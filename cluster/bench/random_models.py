"""Random-weight models with the shapes of real ones, and drafts for them, as folders that any command can load.

Models that only this process loads can be *sown*: their files have holes in place of matrices, and each matrix is
generated on the device when it is read. That takes seconds, because gigabytes need not be written and read.

A random target always chooses the next token id (last id + 1): its head is its embedding shifted by one row, and the
layers add little. So the correct tokens are known (`oracle_draft.Counting`), with margins larger than any rounding
error. Experts are chosen as evenly as random numbers choose them.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from cluster.arch import TargetArch, read_target
from cluster.arch.safetensors.tensors import parameters, target_tensors
from cluster.config import ConfigError
from cluster.kv.free_memory import free_memory
from cluster.models.checkpoint import Checkpoint
from cluster.models.stored import Index

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
TINY: dict[str, Any] = {"torch_dtype": "float32"}
TINY |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
TINY_EXPERTS = TINY | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": LLAMA | TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "llama-1b": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "llama-8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3-30b-a3b": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "moe_intermediate_size": 768}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True}
    | {"num_experts": 128, "num_experts_per_tok": 8},
    "mla": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280}
    | {"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "moe_intermediate_size": 1408}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1}
    | {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
}
PRESETS |= {
    "tiny-moe": PRESETS["qwen3-30b-a3b"]
    | (TINY_EXPERTS | {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "tiny-mla": PRESETS["mla"]
    | (TINY_EXPERTS | {"n_routed_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32})
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1},
}
"""config.json of each preset, without `COMMON`. `mla` has DeepSeek-V2-Lite's sizes and DeepSeek-V3's gate."""

DRAFT_VOCABULARY = 32000
LEAST_LAYERS = 4  # with fewer layers, the three aux hidden states of an EAGLE-3 draft would not differ
SMALL = 0.05  # scale of what layers add to the residual stream; the embedding has scale 1
EMBEDDING = "embed_tokens.weight"
MEMORY, DISK = 0.5, 0.8  # shares of the free memory and disk that a target may take
BLOCK = (1 << 24) + 3  # period of the random numbers; odd, so that no two rows of a weight are equal
DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}
NAMES = {stored: name for name, (_, stored) in DTYPES.items()}


class MadeUp(NamedTuple):
    """The folders of a target and its draft. The target has `layers` of the preset's `full` number of layers."""

    target: str
    draft: str
    layers: int
    full: int


@contextmanager
def made_up(
    name: str, layers: int | None = None, device: torch.device | None = None, sow: bool = False
) -> Iterator[MadeUp]:
    """A context manager: write the preset `name` to a temporary folder, with `layers` layers or, if None, as many as
    fit. If `sow`, matrices are generated on `device` when read, only in this process and inside the `with` block.

    Raises:
        ConfigError: the preset is unknown, or does not fit this machine even with `LEAST_LAYERS` layers.
    """
    if name not in PRESETS:
        raise ConfigError(f"shape {name!r} is not known; the shapes are {', '.join(PRESETS)}")
    where = device or torch.device("cpu")
    with TemporaryDirectory(prefix="aerie-made-up-") as folder, sown(Path(folder), where) if sow else nullcontext():
        yield write_pair(Path(folder), PRESETS[name], layers, where, sow)


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Return `count` prompts of `length` random token ids, the same in every run."""
    dice = torch.Generator().manual_seed(length)
    prompts: list[list[int]] = torch.randint(vocab_size, (count, length), generator=dice).tolist()
    return prompts


def write_pair(
    folder: Path, preset: dict[str, Any], layers: int | None, device: torch.device, sow: bool = False
) -> MadeUp:
    """Write a target with the preset's sizes, and an EAGLE-3 draft of one layer. If `sow`, leave out the matrices.

    Raises:
        ConfigError: fewer than `LEAST_LAYERS` layers are wanted, or they do not fit this machine.
    """
    config = COMMON | preset
    full = config["num_hidden_layers"]
    target, draft = folder / "target", folder / "draft"
    wanted = min(full, layers) if layers else full
    if wanted < LEAST_LAYERS:
        raise ConfigError(f"layers {wanted} are too few for a draft that reads three of them; give {LEAST_LAYERS}")
    arch = _described(target, config | {"num_hidden_layers": wanted})
    if layers is None and (count := _fitting(arch, folder, device, sow)) < wanted:
        if count < LEAST_LAYERS:
            raise ConfigError(f"not even {LEAST_LAYERS} of {full} layers fit this machine; take a smaller shape")
        arch = _described(target, config | {"num_hidden_layers": count})
    dice = Dice(config["torch_dtype"])
    named = [(hub_name(arch.stored_name(name)), shape) for name, shape in target_tensors(arch)]
    write_tensors(target, named, dice, sow=sow)
    _write_draft(draft, arch, config, dice, sow)
    return MadeUp(str(target), str(draft), arch.num_layers, full)


def _described(folder: Path, config: dict[str, Any]) -> TargetArch:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_target(str(folder))


def hub_name(name: str) -> str:
    """Return the name that checkpoints on model hubs use for a target's tensor."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def _fitting(arch: TargetArch, folder: Path, device: torch.device, sow: bool) -> int:
    """Return how many layers fit in memory and, if not `sow`, on the disk. All layers count as large as the last."""
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    room = MEMORY * memory if sow else min(MEMORY * memory, DISK * shutil.disk_usage(folder).free)
    room /= DTYPES[arch.dtype][0].itemsize
    last = f"layers.{arch.num_layers - 1}."
    layer = sum(prod(shape) for name, shape in target_tensors(arch) if name.startswith(last))
    return arch.num_layers - max(0, ceil((parameters(arch) - room) / layer))


class RandomPiece(NamedTuple):
    """A run of random numbers: `length` numbers from index `start` on, times `scale`."""

    start: int
    length: int
    scale: float


def pieces_of(name: str, shape: tuple[int, ...], number: int, embeds: bool) -> list[RandomPiece]:
    """Return the runs of random numbers that form matrix `name`. `number` is the count of numbers in all tensors before
    `name`. `embeds`: the first tensor is an embedding, whose numbers start at index 0.
    """
    if name == "lm_head.weight" and embeds:  # the embedding shifted by one row: its last row, then all other rows
        last, scale = prod(shape) - shape[-1], shape[-1] ** -0.5
        return [RandomPiece(last, shape[-1], scale), RandomPiece(0, last, scale)]
    return [RandomPiece(number, prod(shape), scale_of(name, shape))]


class Dice:
    """Normally distributed random numbers with period `BLOCK`."""

    def __init__(self, dtype: str, device: torch.device | None = None) -> None:
        self.dtype, self.name = DTYPES[dtype]
        self._block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).to(device or "cpu")
        self._scaled: dict[float, Tensor] = {}

    def parts(self, piece: RandomPiece) -> Iterator[Tensor]:
        """Yield the numbers of a piece, as views of one block."""
        start, count, scale = piece
        if scale not in self._scaled:
            self._scaled[scale] = (self._block * scale).to(self.dtype)
        block, at = self._scaled[scale], start % BLOCK
        while count > 0:
            part = block[at : at + min(count, BLOCK - at)]
            yield part
            count, at = count - part.shape[0], 0

    def write(self, file: BinaryIO, piece: RandomPiece) -> None:
        """Write the numbers of a piece to a file."""
        for part in self.parts(piece):
            file.write(part.view(torch.uint8).numpy().data)


Named = Sequence[tuple[str, tuple[int, ...]]]


def write_tensors(folder: Path, tensors: Named, dice: Dice, ids: Tensor | None = None, sow: bool = False) -> None:
    """Write `model.safetensors`: random matrices (holes in the file if `sow`), norm weights of 1, other vectors of 0.
    `ids` are written as the draft's `d2t`.
    """
    header: dict[str, Any] = {}
    end, size = 0, dice.dtype.itemsize
    for name, shape in tensors:
        start, end = end, end + prod(shape) * size
        header[name] = {"dtype": dice.name, "shape": list(shape), "data_offsets": [start, end]}
    if ids is not None:
        header["d2t"] = {"dtype": "I64", "shape": list(ids.shape), "data_offsets": [end, end + ids.nbytes]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    embeds, number = any(name.endswith(EMBEDDING) for name, _ in tensors), 0
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for name, shape in tensors:
            if len(shape) == 1:
                file.write(torch.full(shape, float("norm" in name), dtype=dice.dtype).view(torch.uint8).numpy().data)
            elif sow:
                file.seek(prod(shape) * size, os.SEEK_CUR)
            else:
                for piece in pieces_of(name, shape, number, embeds):
                    dice.write(file, piece)
            number += prod(shape)
        if ids is not None:
            file.write(ids.numpy().data)
        file.truncate(8 + len(said) + end + (0 if ids is None else ids.nbytes))


@contextmanager
def sown(folder: Path, device: torch.device) -> Iterator[None]:
    """Patch `Checkpoint.read`: generate matrices of models in `folder` on `device`, as `write_tensors` writes them."""
    true, dice = Checkpoint.read, dict[str, Dice]()

    def read(self: Checkpoint, stored: str, index: Index = (), to: torch.device | None = None) -> Tensor:
        path, raw, entry = self._files[stored]
        if self._dry or folder not in path.parents or len(entry.shape) < 2:
            return true(self, stored, index, to)
        self._taken.add(stored)
        name = NAMES[entry.dtype]
        if name not in dice:
            dice[name] = Dice(name, device)
        own = dice[name]
        number = (entry.start - min(one.start for _, _, one in self._files.values())) // own.dtype.itemsize
        pieces = pieces_of(raw, entry.shape, number, self.has(EMBEDDING))
        whole = torch.cat([part for piece in pieces for part in own.parts(piece)]).view(entry.shape)
        return whole[index].to(to)

    with patch.object(Checkpoint, "read", read):
        yield


def scale_of(name: str, shape: tuple[int, ...]) -> float:
    """Return the scale of a weight's numbers: a product keeps the size of its input; outputs added to the residual
    stream are small.
    """
    if name.endswith(EMBEDDING):
        return 1.0
    joins = name.endswith(("o_proj.weight", "down_proj.weight"))
    return float((SMALL if joins else 1.0) * shape[-1] ** -0.5)


def _write_draft(folder: Path, arch: TargetArch, config: dict[str, Any], dice: Dice, sow: bool) -> None:
    """Write a draft of one layer of the target's width, with a vocabulary of `DRAFT_VOCABULARY` evenly spaced ids."""
    h, inner, d, count = arch.hidden, config["intermediate_size"], config.get("head_dim", 128), arch.num_layers
    heads, kv_heads, vocab = config["num_attention_heads"], config["num_key_value_heads"], arch.vocab_size
    ranked = min(DRAFT_VOCABULARY, vocab)
    folder.mkdir(parents=True, exist_ok=True)
    data = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    data |= {key: config[key] for key in COMMON} | {"vocab_size": vocab, "draft_vocab_size": ranked}
    data |= {"hidden_size": h, "intermediate_size": inner, "target_hidden_size": h, "head_dim": d}
    data |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_aux_hidden_states": 3}
    data |= {"eagle_aux_hidden_state_layer_ids": [1, count // 2, count - 1]}
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    tensors = [
        ("fc.weight", (h, 3 * h)),
        *((f"midlayer.{name}.weight", (h,)) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(
            (f"midlayer.self_attn.{part}_proj.weight", (n * d, 2 * h))
            for part, n in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        ),
        ("midlayer.self_attn.o_proj.weight", (h, heads * d)),
        *((f"midlayer.mlp.{part}_proj.weight", (inner, h)) for part in ("gate", "up")),
        ("midlayer.mlp.down_proj.weight", (h, inner)),
        ("norm.weight", (h,)),
        ("lm_head.weight", (ranked, h)),
    ]
    number = torch.arange(ranked)
    write_tensors(folder, tensors, dice, None if ranked == vocab else number * (vocab // ranked) - number, sow)
