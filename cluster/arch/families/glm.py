"""GLM-4-MoE (GLM-4.5, 4.6): grouped-query attention with partly rotated heads, and DeepSeek's experts."""

from dataclasses import replace

from cluster.arch.families.deepseek import NAMES, read_grouped_moe
from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import geometry_of
from cluster.arch.target import TargetArch, target_of

DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""The values of these keys if a config leaves them out."""


def glm4_moe(config: ConfigKeys) -> TargetArch:
    """Return the target of `Glm4MoeForCausalLM`: q, k and v may have biases. Layers from `num_hidden_layers` on are MTP
    drafts, which are not part of the target.
    """
    keys = config.with_defaults(DEFAULTS)
    num_layers = keys.integer("num_hidden_layers")
    dense = replace(geometry_of(keys, allow_partial_rotary=True), out_bias=False, qk_norm=keys.flag("use_qk_norm"))
    sparse = replace(dense, moe=read_grouped_moe(keys))
    num_dense_layers, num_drafts = keys.count("first_k_dense_replace"), keys.count("num_nextn_predict_layers")
    return target_of(
        keys,
        "Glm4MoeForCausalLM",
        tuple(dense if i < num_dense_layers else sparse for i in range(num_layers)),
        tensor_name_rules=NAMES,
        ignored_patterns=tuple(rf"^layers\.{num_layers + i}\." for i in range(num_drafts)),
    )
