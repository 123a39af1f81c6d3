"""Mistral's EAGLE drafts: params.json with consolidated.safetensors (SGLang #24058).

A draft is: x = eagle_linear([embed | target's post-norm hidden]), then ordinary layers (layer 0 also has a norm before
attention), then a final norm. Rope is over neighbouring pairs, queries may be scaled as in Llama 4, and embedding and
head are the target's unless the draft has its own. Tensors decide between GQA and MLA, and params.json must agree, so
that an MLA draft is never read as GQA.
"""

import re
from dataclasses import replace
from typing import Any

from cluster.arch.draft.facts import FactResolver
from cluster.arch.draft.spec import DraftLayer, DraftSpec
from cluster.arch.draft.widths import (
    check_same_target,
    check_same_width,
    latent_geometry,
    read_vocabulary,
    with_rope_layout,
)
from cluster.arch.families.mistral_native import NAMES, UNSERVED_KEYS, mistral_native, read_query_scaling
from cluster.arch.keys import ConfigKeys, Shapes
from cluster.arch.layer import LayerGeometry
from cluster.arch.target import TargetArch
from cluster.config import ConfigError

EAGLE_NAMES = (
    (r"^fc\.", "eagle_linear."),
    (r"\.self_attn\.q_a_proj\.", ".attention.wq_a."),
    (r"\.self_attn\.q_a_layernorm\.", ".attention.q_a_norm."),
    (r"\.self_attn\.q_b_proj\.", ".attention.wq_b."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a_with_mqa."),
    (r"\.self_attn\.kv_a_layernorm\.", ".attention.kv_a_norm."),
    (r"\.self_attn\.kv_b_proj\.", ".attention.wkv_b."),
    *NAMES,
)
KV_SCALES = r"^layers\.\d+\.attention\.[qkv]_fake_quantizer\.qscale_act$"
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "v_head_dim")


def read_mistral(folder: str, params: ConfigKeys, shapes: Shapes, target: TargetArch, facts: FactResolver) -> DraftSpec:
    """Return the Mistral EAGLE draft of this params.json and these shapes.

    Raises:
        ConfigError: config and shapes disagree or do not fit the target; the message gives both numbers.
    """
    served_params = {key: value for key, value in params.data.items() if key not in UNSERVED_KEYS}
    dense_target = mistral_native(ConfigKeys(served_params | {"sliding_window": None}, folder, "params.json"))
    check_same_target(folder, ConfigKeys({"vocab_size": params.data.get("vocab_size")}, folder, "params.json"), target)
    is_mla = any(re.match(r"layers\.0\.attention\.(wq_[ab]|wkv_)", name) for name in shapes)
    mla_keys = [key for key in MLA_KEYS if params.data.get(key) is not None]
    if is_mla != bool(mla_keys):
        raise ConfigError(
            f"draft {folder!r}: its tensors are {'MLA' if is_mla else 'GQA'} attention but params.json "
            f"{f'has none of {list(MLA_KEYS)}' if is_mla else f'has {mla_keys}, which belong to MLA'}"
        )
    geometry = _mla_geometry(params, dense_target) if is_mla else dense_target.layer
    check_same_width(folder, geometry.hidden, target)
    geometry = with_rope_layout(geometry, facts, "interleaved", "Mistral's format")
    sliding_window = params.data.get("sliding_window")
    layer_windows = sliding_window if isinstance(sliding_window, list) else [sliding_window] * dense_target.num_layers
    if len(layer_windows) != dense_target.num_layers or any(
        window is not None and (type(window) is not int or window < 1) for window in layer_windows
    ):
        raise ConfigError(
            f"params.json of {folder!r}: sliding_window must be a size or one per layer, got {sliding_window!r}"
        )
    vocabulary = read_vocabulary(
        folder, ConfigKeys({}, folder, "params.json"), _common_names(shapes), target, geometry.hidden
    )
    return DraftSpec(
        kind="mistral",
        dialect="mistral-mla" if is_mla else "mistral",
        layers=tuple(
            DraftLayer(replace(geometry, sliding_window=window), False, "input_layernorm") for window in layer_windows
        ),
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size,
        dtype="bfloat16",
        input_source="final_postnorm",
        recurrent=facts.choose("recurrent", "post", "vLLM's Mistral EAGLE (SGLang's GQA variant: pre)"),
        embed=vocabulary.embed,
        head=vocabulary.head,
        query_scaling=read_query_scaling(params),
        tensor_name_rules=EAGLE_NAMES,
        ignored_patterns=(KV_SCALES,),
    )


def _common_names(shapes: Shapes) -> Shapes:
    shared_names = {"tok_embeddings.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
    return {ours: shapes[theirs] for theirs, ours in shared_names.items() if theirs in shapes}


def _mla_geometry(params: ConfigKeys, dense_target: TargetArch) -> LayerGeometry:
    """Return the geometry of a layer with MLA and a dense MLP. YaRN does not scale cos and sin here. It scales the
    softmax instead, unless `apply_scale` in the section "yarn" of params.json is false.
    """
    g, yarn = dense_target.layer, dense_target.layer.rope.yarn
    data: dict[str, Any] = {key: params.data.get(key) for key in (*MLA_KEYS, "qk_nope_head_dim", "qk_rope_head_dim")}
    data |= {
        "hidden_size": g.hidden,
        "num_attention_heads": g.heads,
        "intermediate_size": g.intermediate,
        "rms_norm_eps": g.eps,
        "vocab_size": dense_target.vocab_size,
        "rope_theta": g.rope.theta,
        "n_routed_experts": 8,
    }
    layer = latent_geometry(params.with_data(data))
    if yarn is None:
        return layer
    magnitude = yarn.attention_factor if params.section("yarn").flag("apply_scale", True) else 1.0
    rope = replace(g.rope, yarn=yarn._replace(attention_factor=1.0))
    return replace(layer, rope=rope, scale=layer.softmax_scale * magnitude**2)
