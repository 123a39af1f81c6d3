"""Rewrites checkpoints of `transformers` into the formats in which model vendors publish them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write_native(folder: Path, config: Any) -> None:
    """Turn a Mistral checkpoint of `transformers` into Mistral's own format: params.json and
    consolidated.safetensors.
    """
    tensors = load_file(folder / "model.safetensors")
    for file in folder.iterdir():
        file.unlink()
    head_dim, native_tensors = config.head_dim, {}
    native_names = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    native_names |= {letter: f"attention.w{letter}" for letter in "qkvo"}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if ".q_proj" in name or ".k_proj" in name:
            tensor = tensor.view(-1, 2, head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for module, native_name in native_names.items():
            name = re.sub(rf"(self_attn|mlp)\.{module}_proj", native_name, name)
        name = name.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "ffn_norm")
        name = name.replace("embed_tokens", "tok_embeddings").replace("lm_head", "output")
        native_tensors[name] = tensor.contiguous()
    save_file(native_tensors, folder / "consolidated.safetensors")
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": head_dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": config.sliding_window,
    }
    scaling = config.rope_parameters
    if scaling["rope_type"] == "yarn":
        length = {"original_max_position_embeddings": scaling["original_max_position_embeddings"]}
        params["yarn"] = {"factor": scaling["factor"], "beta": 32, "alpha": 1, **length}
        if scaling.get("llama_4_scaling_beta"):
            params["yarn"]["apply_scale"] = False
            params["llama_4_scaling"] = {"beta": scaling["llama_4_scaling_beta"], **length}
    (folder / "params.json").write_text(json.dumps(params))


def split_checkpoint(folder: Path, index: object | None = None) -> None:
    """Split the only file of a checkpoint into two shards with an index. `index` replaces the correct index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, names_in_shard in shards.items():
        save_file({tensor: tensors[tensor] for tensor in names_in_shard}, folder / file)
    index_data = {"weight_map": {tensor: file for file, names_in_shard in shards.items() for tensor in names_in_shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_data if index is None else index))


def write_mimo(folder: Path, config: Any) -> None:
    """Turn a Qwen2 checkpoint into a MiMo checkpoint, which also contains a draft (its MTP layer)."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.mtp_layers.0.input_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())
    data |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(data))


def write_kimi(folder: Path, config: Any) -> None:
    """Turn a DeepSeek-V3 checkpoint into a Kimi-K2.5 checkpoint.

    DeepSeek-V3 becomes the language model; a vision tower and a projector are added.
    """
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {"vision_tower.patch.weight": torch.zeros(2), "mm_projector.proj.0.weight": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors")
    text_config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer_config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text_config,
    }
    (folder / "config.json").write_text(json.dumps(outer_config))
