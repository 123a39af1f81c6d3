"""The sizes of the target families in `family_cases`, and config values that several of their cases share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 64
LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
GROWING = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
MIMO_V2 = {
    "head_dim": 12,
    "v_head_dim": 8,
    "num_key_value_heads": 1,
    "sliding_window": 9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
}
STEP_MLPS = ["dense", "sparse", "sparse", "sparse"]
STEP = {
    "pad_token_id": 0,
    "head_dim": 12,
    "num_sliding_attention_heads": 6,
    "sliding_window": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "share_expert_dim": 20,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA4 = {
    "pad_token_id": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
    "head_dim": 12,
    "global_head_dim": 16,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
GEMMA4_SMALL = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
}
GEMMA4_MOE = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 12,
}
LLAMA4 = {
    "head_dim": 12,
    "intermediate_size": 12,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "floor_scale": 9,
    "bos_token_id": 1,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def rope(scaling: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {**scaling, "rope_theta": theta}}


def mimo_ropes(rotated: float) -> dict[str, Any]:
    """Return the ropes of MiMo-V2: another base for each type of layer, with this share of a head rotated."""
    bases = {"full_attention": 1e6, "sliding_attention": 1e4}
    parameters = {"rope_type": "default", "partial_rotary_factor": rotated}
    return {"rope_parameters": {layer_type: {**parameters, "rope_theta": base} for layer_type, base in bases.items()}}


@dataclass(frozen=True)
class Family:
    """One family: its model class and config class in `transformers`, its sizes, and its test cases.

    `sizes` override `SIZES`. `cases` maps the name of each case to config values that override `sizes`. `text` names
    the config class of the language model inside a multimodal wrapper. `rewrite` turns the checkpoint of
    `transformers` into the format in which the model is published.
    """

    architecture: str
    config: str
    sizes: dict[str, Any]
    cases: dict[str, dict[str, Any]]
    text: str = ""
    rewrite: Callable[[Path, Any], None] | None = None
    seed: int = 0
