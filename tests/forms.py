"""Checkpoints of `transformers` written anew, as others publish them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write_native(folder: Path, config: Any) -> None:
    """Turn a Mistral checkpoint of `transformers` into params.json and consolidated.safetensors."""
    held = load_file(folder / "model.safetensors")
    for file in folder.iterdir():
        file.unlink()
    d, written = config.head_dim, {}
    parts = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    parts |= {p: f"attention.w{p}" for p in "qkvo"}
    for name, tensor in held.items():
        name = name.removeprefix("model.")
        if ".q_proj" in name or ".k_proj" in name:
            tensor = tensor.view(-1, 2, d // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for part, theirs in parts.items():
            name = re.sub(rf"(self_attn|mlp)\.{part}_proj", theirs, name)
        name = name.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "ffn_norm")
        name = name.replace("embed_tokens", "tok_embeddings").replace("lm_head", "output")
        written[name] = tensor.contiguous()
    save_file(written, folder / "consolidated.safetensors")
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": d,
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


def cut(folder: Path, index: object | None = None) -> None:
    """Turn the one file of a checkpoint into two with an index, or with what is given in its place."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(held)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({tensor: held[tensor] for tensor in part}, folder / file)
    table = {"weight_map": {tensor: file for file, part in parts.items() for tensor in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table if index is None else index))


def write_mimo(folder: Path, config: Any) -> None:
    """Turn a Qwen2 into a MiMo, which has a draft beside it."""
    held = load_file(folder / "model.safetensors")
    save_file({**held, "model.mtp_layers.0.input_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())
    data |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(data))


def write_kimi(folder: Path, config: Any) -> None:
    """Turn a DeepSeek-V3 into the language model of a Kimi-K2.5, beside a tower and a projector."""
    held = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    held |= {"vision_tower.patch.weight": torch.zeros(2), "mm_projector.proj.0.weight": torch.zeros(2)}
    save_file(held, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))
