"""DeepSeek-V3: latent attention, experts chosen by groups with sigmoid scores, and a shared expert for every token."""

from dataclasses import replace

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import LatentSizes, Moe, geometry_of
from cluster.arch.rope import mscale, scaling_of
from cluster.arch.target import TargetArch, target_of

NAMES = ((r"\.mlp\.router\.correction$", ".mlp.gate.e_score_correction_bias"), (r"\.mlp\.router\.", ".mlp.gate."))


def deepseek_v3(keys: ConfigKeys) -> TargetArch:
    """Return the target of `DeepseekV3ForCausalLM`. Layers from `num_hidden_layers` on are MTP drafts, which
    are not part of the target.
    """
    if not keys.flag("rope_interleave", True):
        raise keys.error("rope_interleave false is not served")
    num_layers = keys.integer("num_hidden_layers")
    latent = LatentSizes(
        q_rank=None if keys.data.get("q_lora_rank") is None else keys.integer("q_lora_rank"),
        kv_rank=keys.integer("kv_lora_rank", 512),
        nope=keys.integer("qk_nope_head_dim", 128),
        rope=keys.integer("qk_rope_head_dim", 64),
        value=keys.integer("v_head_dim", 128),
    )
    data = dict(keys.data) | {"num_key_value_heads": 1, "head_dim": latent.kv_rank + latent.rope}
    if latent.rope % 2 or data["head_dim"] % 2:
        raise keys.error("qk_rope_head_dim and kv_lora_rank must be even")
    scaling = scaling_of(keys)
    scale = float((latent.nope + latent.rope) ** -0.5)
    if scaling.data.get("mscale_all_dim"):
        scale *= mscale(scaling.number("factor", 1.0), scaling.number("mscale_all_dim", 1.0)) ** 2
    dense = replace(geometry_of(keys.with_data(data)), latent=latent, scale=scale)
    moe = read_grouped_moe(keys)
    num_dense_layers, num_drafts = keys.count("first_k_dense_replace", 3), keys.count("num_nextn_predict_layers")
    return target_of(
        keys,
        "DeepseekV3ForCausalLM",
        tuple(dense if i < num_dense_layers else replace(dense, moe=moe) for i in range(num_layers)),
        tensor_name_rules=NAMES,
        ignored_patterns=tuple(rf"^layers\.{num_layers + i}\." for i in range(num_drafts)),
    )


def read_grouped_moe(keys: ConfigKeys) -> Moe:
    """Return the `Moe` of DeepSeek-V3: experts in groups, with sigmoid scores and a correction bias, and shared experts
    for every token.

    Raises:
        ConfigError: the experts cannot be divided into the groups, or too many groups are chosen.
    """
    width = keys.integer("moe_intermediate_size", 2048)
    moe = Moe(
        experts=keys.integer("n_routed_experts", keys.integer("num_local_experts", 256)),
        active=keys.integer("num_experts_per_tok", 8),
        intermediate=width,
        scoring="sigmoid",
        renormalise=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 2.5),
        groups=keys.integer("n_group", 8),
        top_groups=keys.integer("topk_group", 4),
        correction=True,
        shared=width * keys.integer("n_shared_experts", 1),
    )
    if moe.experts % moe.groups or moe.top_groups > moe.groups:
        raise keys.error(
            f"{moe.experts} experts cannot be split into n_group {moe.groups} groups, "
            f"of which topk_group {moe.top_groups} are chosen"
        )
    return moe
