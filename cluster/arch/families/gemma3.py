"""Gemma-3's language model. Its norms scale by 1 + weight, and come before and after attention and MLP. It has local
layers, with a sliding window, and global layers.
"""

from dataclasses import replace

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import geometry_of, sliding_layers
from cluster.arch.rope import Rope, rope_of
from cluster.arch.target import TargetArch, target_of

NAMES = (
    (r"\.after_attention\.", ".post_attention_layernorm."),
    (r"\.before_mlp\.", ".pre_feedforward_layernorm."),
    (r"\.after_mlp\.", ".post_feedforward_layernorm."),
)
DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
"""The values of these keys if a config leaves them out."""


def gemma3(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Gemma3ForCausalLM`: by default five local layers per global layer, and a tied head."""
    num_layers = keys.integer("num_hidden_layers")
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if keys.data.get(key):
            raise keys.error(f"{key} {keys.data[key]!r} is not served")
    full_keys = keys.with_defaults(DEFAULTS)
    window_period = keys.integer("sliding_window_pattern", 6)
    is_sliding = sliding_layers(keys, num_layers, [(i + 1) % window_period != 0 for i in range(num_layers)])
    layer = replace(
        geometry_of(_without_keys(full_keys, "rope_parameters", "rope_scaling"), "gelu_tanh"),
        rope=rope_of(full_keys, 1e6, "full_attention"),
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qk_norm=True,
        unit_offset=True,
        sandwich=True,
    )
    local = replace(layer, rope=_local_rope(full_keys), sliding_window=keys.integer("sliding_window", 4096))
    softcap = keys.data.get("final_logit_softcapping")
    return target_of(
        full_keys,
        "Gemma3ForCausalLM",
        tuple(local if slides else layer for slides in is_sliding),
        tied=keys.flag("tie_word_embeddings", True),
        # The config's number already includes rope scaling, so it is not multiplied; vLLM does the same.
        max_position=full_keys.integer("max_position_embeddings"),
        embed_scale=layer.hidden**0.5,
        softcap=None if softcap is None else keys.number("final_logit_softcapping", 1.0),
        tensor_name_rules=NAMES,
    )


def _local_rope(keys: ConfigKeys) -> Rope:
    """Return the rope of local layers: from `rope_parameters` if it lists "sliding_attention", otherwise without
    scaling, with the base `rope_local_base_freq`.
    """
    if "sliding_attention" in keys.section("rope_parameters").data:
        return rope_of(_without_keys(keys, "rope_scaling"), 10000.0, "sliding_attention")
    return Rope(keys.number("rope_local_base_freq", 10000.0))


def _without_keys(keys: ConfigKeys, *names: str) -> ConfigKeys:
    return keys.with_data({name: value for name, value in keys.data.items() if name not in names})
