"""Step-3.5: more heads in layers with a sliding window, one output gate per head, clamped activations, and experts
beside a shared expert. Its norms scale by 1 + weight.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import LayerGeometry, Moe, check_rotated_part, geometry_of
from cluster.arch.rope import Rope, rope_of
from cluster.arch.target import TargetArch, target_of

NAMES = (
    (r"\.mlp\.router\.correction$", ".moe.router_bias"),
    (r"\.mlp\.router\.", ".moe.gate."),
    (r"\.mlp\.experts\.", ".moe."),
    (r"\.mlp\.shared_experts\.", ".share_expert."),
)
OTHER_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""Keys of the published config, with the names that `transformers` and this file use."""
DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
    "max_position_embeddings": 128000,
}
FIRST_SPARSE_LAYER = 3
"""The first layer with experts if a config does not list them."""


def step3p5(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Step3p5ForCausalLM`. Layers from `num_hidden_layers` on are MTP drafts, which are not part
    of the target. Lists with an entry for each layer may have entries for these drafts too.
    """
    config, num_layers = _usual_names(keys), keys.integer("num_hidden_layers")
    layers = [step3p5_layer(config, index) for index in range(num_layers)]
    num_drafts = keys.count("num_nextn_predict_layers")
    return target_of(
        config,
        "Step3p5ForCausalLM",
        tuple(layers),
        tensor_name_rules=NAMES,
        ignored_patterns=tuple(rf"^layers\.{num_layers + i}\." for i in range(num_drafts)),
    )


def step3p5_layer(config: ConfigKeys, index: int, has_experts: bool | None = None) -> LayerGeometry:
    """Return the geometry of layer `index`, which may be an MTP layer. `has_experts` None: as the config says."""
    keys = _usual_names(config)
    layer_type = _layer_type(keys, "layer_types", ("full_attention", "sliding_attention"), index) or "full_attention"
    rope = _rope(keys, index, layer_type)
    check_rotated_part(keys, keys.integer("head_dim"), rope)
    layer = replace(
        geometry_of(_without_rope(keys)),
        rope=rope,
        scale=keys.number("query_pre_attn_scalar", keys.integer("head_dim")) ** -0.5,
        qk_norm=True,
        unit_offset=True,
        head_gate=True,
        limit=_limit(keys, "swiglu_limits_shared", index),
    )
    if layer_type == "sliding_attention":
        layer = replace(layer, heads=_sliding_heads(keys), sliding_window=keys.integer("sliding_window", 512))
    if not (_has_experts(keys, index) if has_experts is None else has_experts):
        return layer
    moe = Moe(
        experts=keys.integer("n_routed_experts"),
        active=keys.integer("num_experts_per_tok"),
        intermediate=keys.integer("moe_intermediate_size"),
        scoring="sigmoid",
        scale=keys.number("moe_router_scaling_factor", 1.0),
        correction=True,
        shared=keys.integer("share_expert_dim"),
        storage="stacked",
        limit=_limit(keys, "swiglu_limits", index),
    )
    return replace(layer, moe=moe)


def _usual_names(keys: ConfigKeys) -> ConfigKeys:
    """Return the keys under the names that this file uses, with `DEFAULTS` for missing ones."""
    data = {OTHER_NAMES.get(name, name): value for name, value in keys.data.items() if value is not None}
    return keys.with_data({**DEFAULTS, **data})


def _without_rope(keys: ConfigKeys) -> ConfigKeys:
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "partial_rotary_factors")
    return keys.with_data({name: value for name, value in keys.data.items() if name not in names})


def _rope(keys: ConfigKeys, index: int, layer_type: str) -> Rope:
    """Return the rope of a layer. `rope_theta` and `partial_rotary_factors` may be lists with an entry for each layer.
    `rope_scaling` applies to the layer types in `yarn_only_types`, by default to full attention.
    """
    if layer_type in keys.section("rope_parameters").data:
        return rope_of(keys, 10000.0, layer_type, allow_partial_rotary=True)
    data = {name: value for name, value in keys.data.items() if name != "rope_parameters"}
    for name, listed in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factors")):
        value = keys.data.get(listed)
        if isinstance(value, list):
            data[name] = _entry(keys, listed, value, index)
    if layer_type not in keys.data.get("yarn_only_types", ["full_attention"]):
        data.pop("rope_scaling", None)
    return rope_of(keys.with_data(data), 10000.0, allow_partial_rotary=True)


def _sliding_heads(keys: ConfigKeys) -> int:
    other = keys.section("attention_other_setting")
    default = other.integer("num_attention_heads", keys.integer("num_attention_heads"))
    heads, kv_heads = keys.integer("num_sliding_attention_heads", default), keys.integer("num_key_value_heads")
    if heads % kv_heads:
        raise keys.error(f"num_attention_groups {kv_heads} must divide the {heads} heads of sliding attention")
    return heads


def _has_experts(keys: ConfigKeys, index: int) -> bool:
    """Return whether a layer has experts, by `mlp_layer_types`, or by `moe_layers_enum`, such as "3,4,5"."""
    layer_type = _layer_type(keys, "mlp_layer_types", ("dense", "sparse"), index)
    if layer_type is not None:
        return layer_type == "sparse"
    listed = keys.data.get("moe_layers_enum")
    if listed is None:
        return index >= FIRST_SPARSE_LAYER
    try:
        return index in {int(item) for item in (listed.split(",") if isinstance(listed, str) else listed)}
    except (TypeError, ValueError):
        raise keys.error(f"moe_layers_enum must list layer numbers, got {listed!r}") from None


def _limit(keys: ConfigKeys, name: str, index: int) -> float | None:
    """Return the entry of a layer in a list of limits; None if there is no list, if the entry is 0 or null, or if the
    layer is an MTP layer and the list ends before it.
    """
    limits = keys.data.get(name)
    if limits is None or (isinstance(limits, list) and len(limits) == keys.integer("num_hidden_layers") <= index):
        return None
    limit = _entry(keys, name, limits, index)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 0):
        raise keys.error(f"{name} must list numbers from 0, or null for no limit, got {limit!r} for layer {index}")
    return float(limit) if limit else None


def _layer_type(keys: ConfigKeys, name: str, known_types: Sequence[str], index: int) -> str | None:
    """Return the type of layer `index`, as the config's list `name` gives it, or None if the config has no such list.
    Published configs append the types of MTP layers to this list. `transformers` writes them to a second list,
    `mtp_{name}`.
    """
    types, mtp_types, num_layers = keys.data.get(name), keys.data.get(f"mtp_{name}"), keys.integer("num_hidden_layers")
    if types is None:
        return None
    if isinstance(types, list) and len(types) == num_layers and isinstance(mtp_types, list):
        types = [*types, *mtp_types]
    layer_type = _entry(keys, name, types, index)
    if layer_type not in known_types:
        raise keys.error(f"{name} must list {' or '.join(known_types)}, got {layer_type!r} for layer {index}")
    return str(layer_type)


def _entry(keys: ConfigKeys, name: str, values: Sequence[Any], index: int) -> Any:
    if not isinstance(values, list) or index >= len(values):
        raise keys.error(f"{name} must have an entry for layer {index}, got {values!r}")
    return values[index]
