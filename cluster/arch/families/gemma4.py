"""Gemma-4's language model. It has layers with a sliding window and full layers, with other head widths and KV heads,
and norms before and after attention and MLP. A checkpoint may have layers that read the keys and values of an earlier
layer, inputs of their own for each layer, and experts beside the MLP.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import LayerGeometry, Moe, geometry_of, sliding_layers
from cluster.arch.rope import Rope, rope_of
from cluster.arch.target import TargetArch, target_of

DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
}
"""The values of these keys if a config leaves them out. They are those of `transformers`."""
GLOBAL_HEAD_DIM, LAYER_INPUT = 512, 256
"""The width of a head of full layers, and of a layer's own input, if a config leaves them out."""
STORED_PARTS = r"(weight\w*|bias|qweight|qzeros|scales|g_idx|qscale_\w+|(input|activation|act)_\w+)"
"""The last parts of the names of a matrix's tensors, plain or quantised."""
NAMES = (
    (r"\.after_attention\.", ".post_attention_layernorm."),
    (r"\.before_mlp\.", ".pre_feedforward_layernorm."),
    (r"\.after_mlp\.", ".post_feedforward_layernorm."),
    (r"\.after_dense_mlp\.", ".post_feedforward_layernorm_1."),
    (r"\.before_experts\.", ".pre_feedforward_layernorm_2."),
    (r"\.after_experts\.", ".post_feedforward_layernorm_2."),
    (r"\.moe\.router\.weight", ".router.proj.weight"),
    (r"\.moe\.router\.norm", ".router.scale"),
    (r"\.moe\.router\.expert_scale", ".router.per_expert_scale"),
    (r"\.moe\.experts\.", ".experts."),
    (r"\.layer_input\.gate\.", ".per_layer_input_gate."),
    (r"\.layer_input\.projection\.", ".per_layer_projection."),
    (r"\.layer_input\.norm\.", ".post_per_layer_input_norm."),
    (r"\.output_scale$", ".layer_scalar"),
    (r"^layer_inputs\.embed_tokens\.", "embed_tokens_per_layer."),
    (r"^layer_inputs\.projection\.", "per_layer_model_projection."),
    (r"^layer_inputs\.norm\.", "per_layer_projection_norm."),
)


def gemma4(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Gemma4ForCausalLM`: by default five layers with a window per full layer, and a tied
    head. The last layer is always a full one.

    Raises:
        ConfigError: a value is wrong or not served.
    """
    layers, keys = gemma4_layers(keys), keys.with_defaults(DEFAULTS)
    if layers[0].layer_input and keys.integer("vocab_size_per_layer_input", 262144) < keys.integer("vocab_size"):
        raise keys.error("vocab_size_per_layer_input must be at least vocab_size")
    softcap = keys.data.get("final_logit_softcapping")
    unused = "|".join(str(index) for index, layer in enumerate(layers) if layer.borrows is not None)
    return target_of(
        keys,
        "Gemma4ForCausalLM",
        layers,
        tied=keys.flag("tie_word_embeddings", True),
        embed_scale=layers[0].hidden ** 0.5,
        layer_input_vocab=keys.integer("vocab_size_per_layer_input", 262144) if layers[0].layer_input else 0,
        softcap=None if softcap is None else keys.number("final_logit_softcapping", 1.0),
        tensor_name_rules=NAMES,
        # Published checkpoints contain k_proj and v_proj of all layers, but layers that borrow do not use theirs.
        ignored_patterns=(rf"^layers\.({unused})\.self_attn\.[kv]_(proj|norm)\.{STORED_PARTS}$",) if unused else (),
    )


def gemma4_layers(keys: ConfigKeys) -> tuple[LayerGeometry, ...]:
    """Return the layers of a text config of Gemma-4.

    Raises:
        ConfigError: a value is wrong or not served.
    """
    keys = keys.with_defaults(DEFAULTS)
    if keys.data.get("use_bidirectional_attention") == "all":
        raise keys.error("use_bidirectional_attention 'all' is not served")
    num_layers = keys.integer("num_hidden_layers")
    is_sliding = sliding_layers(keys, num_layers, [(i + 1) % 6 != 0 for i in range(num_layers)])
    is_sliding[-1] = False
    base = _layer(keys)
    local = replace(
        base, rope=_rope(keys, "sliding_attention", Rope(10000.0)), sliding_window=keys.integer("sliding_window")
    )
    layers = [local if slides else _full_layer(keys, base, index) for index, slides in enumerate(is_sliding)]
    shared = keys.count("num_kv_shared_layers")
    first_shared = num_layers - shared
    if first_shared < 1:
        raise keys.error(f"num_kv_shared_layers {shared} must be below num_hidden_layers {num_layers}")
    factor = 2 if keys.flag("use_double_wide_mlp") else 1
    for index in range(first_shared, num_layers):
        lender = last_with_own_kv(layers[:first_shared], layers[index])
        if lender is None:
            kind = "sliding_attention" if is_sliding[index] else "full_attention"
            raise keys.error(
                f"num_kv_shared_layers {shared}: layer {index} has type {kind}, and no layer before the last {shared} "
                "has this type, whose keys and values it could read"
            )
        wide = replace(layers[index], intermediate=factor * layers[index].intermediate)
        layers[index] = replace(wide, borrows=lender, keys_as_values=False)
    return tuple(layers)


def last_with_own_kv(layers: Sequence[LayerGeometry], reader: LayerGeometry) -> int | None:
    """Return the number of the last of `layers` that keeps keys and values of its own and has the type of `reader`:
    with a sliding window, or without. Return None if there is none.
    """
    has_window = reader.sliding_window is not None
    numbers = [
        number
        for number, layer in enumerate(layers)
        if layer.borrows is None and (layer.sliding_window is not None) == has_window
    ]
    return numbers[-1] if numbers else None


def _layer(keys: ConfigKeys) -> LayerGeometry:
    """Return what all layers have in common."""
    without_rope = {key: value for key, value in keys.data.items() if key not in ("rope_parameters", "rope_scaling")}
    return replace(
        geometry_of(keys.with_data(without_rope), "gelu_tanh"),
        mlp_bias=False,
        scale=1.0,
        qk_norm=True,
        value_norm=True,
        sandwich=True,
        moe=_moe(keys),
        layer_input=keys.count("hidden_size_per_layer_input", LAYER_INPUT),
        output_scale=True,
    )


def _full_layer(keys: ConfigKeys, base: LayerGeometry, index: int) -> LayerGeometry:
    """Return layer `index`, a full one. `transformers` writes its sizes under `per_layer_config`."""
    same_kv = keys.flag("attention_k_eq_v")
    head_dim, kv_heads = base.head_dim, base.kv_heads
    if not keys.data.get("per_layer_config"):
        head_dim = keys.integer("global_head_dim", GLOBAL_HEAD_DIM)
        kv_heads = keys.integer("num_global_key_value_heads", kv_heads) if same_kv else kv_heads
    sizes = keys.section("per_layer_config").section(str(index))
    layer_kv_heads = sizes.integer("num_key_value_heads", kv_heads)
    if base.heads % layer_kv_heads:
        raise keys.error(f"num_key_value_heads {layer_kv_heads} of layer {index} must divide {base.heads} heads")
    return replace(
        base,
        head_dim=sizes.integer("head_dim", head_dim),
        kv_heads=layer_kv_heads,
        keys_as_values=same_kv,
        rope=_rope(keys, "full_attention", Rope(1e6, proportional=0.25)),
    )


def _rope(keys: ConfigKeys, layer_type: str, default: Rope) -> Rope:
    """Return the rope of a layer type, or `default` if the config has none for it."""
    sections = keys.section("rope_parameters").data, keys.section("rope_scaling").data
    return rope_of(keys, default.theta, layer_type) if any(layer_type in data for data in sections) else default


def _moe(keys: ConfigKeys) -> Moe | None:
    """Return the experts beside the MLP of every layer; None if the model has none."""
    if not keys.flag("enable_moe_block"):
        return None
    experts, active = keys.integer("num_experts"), keys.integer("top_k_experts")
    if active > experts:
        raise keys.error(f"top_k_experts {active} exceeds num_experts {experts}")
    return Moe(
        experts=experts,
        active=active,
        intermediate=keys.integer("moe_intermediate_size"),
        normed_router=True,
        expert_scale=True,
        beside_mlp=True,
        storage="joined",
    )
