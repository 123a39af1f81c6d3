"""The registry of draft dialects under test: for each case a writer of a tiny draft, and the reference that the draft
must equal. The table of drafts in docs/models.md is made from this registry.
"""

from collections.abc import Callable
from typing import Any

from cluster.arch.layer import QueryScaling
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models import draft_folders as write
from tests.unit.models.draft_case import Case
from tests.unit.models.draft_reference import Eagle1, Eagle3, Mistral
from tests.unit.models.mtp_cases import MTP_CASES

# Conventions that several cases share.
THREE = {"boundaries": (1, 2, 3)}
SPEC = {"boundaries": (1, 2, 4)}


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
        {"query_scaling": QueryScaling(4, 0.5)},
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
    **MTP_CASES,
}
