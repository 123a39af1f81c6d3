"""The registry of MTP dialects under test, and of lists of MTP layers; `draft_cases` has the other drafts."""

from dataclasses import replace

from tests.unit.models import draft_folders as write
from tests.unit.models import mtp_layers as layers
from tests.unit.models.draft_case import Case, DraftRow
from tests.unit.models.draft_reference import Mtp

# Conventions that several cases share.
NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
NEXTN_EXPERTS = {
    "at": "layers.4.",
    "inner": "layers.4.",
    "parts": NEXTN,
    "zero_first": True,
    "config": {"first_k_dense_replace": 0, "num_hidden_layers": 1},
}
QWEN_NEXT = {
    "at": "mtp.",
    "inner": "mtp.layers.0.",
    "parts": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "gemma": True,
    "config": {"layer_types": ["full_attention"], "num_hidden_layers": 1},
}
MIMO_V2 = {
    "at": "mtp.layers.0.",
    "inner": "mtp.layers.0.",
    "parts": ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    "before_norm": True,
    "window": 6,
    "renamed": {
        "final_layernorm.weight": "",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attn.attention_sink_bias": "self_attn.sinks",
    },
    "config": {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["dense"],
        "rms_norm_eps": 1e-5,
    },
}
PLAIN_STEP = {
    "at": "layers.4.",
    "inner": "layers.4.transformer.",
    "parts": NEXTN,
    "gemma": True,
    "pre": True,
    "before_norm": True,
    "head": "layers.4.shared_head.output.weight",
}
STEP = PLAIN_STEP | {
    "inner": "layers.4.",
    "parts": (*NEXTN[:3], "transformer.shared_head.norm"),
    "head": "layers.4.transformer.shared_head.output.weight",
    "window": 6,
    "renamed": dict.fromkeys(("transformer.shared_head.norm.weight", "transformer.shared_head.output.weight"), ""),
    "config": {
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": 2,
        "num_sliding_attention_heads": 6,
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["dense"],
        "rope_theta": 1e4,
        "partial_rotary_factors": None,
        "swiglu_limits_shared": [0.3],
    },
}

STEP_CASE = Case(
    "MTP",
    "Step-3.5: more heads, a gate per head, a sliding window, limits",
    layers.step_layers,
    layers.WindowedMtpLayer,
    STEP,
    {"dialect": "step-3.5", "head": "own", "chained": True},
    source="transformers' layer, float64",
)

MTP_CASES: dict[str, Case] = {
    "mimo": Case(
        "MTP",
        "MiMo: reversed concatenation",
        lambda: write.mtp("mimo"),
        Mtp,
        {
            "at": "mtp_layers.0.",
            "parts": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
            "hidden_first": True,
            "zero_first": True,
        },
        {"dialect": "mimo"},
    ),
    "nextn": Case(
        "MTP",
        "DeepSeek NextN, dense",
        lambda: write.mtp("deepseek"),
        Mtp,
        {"at": "layers.4.", "parts": NEXTN, "zero_first": True},
        {"dialect": "deepseek-nextn"},
    ),
    "nextn-mla": Case(
        "MTP",
        "DeepSeek NextN, latent attention",
        lambda: write.mtp("deepseek", mla=True),
        Mtp,
        {"at": "layers.4.", "parts": NEXTN, "zero_first": True},
    ),
    "nextn-sparse": Case(
        "MTP",
        "DeepSeek NextN, latent attention and eight experts in four groups",
        lambda: write.mtp("deepseek", mla=True, sparse=True),
        Mtp,
        {"at": "layers.4.", "parts": NEXTN, "zero_first": True},
        {"dialect": "deepseek-nextn"},
    ),
    "step": Case(
        "MTP",
        "Step-3.5, as `aerie train mtp` writes it: own head, norms of 1 + weight",
        lambda: write.mtp("step"),
        Mtp,
        PLAIN_STEP,
        {"dialect": "step-3.5", "head": "own", "chained": True},
    ),
    "step-3.5": STEP_CASE,
    "step-3.7": replace(
        STEP_CASE,
        description="Step-3.7: the same, in a checkpoint with a vision tower",
        folder=lambda: layers.step_layers(wrapped=True),
    ),
    "nextn-experts": Case(
        "MTP",
        "DeepSeek NextN, latent attention and experts",
        layers.nextn_experts,
        layers.TransformersMtpLayer,
        NEXTN_EXPERTS,
        {"dialect": "deepseek-nextn"},
        source="transformers' layer, float64",
    ),
    "nextn-experts-fp8": Case(
        "MTP",
        "DeepSeek NextN, experts in FP8 with block scales, chosen freely",
        lambda: layers.nextn_experts(fp8=True, n_group=1, topk_group=1, norm_topk_prob=False),
        layers.TransformersMtpLayer,
        NEXTN_EXPERTS,
        source="transformers' layer, float64",
    ),
    "glm": Case(
        "MTP",
        "GLM NextN, half of each head rotated, norms, biases, experts",
        layers.glm,
        layers.TransformersMtpLayer,
        NEXTN_EXPERTS,
        {"dialect": "deepseek-nextn"},
        source="transformers' layer, float64",
    ),
    "glm-plain": Case(
        "MTP",
        "GLM NextN, a quarter rotated, neither norms nor biases, one group",
        lambda: layers.glm("", use_qk_norm=False, partial_rotary_factor=0.25, n_group=None, topk_group=None),
        layers.TransformersMtpLayer,
        NEXTN_EXPERTS | {"config": NEXTN_EXPERTS["config"] | {"n_group": 1, "topk_group": 1}},
        source="transformers' layer, float64",
    ),
    "qwen3-next": Case(
        "MTP",
        "Qwen3-Next: gated heads, half of each rotated, experts and a gated shared one",
        layers.qwen_next,
        layers.TransformersMtpLayer,
        QWEN_NEXT,
        {"dialect": "qwen3-next", "head": "target", "zero_first": False, "recurrent": "post"},
        source="transformers' layer, float64",
    ),
    "mimo-v2": Case(
        "MTP",
        "MiMo-V2-Flash: wide keys, a sliding window, sinks",
        layers.mimo_v2_layers,
        layers.WindowedMtpLayer,
        MIMO_V2,
        {"dialect": "mimo-v2", "head": "target", "zero_first": False, "chained": False},
        source="transformers' layer, float64",
    ),
    "qwen3-next-dense": Case(
        "MTP",
        "Qwen3-Next: dense, biases, the default part rotated",
        lambda: layers.qwen_next(sparse=False, biased="qkvo", attention_bias=True, partial_rotary_factor=None),
        layers.TransformersMtpLayer,
        QWEN_NEXT | {"config": QWEN_NEXT["config"] | {"num_experts": 0, "partial_rotary_factor": 0.25}},
        source="transformers' layer, float64",
    ),
}
RUNNERS = 3
BY_LEVEL = "dense reference of each level, float64"
BY_LAW = "one layer: as above; the list: law 1"
LISTS: dict[str, DraftRow] = {
    "mimo x3": DraftRow("MTP", "list of three MiMo layers", lambda: write.mtp("mimo", RUNNERS), BY_LEVEL),
    "mimo-v2 x3": DraftRow(
        "MTP", "list of three MiMo-V2-Flash layers", lambda: layers.mimo_v2_layers(RUNNERS), BY_LEVEL
    ),
    "step-3.5 x3": DraftRow(
        "MTP",
        "list of three Step-3.5 layers, chained, with gates and a window",
        lambda: layers.step_layers(RUNNERS),
        BY_LEVEL,
    ),
    "nextn x3": DraftRow("MTP", "list of three NextN layers, dense", lambda: write.mtp("deepseek", RUNNERS), BY_LAW),
    "nextn-sparse x3": DraftRow(
        "MTP",
        "list of three NextN layers, latent attention and experts",
        lambda: write.mtp("deepseek", RUNNERS, mla=True, sparse=True),
        BY_LAW,
    ),
    "step x3": DraftRow("MTP", "list of three Step-3.5 layers, chained", lambda: write.mtp("step", RUNNERS), BY_LEVEL),
    "nextn-grouped-experts": DraftRow(
        "MTP", "NextN, grouped heads and experts", lambda: write.mtp("deepseek", sparse=True), "law 1"
    ),
}
