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


def write_gemma4(folder: Path, config: Any) -> None:
    """Write the config as Gemma-4 is published: the sizes of full layers have keys of their own. Add keys and values
    of the layers that borrow, which published checkpoints have and nothing reads.
    """
    path = folder / "config.json"
    data = json.loads(path.read_text())
    sizes = next(iter(data.pop("per_layer_config").values()))
    data |= {"global_head_dim": sizes["head_dim"], "num_global_key_value_heads": sizes["num_key_value_heads"]}
    path.write_text(json.dumps(data))
    tensors = load_file(folder / "model.safetensors")
    for index in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
            tensors[f"model.layers.{index}.self_attn.{part}.weight"] = torch.full((2, 2), float("nan"))
    save_file(tensors, folder / "model.safetensors")


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


def write_mimo_v2(folder: Path, config: Any) -> None:
    """Give a MiMo-V2-Flash checkpoint the config keys of the published one, and a tensor of its draft."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.mtp.layers.0.eh_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())
    layer_types, mlp_types, ropes = (data.pop(key) for key in ("layer_types", "mlp_layer_types", "rope_parameters"))
    data |= {
        "hybrid_layer_pattern": [int(layer_type == "sliding_attention") for layer_type in layer_types],
        "moe_layer_freq": [int(mlp_type == "sparse") for mlp_type in mlp_types],
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": ropes["full_attention"]["partial_rotary_factor"],
        "swa_num_attention_heads": data["num_attention_heads"],
        "swa_num_key_value_heads": 2 * data["num_key_value_heads"],
        "swa_head_dim": data["head_dim"],
        "swa_v_head_dim": data["v_head_dim"],
        "sliding_window_size": data["sliding_window"] - 1,
        "sliding_window": data["sliding_window"] - 1,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": data.pop("rms_norm_eps"),
        "routed_scaling_factor": None,
        "n_shared_experts": None,
    }
    (folder / "config.json").write_text(json.dumps(data))


def write_step(folder: Path, config: Any) -> None:
    """Turn a Step-3.7 checkpoint in `folder` into a Step-3.5 checkpoint. It keeps only the language model, and gets the
    config keys of the published Step-3.5. As there, a tensor of an MTP layer is added, and the last entry of each list
    of layers is for that MTP layer.
    """
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith("vi")}
    layers = config.text_config.num_hidden_layers
    save_file({**tensors, f"model.layers.{layers}.eh_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())["text_config"]
    ropes, types, mlps = (data.pop(key) for key in ("rope_parameters", "layer_types", "mlp_layer_types"))
    data |= {
        "architectures": ["Step3p5ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "layer_types": [*types, "sliding_attention"],
        "moe_layers_enum": ",".join(str(index) for index, kind in enumerate(mlps) if kind == "sparse"),
        "rope_theta": [ropes[kind]["rope_theta"] for kind in [*types, "sliding_attention"]],
        "partial_rotary_factors": [ropes[kind]["partial_rotary_factor"] for kind in [*types, "sliding_attention"]],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": data.pop("num_sliding_attention_heads"),
            "num_attention_groups": data["num_key_value_heads"],
        },
        "num_attention_groups": data.pop("num_key_value_heads"),
        "moe_num_experts": data.pop("n_routed_experts"),
        "moe_top_k": data.pop("num_experts_per_tok"),
        "share_expert_dims": data.pop("share_expert_dim"),
    }
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
