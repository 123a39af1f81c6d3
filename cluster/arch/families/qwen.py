"""Qwen2 (biases on q, k, v), Qwen3 (norms per head), Qwen3-MoE, and what MTP drafts need to know about Qwen3-Next."""

from dataclasses import replace

from cluster.arch.keys import ConfigKeys
from cluster.arch.layer import LayerGeometry, Moe, geometry_of, sliding_layers, with_sliding_window
from cluster.arch.target import TargetArch, target_of


def qwen2(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Qwen2ForCausalLM`: q, k and v always have biases, the attention output never has one."""
    layer = replace(geometry_of(keys), attention_bias=True, out_bias=False)
    return target_of(keys, "Qwen2ForCausalLM", _layers_with_windows(keys, layer))


def mimo(keys: ConfigKeys) -> TargetArch:
    """Return the target of `MiMoForCausalLM`: Qwen2; the MTP draft in the same checkpoint is ignored."""
    return replace(qwen2(keys), family="MiMoForCausalLM", ignored_patterns=(r"^mtp_layers\.",))


def qwen3(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Qwen3ForCausalLM`; head_dim is 128 by default."""
    layer = replace(geometry_of(keys.with_defaults({"head_dim": 128})), qk_norm=True)
    return target_of(keys, "Qwen3ForCausalLM", _layers_with_windows(keys, layer))


def qwen3_moe(keys: ConfigKeys) -> TargetArch:
    """Return the target of `Qwen3MoeForCausalLM`. Every `decoder_sparse_step`-th layer has experts, unless
    `mlp_only_layers` lists it; all other layers are dense.
    """
    num_layers, step = keys.integer("num_hidden_layers"), keys.integer("decoder_sparse_step", 1)
    dense = replace(geometry_of(keys), qk_norm=True, sliding_window=_sliding_window(keys))
    moe = Moe(
        experts=keys.integer("num_experts", keys.integer("num_local_experts", 128)),
        active=keys.integer("num_experts_per_tok", 8),
        intermediate=keys.integer("moe_intermediate_size", 768),
        renormalise=keys.flag("norm_topk_prob"),
    )
    dense_layer_ids = keys.integers("mlp_only_layers") or []
    sparse = replace(dense, moe=moe)
    layers = [sparse if i not in dense_layer_ids and (i + 1) % step == 0 else dense for i in range(num_layers)]
    names = ((r"\.mlp\.router\.", ".mlp.gate."),)
    return target_of(keys, "Qwen3MoeForCausalLM", tuple(layers), tensor_name_rules=names)


NEXT_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
"""Qwen3-Next's values of these keys if a config leaves them out."""
NEXT_NAMES = (
    (r"\.mlp\.router\.", ".mlp.gate."),
    (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    (r"\.mlp\.shared_gate\.", ".mlp.shared_expert_gate."),
)


def read_qwen3_next_moe(keys: ConfigKeys) -> Moe:
    """Return the `Moe` of Qwen3-Next: scores are a softmax over all experts, and every token also uses a gated shared
    expert.
    """
    experts, active = keys.integer("num_experts", 512), keys.integer("num_experts_per_tok", 10)
    if active > experts:
        raise keys.error(f"num_experts_per_tok {active} exceeds the {experts} experts")
    return Moe(
        experts=experts,
        active=active,
        intermediate=keys.integer("moe_intermediate_size", 512),
        renormalise=keys.flag("norm_topk_prob", True),
        shared=keys.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def _sliding_window(keys: ConfigKeys) -> int | None:
    """Return the sliding window if `use_sliding_window` is true, otherwise None."""
    uses_window = keys.flag("use_sliding_window") and keys.data.get("sliding_window", 4096) is not None
    return keys.integer("sliding_window", 4096) if uses_window else None


def _layers_with_windows(keys: ConfigKeys, layer: LayerGeometry) -> tuple[LayerGeometry, ...]:
    """Return the layers. If `use_sliding_window` is true, `layer_types` lists which layers have the sliding window;
    without `layer_types`, the layers from `max_window_layers` on have it. Otherwise no layer has a window.
    """
    num_layers, window = keys.integer("num_hidden_layers"), _sliding_window(keys)
    first_windowed = keys.count("max_window_layers", 28)
    default = [window is not None and i >= first_windowed for i in range(num_layers)]
    is_sliding = sliding_layers(keys, num_layers, default)
    return with_sliding_window(layer, window, [slides and window is not None for slides in is_sliding])
