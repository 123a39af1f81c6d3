"""Models with random weights, in the shapes of real models or tiny ones, as folders that any command can load. Each
target has a draft.

Models that only this process loads can be generated on read: their files have holes in place of matrices, and each
matrix is generated on the device when it is read. That is fast, because gigabytes need not be written and read.

A random target always chooses the next token id (last id + 1): its LM head is its embedding shifted by one row, and its
layers add little. So the tokens that it chooses are known (`oracle_draft.CountingTokens`), and their logits lead by
more than rounding errors. The gate of a layer with experts is random too, so rows choose experts at random.
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
from cluster.arch.safetensors.tensors import count_parameters, target_tensors
from cluster.config import ConfigError
from cluster.kv.free_memory import free_memory
from cluster.models.checkpoint import Checkpoint
from cluster.models.stored import Index

COMMON_CONFIG: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
LLAMA_CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
TINY_CONFIG: dict[str, Any] = {"torch_dtype": "float32"}
TINY_CONFIG |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
TINY_EXPERTS_CONFIG = TINY_CONFIG | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": LLAMA_CONFIG | TINY_CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "llama-1b": LLAMA_CONFIG
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "llama-8b": LLAMA_CONFIG
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
    | (TINY_EXPERTS_CONFIG | {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "tiny-mla": PRESETS["mla"]
    | (
        TINY_EXPERTS_CONFIG
        | {"n_routed_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32}
    )
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1},
}
"""config.json of each preset, without `COMMON_CONFIG`. `mla`: layers of DeepSeek-V2-Lite, gate and vocabulary of V3."""

DRAFT_VOCABULARY = 32000
MIN_LAYERS = 4  # with fewer layers, the three aux hidden states of an EAGLE-3 draft would not differ
RESIDUAL_SCALE = 0.05  # scale of what layers add to the residual stream; the embedding has scale 1
EMBEDDING_SUFFIX = "embed_tokens.weight"
MEMORY_SHARE, DISK_SHARE = 0.5, 0.8  # the most that a target may take of the free memory and of the free disk
PERIOD = (1 << 24) + 3  # period of the random numbers; shares no factor with row widths, so that rows differ
DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}
DTYPE_NAMES = {stored: name for name, (_, stored) in DTYPES.items()}


class RandomModel(NamedTuple):
    """The folders of a target and its draft. The target has `layers` of the preset's `preset_layers` layers."""

    target: str
    draft: str
    layers: int
    preset_layers: int


@contextmanager
def random_model(
    name: str, layers: int | None = None, device: torch.device | None = None, generate_on_read: bool = False
) -> Iterator[RandomModel]:
    """A context manager that writes the preset `name` to a temporary folder, with at most `layers` layers or, if None,
    as many as fit. If `generate_on_read`, matrices are generated on `device` when they are read; this works only in
    this process and inside the `with` block. Without `device`, it is the CPU.

    Raises:
        ConfigError: the preset is unknown; or as `write_pair`.
    """
    if name not in PRESETS:
        raise ConfigError(f"shape {name!r} is not known; the shapes are {', '.join(PRESETS)}")
    target_device = device or torch.device("cpu")
    with (
        TemporaryDirectory(prefix="aerie-made-up-") as folder,
        generated_reads(Path(folder), target_device) if generate_on_read else nullcontext(),
    ):
        yield write_pair(Path(folder), PRESETS[name], layers, target_device, generate_on_read)


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Return `count` prompts of `length` random token ids, the same in every run."""
    generator = torch.Generator().manual_seed(length)
    prompts: list[list[int]] = torch.randint(vocab_size, (count, length), generator=generator).tolist()
    return prompts


def write_pair(
    folder: Path, preset: dict[str, Any], layers: int | None, device: torch.device, generate_on_read: bool = False
) -> RandomModel:
    """Write a target with the preset's sizes and at most `layers` layers (if None, as many as fit the free memory of
    `device` and the disk), and an EAGLE-3 draft of one layer. If `generate_on_read`, leave out the matrices.

    Raises:
        ConfigError: fewer than `MIN_LAYERS` layers are requested or, if `layers` is None, fit.
    """
    config = COMMON_CONFIG | preset
    preset_layers = config["num_hidden_layers"]
    target, draft = folder / "target", folder / "draft"
    num_layers = min(preset_layers, layers) if layers else preset_layers
    if num_layers < MIN_LAYERS:
        raise ConfigError(f"layers {num_layers} are too few for a draft that reads three of them; give {MIN_LAYERS}")
    arch = _write_config(target, config | {"num_hidden_layers": num_layers})
    if layers is None and (fitting_layers := _layers_that_fit(arch, folder, device, generate_on_read)) < num_layers:
        if fitting_layers < MIN_LAYERS:
            raise ConfigError(f"not even {MIN_LAYERS} of {preset_layers} layers fit this machine; take a smaller shape")
        arch = _write_config(target, config | {"num_hidden_layers": fitting_layers})
    numbers = RandomNumbers(config["torch_dtype"])
    tensors = [(hub_name(arch.stored_name(name)), shape) for name, shape in target_tensors(arch)]
    write_tensors(target, tensors, numbers, generate_on_read=generate_on_read)
    _write_draft(draft, arch, config, numbers, generate_on_read)
    return RandomModel(str(target), str(draft), arch.num_layers, preset_layers)


def _write_config(folder: Path, config: dict[str, Any]) -> TargetArch:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_target(str(folder))


def hub_name(name: str) -> str:
    """Return the name that checkpoints on model hubs use for a target's tensor."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def _layers_that_fit(arch: TargetArch, folder: Path, device: torch.device, generate_on_read: bool) -> int:
    """Return how many layers fit in memory and, unless `generate_on_read`, on the disk. Each layer that does not fit is
    taken to be as large as the last layer.
    """
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    budget = (
        MEMORY_SHARE * memory
        if generate_on_read
        else min(MEMORY_SHARE * memory, DISK_SHARE * shutil.disk_usage(folder).free)
    )
    budget /= DTYPES[arch.dtype][0].itemsize
    last_layer_prefix = f"layers.{arch.num_layers - 1}."
    layer_size = sum(prod(shape) for name, shape in target_tensors(arch) if name.startswith(last_layer_prefix))
    return arch.num_layers - max(0, ceil((count_parameters(arch) - budget) / layer_size))


class RandomSpan(NamedTuple):
    """A run of random numbers: `length` numbers from index `start` on, times `scale`."""

    start: int
    length: int
    scale: float


def random_spans(name: str, shape: tuple[int, ...], start: int, has_embedding: bool) -> list[RandomSpan]:
    """Return the spans of random numbers that the matrix `name` consists of. `start` is how many numbers the tensors
    before `name` in the file have together. `has_embedding` says that the first tensor of the file is an embedding,
    whose numbers start at index 0.
    """
    if (
        name == "lm_head.weight" and has_embedding
    ):  # the embedding shifted by one row: its last row, then all other rows
        last_row_start, scale = prod(shape) - shape[-1], shape[-1] ** -0.5
        return [RandomSpan(last_row_start, shape[-1], scale), RandomSpan(0, last_row_start, scale)]
    return [RandomSpan(start, prod(shape), weight_scale(name, shape))]


class RandomNumbers:
    """Normally distributed random numbers, which repeat after `PERIOD` numbers."""

    def __init__(self, dtype: str, device: torch.device | None = None) -> None:
        self.dtype, self.dtype_name = DTYPES[dtype]
        self._block = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)).to(device or "cpu")
        self._blocks_by_scale: dict[float, Tensor] = {}

    def chunks(self, span: RandomSpan) -> Iterator[Tensor]:
        """Yield the numbers of a span in pieces, which are views of one block of `PERIOD` numbers."""
        start, count, scale = span
        if scale not in self._blocks_by_scale:
            self._blocks_by_scale[scale] = (self._block * scale).to(self.dtype)
        block, offset = self._blocks_by_scale[scale], start % PERIOD
        while count > 0:
            chunk = block[offset : offset + min(count, PERIOD - offset)]
            yield chunk
            count, offset = count - chunk.shape[0], 0

    def write(self, file: BinaryIO, span: RandomSpan) -> None:
        """Write the numbers of a span to a file."""
        for chunk in self.chunks(span):
            file.write(chunk.view(torch.uint8).numpy().data)


ShapeList = Sequence[tuple[str, tuple[int, ...]]]


def write_tensors(
    folder: Path,
    tensors: ShapeList,
    numbers: RandomNumbers,
    draft_vocab_ids: Tensor | None = None,
    generate_on_read: bool = False,
) -> None:
    """Write `model.safetensors`: random matrices (holes in the file if `generate_on_read`), norm weights of 1, other
    vectors of 0. `draft_vocab_ids` are written as the tensor `d2t`: target id minus draft id, for each draft id.
    """
    header: dict[str, Any] = {}
    end, size = 0, numbers.dtype.itemsize
    for name, shape in tensors:
        start, end = end, end + prod(shape) * size
        header[name] = {"dtype": numbers.dtype_name, "shape": list(shape), "data_offsets": [start, end]}
    if draft_vocab_ids is not None:
        header["d2t"] = {
            "dtype": "I64",
            "shape": list(draft_vocab_ids.shape),
            "data_offsets": [end, end + draft_vocab_ids.nbytes],
        }
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    has_embedding, start_index = any(name.endswith(EMBEDDING_SUFFIX) for name, _ in tensors), 0
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for name, shape in tensors:
            if len(shape) == 1:
                file.write(torch.full(shape, float("norm" in name), dtype=numbers.dtype).view(torch.uint8).numpy().data)
            elif generate_on_read:
                file.seek(prod(shape) * size, os.SEEK_CUR)
            else:
                for span in random_spans(name, shape, start_index, has_embedding):
                    numbers.write(file, span)
            start_index += prod(shape)
        if draft_vocab_ids is not None:
            file.write(draft_vocab_ids.numpy().data)
        file.truncate(8 + len(header_bytes) + end + (0 if draft_vocab_ids is None else draft_vocab_ids.nbytes))


@contextmanager
def generated_reads(folder: Path, device: torch.device) -> Iterator[None]:
    """A context manager that patches `Checkpoint.read`: matrices of models in `folder` are generated on `device`, with
    the numbers that `write_tensors` would write. Vectors are read from the file.
    """
    original_read, numbers_by_dtype = Checkpoint.read, dict[str, RandomNumbers]()

    def read(self: Checkpoint, stored: str, index: Index = (), to: torch.device | None = None) -> Tensor:
        path, raw, entry = self._files[stored]
        if self._headers_only or folder not in path.parents or len(entry.shape) < 2:
            return original_read(self, stored, index, to)
        self.mark_used(stored)
        name = DTYPE_NAMES[entry.dtype]
        if name not in numbers_by_dtype:
            numbers_by_dtype[name] = RandomNumbers(name, device)
        numbers = numbers_by_dtype[name]
        start_index = (
            entry.start - min(first_entry.start for _, _, first_entry in self._files.values())
        ) // numbers.dtype.itemsize
        spans = random_spans(raw, entry.shape, start_index, self.has_stored(EMBEDDING_SUFFIX))
        matrix = torch.cat([chunk for span in spans for chunk in numbers.chunks(span)]).view(entry.shape)
        return matrix[index].to(to)

    with patch.object(Checkpoint, "read", read):
        yield


def weight_scale(name: str, shape: tuple[int, ...]) -> float:
    """Return the scale of a weight's random numbers. Outputs of a weight are about as large as its inputs, or
    `RESIDUAL_SCALE` times that if they are added to the residual stream. An embedding has scale 1.
    """
    if name.endswith(EMBEDDING_SUFFIX):
        return 1.0
    adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return float((RESIDUAL_SCALE if adds_to_residual else 1.0) * shape[-1] ** -0.5)


def _write_draft(
    folder: Path, arch: TargetArch, config: dict[str, Any], numbers: RandomNumbers, generate_on_read: bool
) -> None:
    """Write a draft of one layer of the target's width; its vocabulary is `DRAFT_VOCABULARY` evenly spaced ids."""
    hidden, intermediate, head_dim, num_layers = (
        arch.hidden,
        config["intermediate_size"],
        config.get("head_dim", 128),
        arch.num_layers,
    )
    heads, kv_heads, vocab_size = config["num_attention_heads"], config["num_key_value_heads"], arch.vocab_size
    draft_vocab_size = min(DRAFT_VOCABULARY, vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    draft_config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    draft_config |= {key: config[key] for key in COMMON_CONFIG} | {
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
    }
    draft_config |= {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "target_hidden_size": hidden,
        "head_dim": head_dim,
    }
    draft_config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_aux_hidden_states": 3}
    draft_config |= {"eagle_aux_hidden_state_layer_ids": [1, num_layers // 2, num_layers - 1]}
    (folder / "config.json").write_text(json.dumps(draft_config), encoding="utf-8")
    tensors = [
        ("fc.weight", (hidden, 3 * hidden)),
        *(
            (f"midlayer.{name}.weight", (hidden,))
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        ),
        *(
            (f"midlayer.self_attn.{projection}_proj.weight", (head_count * head_dim, 2 * hidden))
            for projection, head_count in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        ),
        ("midlayer.self_attn.o_proj.weight", (hidden, heads * head_dim)),
        *((f"midlayer.mlp.{projection}_proj.weight", (intermediate, hidden)) for projection in ("gate", "up")),
        ("midlayer.mlp.down_proj.weight", (hidden, intermediate)),
        ("norm.weight", (hidden,)),
        ("lm_head.weight", (draft_vocab_size, hidden)),
    ]
    draft_ids = torch.arange(draft_vocab_size)
    write_tensors(
        folder,
        tensors,
        numbers,
        None if draft_vocab_size == vocab_size else draft_ids * (vocab_size // draft_vocab_size) - draft_ids,
        generate_on_read,
    )
