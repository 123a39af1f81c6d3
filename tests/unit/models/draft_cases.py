"""The registry of draft dialects under test: for each case a writer of a tiny draft, and the reference that the draft
must equal. The table of drafts in docs/models.md is made from this registry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from tests.parity.reference import TargetPass, target_reference
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models import draft_folders as write
from tests.unit.models import mtp_layers as layers
from tests.unit.models.draft_reference import Eagle1, Eagle3, Mistral, Mtp


class Oracle(Protocol):
    """A dense reference of a draft; see `draft_reference`."""

    def fuse(self, target_pass: TargetPass) -> Tensor: ...

    def run(self, next_tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Case:
    """A draft of one dialect in one shape.

    `folder` writes the draft, `conventions` are the reference's, `expected_spec` are fields of the resolved spec.
    """

    family: str
    description: str
    folder: Callable[[], str]
    reference: Callable[..., Oracle]
    conventions: dict[str, Any]
    expected_spec: dict[str, Any] = field(default_factory=dict)
    target: Callable[[], str] = target_folder
    source: str = "dense reference, float64"

    def oracle(self) -> Oracle:
        return self.reference(self.folder(), target_reference(self.target()), **self.conventions)


@dataclass(frozen=True)
class DraftRow:
    """A row of the documented table for a draft that has no dense reference of its own in this file.

    Such a draft is a list of draft runners, or it needs a certain target.
    """

    family: str
    description: str
    folder: Callable[[], str]
    source: str


# Conventions that several cases share.
THREE = {"boundaries": (1, 2, 3)}
NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
SPEC = {"boundaries": (1, 2, 4)}
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
STEP = {
    "at": "layers.4.",
    "inner": "layers.4.transformer.",
    "parts": NEXTN,
    "gemma": True,
    "pre": True,
    "head": "layers.4.shared_head.output.weight",
    "window": 6,
    "renamed": {},
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


def _tiny(**options: Any) -> Callable[[], str]:
    return lambda: draft_folder(target_folder(), **options)


CASES: dict[str, Case] = {
    "original": Case(
        "EAGLE-3",
        "original: midlayer, default layers",
        lambda: write.original(draft_vocab=40),
        Eagle3,
        {"boundaries": (2, 4, 5)},
        {"dialect": "original", "aux_boundaries": (2, 4, 5)},
        write.deep_target,
    ),
    "specforge": Case("EAGLE-3", "SpecForge, lmsys", _tiny(draft_vocab=40), Eagle3, THREE, {"dialect": "specforge"}),
    "specforge-full": Case(
        "EAGLE-3", "SpecForge, the target's head", _tiny(own_head=False), Eagle3, THREE, {"head": "target"}
    ),
    "five-aux": Case("EAGLE-3", "five aux hidden states", _tiny(num_aux=5), Eagle3, {"boundaries": (0, 1, 2, 3, 4)}),
    "one-aux": Case("EAGLE-3", "one aux hidden state", _tiny(num_aux=1), Eagle3, {"boundaries": (3,)}),
    "wide": Case(
        "EAGLE-3", "draft wider than the target", _tiny(hidden=48), Eagle3, THREE, {"hidden": 48, "embed": "own"}
    ),
    "narrow": Case("EAGLE-3", "draft narrower than the target", _tiny(hidden=16), Eagle3, THREE, {"hidden": 16}),
    "ordinary-layers": Case(
        "EAGLE-3",
        "three layers, later ones ordinary (ModelOpt, speculators, vLLM)",
        lambda: write.three_layer_draft("input_layernorm"),
        Eagle3,
        THREE | {"later": ("input_layernorm",) * 2},
        {"num_layers": 3},
    ),
    "sglang-layers": Case(
        "EAGLE-3",
        "three layers, later ones normed by hidden_norm (SGLang)",
        lambda: write.three_layer_draft("hidden_norm"),
        Eagle3,
        THREE | {"later": ("hidden_norm",) * 2},
        {"num_layers": 3},
    ),
    "deepspec-layers": Case(
        "EAGLE-3",
        "three layers, each reads the embedding (DeepSpec)",
        lambda: write.three_layer_draft("pair"),
        Eagle3,
        THREE | {"later": ("pair",) * 2},
        {"dialect": "deepspec", "num_layers": 3},
    ),
    "modelopt": Case("EAGLE-3", "ModelOpt", write.modelopt, Eagle3, THREE, {"dialect": "modelopt"}),
    "modelopt-layers": Case(
        "EAGLE-3",
        "ModelOpt, two layers",
        lambda: write.modelopt(layers=2),
        Eagle3,
        THREE | {"later": ("input_layernorm",)},
    ),
    "modelopt-no-aux": Case(
        "EAGLE-3",
        "ModelOpt, use_aux_hidden_state false",
        lambda: write.modelopt(use_aux=False),
        Eagle3,
        {"boundaries": None},
        {"input_source": "final_postnorm", "fc": False},
    ),
    "modelopt-no-norm": Case(
        "EAGLE-3",
        "ModelOpt, use_last_layernorm false",
        lambda: write.modelopt(last_norm=False),
        Eagle3,
        THREE,
        {"final_norm": False},
    ),
    "modelopt-before-fc": Case(
        "EAGLE-3",
        "ModelOpt, norm_before_fc (gpt-oss v3)",
        lambda: write.modelopt(before_fc=True),
        Eagle3,
        THREE,
        {"norm_before_fc": True},
    ),
    "speculators": Case(
        "EAGLE-3",
        "speculators",
        write.speculators,
        Eagle3,
        SPEC | {"residual_normed": True},
        {"dialect": "speculators", "aux_boundaries": (1, 2, 4), "norm_before_residual": True},
    ),
    "speculators-raw": Case(
        "EAGLE-3", "speculators, residual before the norm", lambda: write.speculators(residual=False), Eagle3, SPEC
    ),
    "speculators-layers": Case(
        "EAGLE-3",
        "speculators, two layers, fc_norm and norm_output",
        lambda: write.speculators(layers=2, fc_norm=True, norm_output=True),
        Eagle3,
        SPEC | {"residual_normed": True, "post": True, "later": ("input_layernorm",)},
        {"recurrent": "post"},
    ),
    "speculators-before-fc": Case(
        "EAGLE-3",
        "speculators, norm_before_fc",
        lambda: write.speculators(norm_before_fc=True),
        Eagle3,
        SPEC | {"residual_normed": True},
    ),
    "3.1": Case(
        "EAGLE-3.1",
        "fc_norm and norm_output",
        _tiny(fc_norm=True, norm_output=True),
        Eagle3,
        THREE | {"post": True},
        {"dialect": "eagle-3.1", "recurrent": "post"},
    ),
    "3.1-legacy": Case(
        "EAGLE-3.1",
        "legacy names aux_norm_low, mid, high",
        write.legacy_31,
        Eagle3,
        THREE | {"post": True},
        {"fc_norm": True},
    ),
    "eagle1": Case("EAGLE-1/2", "fc with bias (no key)", write.eagle1, Eagle1, {}, {"kind": "eagle1", "fc_bias": True}),
    "eagle1-no-bias": Case(
        "EAGLE-1/2", "fc without bias", lambda: write.eagle1(bias=False), Eagle1, {}, {"fc_bias": False}
    ),
    "eagle1-layers": Case(
        "EAGLE-1/2",
        "two layers, biases on q, k, v (Qwen2)",
        lambda: write.eagle1(layers=2, biased="qkv"),
        Eagle1,
        {},
    ),
    "eagle1-map": Case(
        "EAGLE-1/2",
        "a map to 25 of the target's ids (FR-Spec)",
        lambda: write.eagle1(vocab=25),
        Eagle1,
        {},
        {"vocab_map": True, "head": "target"},
    ),
    "qwen3": Case(
        "EAGLE-3",
        "speculators, Qwen3 layers with q and k norms",
        lambda: write.speculators(qwen3=True),
        Eagle3,
        SPEC | {"residual_normed": True},
    ),
    "windows": Case(
        "EAGLE-3",
        "speculators, Qwen3 layers, the second through a window",
        lambda: write.speculators(
            2,
            True,
            layer_overrides={
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
        Eagle3,
        SPEC | {"residual_normed": True, "later": ("input_layernorm",), "window": {"layers.1.self_attn": 4}},
    ),
    "mla": Case(
        "EAGLE-3", "latent attention (Eagle3DeepseekV2, Kimi)", write.mla_eagle3, Eagle3, THREE, {"dialect": "modelopt"}
    ),
    "mistral": Case(
        "Mistral EAGLE",
        "GQA, two layers, interleaved rope",
        write.mistral,
        Mistral,
        {"interleaved": True},
        {"dialect": "mistral", "kind": "mistral"},
    ),
    "mistral-scaled": Case(
        "Mistral EAGLE",
        "llama-4's scaling of queries",
        lambda: write.mistral(llama_4_scaling={"original_max_position_embeddings": 4, "beta": 0.5}),
        Mistral,
        {"interleaved": True},
        {"query_scaling": (4, 0.5)},
    ),
    "mistral-fp8": Case(
        "Mistral EAGLE",
        "FP8 with qscale_weight, qscale_act and KV scales",
        lambda: write.mistral(fp8=True),
        Mistral,
        {"interleaved": True},
    ),
    "mistral-mla": Case(
        "Mistral EAGLE", "MLA", lambda: write.mistral(mla=True), Mistral, {}, {"dialect": "mistral-mla"}
    ),
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
        "Step-3.5: own head, norms of 1 + weight",
        lambda: write.mtp("step"),
        Mtp,
        {
            "at": "layers.4.",
            "inner": "layers.4.transformer.",
            "parts": NEXTN,
            "gemma": True,
            "pre": True,
            "head": "layers.4.shared_head.output.weight",
        },
        {"dialect": "step-3.5", "head": "own", "chained": True},
    ),
    "step-3.5": Case(
        "MTP",
        "Step-3.5: more heads, a gate per head, a sliding window, limits",
        layers.step_layers,
        layers.WindowedMtpLayer,
        STEP,
        {"dialect": "step-3.5", "head": "own", "chained": True},
        source="transformers' layer, float64",
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
