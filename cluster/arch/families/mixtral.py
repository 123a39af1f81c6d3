"""Mixtral: Mistral's attention, with a mixture of experts (by default eight) as the MLP."""

from dataclasses import replace

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import Moe, geometry_of
from cluster.arch.target import TargetArch, target_of

NAMES = (
    (r"\.mlp\.router\.", ".block_sparse_moe.gate."),
    (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
    (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
    (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
)


def mixtral(keys: ConfigKeys) -> TargetArch:
    """Return the target of `MixtralForCausalLM`."""
    moe = Moe(
        experts=keys.integer("num_local_experts", 8),
        active=keys.integer("num_experts_per_tok", 2),
        intermediate=keys.integer("intermediate_size"),
    )
    layer = replace(geometry_of(keys, theta=1e6), moe=moe)
    if keys.data.get("sliding_window") is not None:
        layer = replace(layer, sliding_window=keys.integer("sliding_window"))
    layers = (layer,) * keys.integer("num_hidden_layers")
    return target_of(keys, "MixtralForCausalLM", layers, tensor_name_rules=NAMES)
