"""Mistral's own format: params.json with consolidated.safetensors, rope over interleaved pairs."""

from dataclasses import replace
from typing import Any

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import QueryScaling, geometry_of, with_sliding_window
from cluster.arch.target import TargetArch, target_of

NAMES = (
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
)
MISTRAL_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden_dim",
    "rms_norm_eps": "norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied_embeddings",
}
UNSERVED_KEYS = ("moe", "q_lora_rank", "kv_lora_rank", "vision_encoder", "mamba")
EOS_TOKEN_ID = 2


def mistral_native(params: ConfigKeys) -> TargetArch:
    """Return a dense Mistral target. Token 2 is always an end token, because params.json never names one; other files
    of the folder may name more. The default maximum text length is 128,000.

    Raises:
        ConfigError: the model has experts, latent attention, a vision tower or Mamba layers.
    """
    for key in UNSERVED_KEYS:
        if params.data.get(key):
            raise params.error(f"{key} is recognised and not served in this format")
    data: dict[str, Any] = {
        hf_key: params.data[mistral_key] for hf_key, mistral_key in MISTRAL_KEYS.items() if mistral_key in params.data
    }
    data["eos_token_id"] = EOS_TOKEN_ID
    data["max_position_embeddings"] = params.integer("max_position_embeddings", params.integer("max_seq_len", 128000))
    yarn = params.section("yarn")
    if yarn.data:
        data["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": yarn.data.get("factor"),
            "original_max_position_embeddings": yarn.data.get("original_max_position_embeddings"),
            "beta_fast": yarn.data.get("beta"),
            "beta_slow": yarn.data.get("alpha"),
        }
        if not yarn.flag("apply_scale", True):
            data["rope_scaling"]["attention_factor"] = 1.0
    keys = params.with_data(data)
    window = params.data.get("sliding_window")
    if window is not None:
        window = params.integer("sliding_window")
    num_layers = keys.integer("num_hidden_layers")
    layer = replace(geometry_of(keys), interleaved=True)
    layers = with_sliding_window(layer, window, [window is not None] * num_layers)
    query_scaling_values = read_query_scaling(params)
    return target_of(keys, "Mistral (native)", layers, tensor_name_rules=NAMES, query_scaling=query_scaling_values)


def read_query_scaling(params: ConfigKeys) -> QueryScaling | None:
    """Return how queries are scaled with the position; None if they are not scaled."""
    scaling = params.section("llama_4_scaling")
    if not scaling.data:
        return None
    return QueryScaling(scaling.integer("original_max_position_embeddings"), scaling.number("beta", 1.0))
