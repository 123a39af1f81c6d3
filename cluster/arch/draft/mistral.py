"""Mistral's EAGLE drafts: params.json with consolidated.safetensors (SGLang #24058).

A draft is: x = eagle_linear([embed | target's post-norm hidden]), then ordinary layers (layer 0 also has a norm before
attention), then a final norm. Rope is over neighbouring pairs, queries are scaled as in Llama 4, embedding and head are
the target's. Tensors decide between GQA and MLA, and params.json must agree, so that an MLA draft is never read as GQA.
"""

import re
from dataclasses import replace
from typing import Any

from cluster.arch.draft.facts import FactResolver
from cluster.arch.draft.spec import DraftLayer, DraftSpec
from cluster.arch.draft.widths import latent_geometry, rope_layout, same_target, same_width, vocabulary_of
from cluster.arch.families.mistral_native import NAMES, NOT_SERVED, mistral_native, query_scaling
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
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "v_head_dim")


def read_mistral(folder: str, params: ConfigKeys, shapes: Shapes, target: TargetArch, facts: FactResolver) -> DraftSpec:
    """Return the Mistral EAGLE draft of this params.json and these shapes.

    Raises:
        ConfigError: config and shapes disagree or do not fit the target; the message gives both numbers.
    """
    given = {key: value for key, value in params.data.items() if key not in NOT_SERVED}
    plain = mistral_native(ConfigKeys(given | {"sliding_window": None}, folder, "params.json"))
    same_target(folder, ConfigKeys({"vocab_size": params.data.get("vocab_size")}, folder, "params.json"), target)
    latent = any(re.match(r"layers\.0\.attention\.(wq_[ab]|wkv_)", name) for name in shapes)
    asked = [key for key in LATENT_KEYS if params.data.get(key) is not None]
    if latent != bool(asked):
        raise ConfigError(
            f"draft {folder!r}: its tensors are {'MLA' if latent else 'GQA'} attention but params.json "
            f"{f'has none of {list(LATENT_KEYS)}' if latent else f'has {asked}, which belong to MLA'}"
        )
    geometry = _latent(params, plain) if latent else plain.layer
    same_width(folder, geometry.hidden, target)
    geometry = rope_layout(geometry, facts, "interleaved", "Mistral's format")
    windows = params.data.get("sliding_window")
    listed = windows if isinstance(windows, list) else [windows] * plain.num_layers
    if len(listed) != plain.num_layers or any(w is not None and (type(w) is not int or w < 1) for w in listed):
        raise ConfigError(f"params.json of {folder!r}: sliding_window must be a size or one per layer, got {windows!r}")
    vocabulary = vocabulary_of(folder, ConfigKeys({}, folder, "params.json"), _common(shapes), target, geometry.hidden)
    return DraftSpec(
        kind="mistral",
        dialect="mistral-mla" if latent else "mistral",
        layers=tuple(DraftLayer(replace(geometry, sliding_window=w), False, "input_layernorm") for w in listed),
        target_hidden=target.hidden,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size,
        dtype="bfloat16",
        input_source="final_postnorm",
        recurrent=facts.choose("recurrent", "post", "vLLM's Mistral EAGLE (SGLang's GQA variant: pre)"),
        embed=vocabulary.embed,
        head=vocabulary.head,
        query_scaling=query_scaling(params),
        names=EAGLE_NAMES,
        ignored_patterns=(KV_SCALES,),
    )


def _common(shapes: Shapes) -> Shapes:
    known = {"tok_embeddings.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
    return {ours: shapes[theirs] for theirs, ours in known.items() if theirs in shapes}


def _latent(params: ConfigKeys, plain: TargetArch) -> LayerGeometry:
    """Return the dense MLA layer in DeepSeek's form. If `apply_scale` is true, YaRN scales the softmax instead of cos
    and sin.
    """
    g, yarn = plain.layer, plain.layer.rope.yarn
    data: dict[str, Any] = {key: params.data.get(key) for key in (*LATENT_KEYS, "qk_nope_head_dim", "qk_rope_head_dim")}
    data |= {
        "hidden_size": g.hidden,
        "num_attention_heads": g.heads,
        "intermediate_size": g.intermediate,
        "rms_norm_eps": g.eps,
        "vocab_size": plain.vocab_size,
        "rope_theta": g.rope.theta,
        "n_routed_experts": 8,
    }
    layer = latent_geometry(params.having(data))
    if yarn is None:
        return layer
    grown = yarn.attention if params.section("yarn").flag("apply_scale", True) else 1.0
    rope = replace(g.rope, yarn=yarn._replace(attention=1.0))
    return replace(layer, rope=rope, scale=layer.softmax_scale * grown**2)
