"""Gemma-3's language model: norms of 1 + weight before and after attention and MLP; local and global layers."""

from dataclasses import replace

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import geometry_of, sliding
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
"""Values of keys that a config leaves out."""


def gemma3(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Gemma3ForCausalLM`: five local layers per global layer, and by default a tied head."""
    count = keys.integer("num_hidden_layers")
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if keys.data.get(key):
            raise keys.error(f"{key} {keys.data[key]!r} is not served")
    full = keys.over(DEFAULTS)
    every = keys.integer("sliding_window_pattern", 6)
    which = sliding(keys, count, [(i + 1) % every != 0 for i in range(count)])
    layer = replace(
        geometry_of(_without(full, "rope_parameters", "rope_scaling"), "gelu_tanh"),
        rope=rope_of(full, 1e6, "full_attention"),
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qk_norm=True,
        unit_offset=True,
        sandwich=True,
    )
    local = replace(layer, rope=_local_rope(full), sliding_window=keys.integer("sliding_window", 4096))
    cap = keys.data.get("final_logit_softcapping")
    return target_of(
        full,
        "Gemma3ForCausalLM",
        tuple(local if small else layer for small in which),
        tied=keys.flag("tie_word_embeddings", True),
        # already includes rope scaling; vLLM does not multiply it either
        max_position=full.integer("max_position_embeddings"),
        embed_scale=layer.hidden**0.5,
        softcap=None if cap is None else keys.number("final_logit_softcapping", 1.0),
        names=NAMES,
    )


def _local_rope(keys: ConfigKeys) -> Rope:
    """Return the rope of local layers: from `rope_parameters` if listed, otherwise `rope_local_base_freq`, unscaled."""
    if "sliding_attention" in keys.section("rope_parameters").data:
        return rope_of(_without(keys, "rope_scaling"), 10000.0, "sliding_attention")
    return Rope(keys.number("rope_local_base_freq", 10000.0))


def _without(keys: ConfigKeys, *names: str) -> ConfigKeys:
    return keys.having({name: given for name, given in keys.data.items() if name not in names})
