"""gpt-oss: attention sinks, sliding windows in every other layer, YaRN, biases, stacked experts in bf16 or MXFP4."""

from dataclasses import replace

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import Moe, geometry_of, sliding_layers, with_sliding_window
from cluster.arch.target import TargetArch, target_of


def gpt_oss(keys: ConfigKeys) -> TargetArch:
    """Return the target of `GptOssForCausalLM`."""
    num_layers = keys.integer("num_hidden_layers")
    full_keys = keys.with_defaults({"head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5})
    width = keys.integer("intermediate_size")
    moe = Moe(
        experts=keys.integer("num_local_experts", keys.integer("num_experts", 128)),
        active=keys.integer("num_experts_per_tok", 4),
        intermediate=width,
        router_bias=True,
        storage="interleaved",
        clamp=(keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)),
    )
    layer = replace(geometry_of(full_keys, theta=150000.0), sinks=True, moe=moe)
    is_sliding = sliding_layers(keys, num_layers, [i % 2 == 0 for i in range(num_layers)])
    layers = with_sliding_window(layer, keys.integer("sliding_window", 128), is_sliding)
    return target_of(keys, "GptOssForCausalLM", layers)
