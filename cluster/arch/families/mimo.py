"""MiMo-V2-Flash: full layers and layers with a sliding window that differ in their KV heads, rope and sinks; K wider
than V; experts as in DeepSeek-V3 without a shared one.
"""

from dataclasses import replace

from cluster.arch.families.deepseek import NAMES, read_grouped_moe
from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import LayerGeometry, check_rotated_part, geometry_of, sliding_layers
from cluster.arch.rope import Rope, rope_of, scaling_of
from cluster.arch.target import TargetArch, target_of

DEFAULTS = {
    "head_dim": 192,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
"""The values of these keys if a config leaves them out."""
PARTIAL_ROTARY_FACTOR = 0.334
VALUE_SCALE = 0.707
THETAS = {"full_attention": 5e6, "sliding_attention": 1e4}
"""The base of each layer type's rope if a config leaves it out."""
SINK_NAMES = ((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),)


def mimo_v2(keys: ConfigKeys) -> TargetArch:
    """Return the target of `MiMoV2FlashForCausalLM`. Its MTP draft in the same checkpoint is ignored.

    Two spellings of the config are read: that of the published checkpoint (`hybrid_layer_pattern`, `moe_layer_freq`,
    `swa_...`, `layernorm_epsilon`), and that of `transformers` (`layer_types`, `mlp_layer_types`, `rope_parameters`).
    """
    num_layers = keys.integer("num_hidden_layers")
    default = [i != 0 and (i + 1) % 6 != 0 for i in range(num_layers)]
    is_sliding = sliding_layers(keys, num_layers, _flags_of_layers(keys, "hybrid_layer_pattern", default))
    full, sliding = mimo_v2_layers(keys)
    _refuse_unserved(keys)
    moe = replace(read_grouped_moe(_without(_full_keys(keys), "n_shared_experts")), shared=0)
    layers = [
        replace(sliding if slides else full, moe=moe if has_experts else None)
        for slides, has_experts in zip(is_sliding, _layers_with_experts(keys, num_layers), strict=True)
    ]
    return target_of(
        keys,
        "MiMoV2FlashForCausalLM",
        tuple(layers),
        tensor_name_rules=(*NAMES, *SINK_NAMES),
        ignored_patterns=(r"^mtp\.",),
    )


def mimo_v2_layers(config: ConfigKeys) -> tuple[LayerGeometry, LayerGeometry]:
    """Return a full layer and a layer with the sliding window, both with a dense MLP."""
    keys = _full_keys(config)
    has_value_scale = config.data.get("attention_value_scale", VALUE_SCALE) is not None  # null: values are not scaled
    full = replace(
        geometry_of(_without(keys, "rope_parameters", "rope_scaling", "partial_rotary_factor")),
        out_bias=False,
        rope=_rope(keys, "full_attention"),
        v_head_dim=keys.integer("v_head_dim"),
        value_scale=keys.number("attention_value_scale", VALUE_SCALE) if has_value_scale else 1.0,
        sinks=keys.flag("add_full_attention_sink_bias"),
    )
    # The published config counts the tokens before a row, `transformers` counts the row itself too.
    before = keys.data.get("sliding_window_size")
    sliding = replace(
        full,
        heads=keys.integer("swa_num_attention_heads", full.heads),
        kv_heads=keys.integer("swa_num_key_value_heads", 2 * full.kv_heads),
        head_dim=keys.integer("swa_head_dim", full.head_dim),
        v_head_dim=keys.integer("swa_v_head_dim", full.value_dim),
        rope=_rope(keys, "sliding_attention"),
        sliding_window=keys.integer("sliding_window", 129)
        if before is None
        else keys.integer("sliding_window_size") + 1,
        sinks=keys.flag("add_swa_attention_sink_bias", True),
    )
    if sliding.heads % sliding.kv_heads:
        raise keys.error(
            f"swa_num_key_value_heads {sliding.kv_heads} must divide swa_num_attention_heads {sliding.heads}"
        )
    for layer in (full, sliding):
        check_rotated_part(keys, layer.head_dim, layer.rope)
    return full, sliding


def _full_keys(keys: ConfigKeys) -> ConfigKeys:
    """Return the keys, completed with `DEFAULTS`. The published key `layernorm_epsilon` is copied to `rms_norm_eps`,
    the name that other models use.
    """
    eps = keys.data.get("layernorm_epsilon")
    return keys.with_defaults(DEFAULTS | ({} if eps is None else {"rms_norm_eps": eps}))


def _without(keys: ConfigKeys, *names: str) -> ConfigKeys:
    return keys.with_data({name: value for name, value in keys.data.items() if name not in names})


def _refuse_unserved(keys: ConfigKeys) -> None:
    """Raise if the config asks for what this family's function does not read.

    Raises:
        ConfigError: the message names the key.
    """
    layout, shared = keys.data.get("attention_projection_layout"), keys.count("n_shared_experts")
    if layout not in (None, "split_qkv"):
        raise keys.error(
            f"attention_projection_layout {layout!r} is not served: q, k and v must be tensors of their own"
        )
    if shared:
        raise keys.error(f"n_shared_experts {shared} is not served: MiMo-V2 has no shared expert")
    if scaling_of(keys).data.get("rope_type", "default") != "default":
        raise keys.error(f"rope_scaling {scaling_of(keys).data} is not served for MiMo-V2; set it to null")


def _rope(keys: ConfigKeys, layer_type: str) -> Rope:
    """Return the rope of a layer type. `rope_parameters` may list the types. Otherwise the base of sliding attention is
    `swa_rope_theta`, and all other values are for both types.
    """
    rope_keys = keys.with_defaults({"partial_rotary_factor": PARTIAL_ROTARY_FACTOR})
    if layer_type in keys.section("rope_parameters").data:
        return rope_of(rope_keys, THETAS[layer_type], layer_type, allow_partial_rotary=True)
    full = rope_of(rope_keys, THETAS["full_attention"], allow_partial_rotary=True)
    if layer_type == "full_attention":
        return full
    return replace(full, theta=keys.number("swa_rope_theta", THETAS[layer_type]))


def _layers_with_experts(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts: by default all but the first."""
    types = keys.data.get("mlp_layer_types")
    if types is None:
        return _flags_of_layers(keys, "moe_layer_freq", [i > 0 for i in range(num_layers)])
    if not isinstance(types, list) or len(types) != num_layers or set(types) - {"dense", "sparse"}:
        raise keys.error(f"mlp_layer_types must list 'dense' or 'sparse' for the {num_layers} layers, got {types!r}")
    return [layer_type == "sparse" for layer_type in types]


def _flags_of_layers(keys: ConfigKeys, key: str, default: list[bool]) -> list[bool]:
    """Return a bool for each layer: True if the layer's entry in the list `key` is 1, False if it is 0. If the config
    has no such list, return `default`.
    """
    flags = keys.integers(key)
    if flags is None:
        return default
    if len(flags) != len(default) or set(flags) - {0, 1}:
        raise keys.error(f"{key} must list 0 or 1 for the {len(default)} layers, got {flags!r}")
    return [flag == 1 for flag in flags]
