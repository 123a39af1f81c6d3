"""The registry of target families. `transformers` makes tiny random checkpoints of several configs of each family."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support.float64_transformers import FLOAT32, Oracle, exact
from tests.support.published_formats import split_checkpoint, write_kimi, write_mimo, write_native
from tests.support.tiny_checkpoints import folder_of_session

VOCAB = 64
LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
GROWING = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def rope(scaling: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {**scaling, "rope_theta": theta}}


@dataclass(frozen=True)
class Family:
    """One family: its model class and config class in `transformers`, its sizes, and its test cases.

    `sizes` override `SIZES`. `cases` maps the name of each case to config values that override `sizes`. `text` names
    the config class of the language model inside a multimodal wrapper. `rewrite` turns the checkpoint of
    `transformers` into the format in which the model is published.
    """

    architecture: str
    config: str
    sizes: dict[str, Any]
    cases: dict[str, dict[str, Any]]
    text: str = ""
    rewrite: Callable[[Path, Any], None] | None = None
    seed: int = 0


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {},
        {
            "grouped heads, llama3 rope": rope(LLAMA3, 500000.0),
            "one head each, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
            "one kv head, biases, heads of 12": {
                "num_key_value_heads": 1,
                "attention_bias": True,
                "mlp_bias": True,
                "head_dim": 12,
            },
            "linear rope, sharded": {**rope(LINEAR), "shards": True},
            "dynamic rope": rope(DYNAMIC),
            "yarn": rope(YARN),
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {},
        {
            "window of 9": {"sliding_window": 9, "head_dim": 8},
            "no window, theta 1e6": {"sliding_window": None, **rope({"rope_type": "default"}, 1e6)},
            "window of 2, one head each": {"sliding_window": 2, "num_key_value_heads": 4},
            "yarn, heads of 20, sharded": {"sliding_window": None, "head_dim": 20, **rope(YARN), "shards": True},
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {},
        {
            "tied": {"tie_word_embeddings": True},
            "late layers windowed": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            "yarn, one kv head": {"num_key_value_heads": 1, **rope(YARN)},
        },
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"head_dim": 12},
        {
            "grouped heads": {},
            "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
            "layer types, yarn": {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                **rope(YARN),
            },
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {
            "renormalised": {"norm_topk_prob": True},
            "not renormalised, tied": {"norm_topk_prob": False, "tie_word_embeddings": True},
            "some layers dense": {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": True},
            "odd columns, sharded": {"moe_intermediate_size": 11, "num_experts_per_tok": 3, "shards": True},
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4},
        {
            "two of four": {},
            "three of five, window of 8": {
                "num_local_experts": 5,
                "num_experts_per_tok": 3,
                "sliding_window": 8,
            },
            "one head each, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "intermediate_size": 32,
        },
        {
            "yarn": rope({**YARN, "truncate": False}, 150000.0),
            "own layer types": {
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
            },
            "one head each, low limit": {"num_key_value_heads": 4, "swiglu_limit": 0.5},
            "odd columns, sharded": {"intermediate_size": 21, "shards": True},
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 8, "tie_word_embeddings": True},
        {
            "three local, one global": {"sliding_window_pattern": 4},
            "own layer types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "linear global rope": {
                "sliding_window_pattern": 2,
                "rope_parameters": {
                    "full_attention": {**LINEAR, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            "untied, capped, biases": {
                "tie_word_embeddings": False,
                "final_logit_softcapping": 3.0,
                "attention_bias": True,
            },
        },
        seed=5,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DEEPSEEK,
        {
            "low-rank queries": {},
            "whole queries, two shared": {"q_lora_rank": None, "n_shared_experts": 2},
            "yarn with mscale": rope({**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
            "biases, all layers sparse, sharded": {
                "attention_bias": True,
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
                "shards": True,
            },
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            "head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
        {
            "half rotated, norms, biases": {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
            "groups, two shared": {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False},
            "a quarter rotated, yarn, sharded": {
                "head_dim": 16,
                **rope({**YARN, "partial_rotary_factor": 0.25}),
                "first_k_dense_replace": 0,
                "shards": True,
            },
        },
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"image_token_index": 63},
        {
            "around Llama": rope(LLAMA3),
            "around Mistral, sharded": {"model_type": "mistral", "sliding_window": 9, "shards": True},
            "around Qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
        },
        text="LlamaConfig",
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {"image_token_index": 63, "head_dim": 12, "sliding_window": None},
        {"around Mistral": {"model_type": "mistral"}},
        text="MistralConfig",
    ),
    "gemma3_wrapped": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 8, "tie_word_embeddings": True},
        {"around Gemma-3": {"image_token_index": 63, "mm_tokens_per_image": 4, "sliding_window_pattern": 2}},
        text="Gemma3TextConfig",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {"head_dim": 12},
        {
            "growing queries": rope({**YARN, **GROWING}),
            "no growth, a window": {"sliding_window": 9, **rope({**YARN, **GROWING, "llama_4_scaling_beta": 0.0})},
        },
    ),
    "mistral_native": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {},
        {
            "window of 9, heads of 12": {"sliding_window": 9, "head_dim": 12},
            "no window, one head each": {"sliding_window": None, "num_key_value_heads": 4},
            "yarn": {"sliding_window": None, **rope(YARN)},
        },
        rewrite=write_native,
    ),
    "ministral3_native": Family(
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {"head_dim": 12, "sliding_window": None},
        {"growing queries": rope({**YARN, **GROWING})},
        rewrite=write_native,
    ),
    "mimo": Family("Qwen2ForCausalLM", "Qwen2Config", {}, {"beside its draft": {}}, rewrite=write_mimo),
    "kimi": Family(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, {"around DeepSeek-V3": {}}, rewrite=write_kimi
    ),
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class FamilyCheckpoint:
    """The folder of a checkpoint, and the `transformers` model that gives its reference outputs."""

    folder: str
    oracle: Oracle


def all_cases() -> list[tuple[str, str]]:
    """Return every pair of the name of a family and the name of one of its cases."""
    return [(name, case) for name, family in FAMILIES.items() for case in family.cases]


@cache
def family_checkpoint(name: str, case: str, layers: int = LAYERS) -> FamilyCheckpoint:
    """Return the checkpoint of one case. It is made on the first call."""
    family = FAMILIES[name]
    config_values = SIZES | family.sizes | family.cases[case] | {"num_hidden_layers": layers}
    shards = config_values.pop("shards", False)
    config = (
        wrapper_config(family, config_values) if family.text else getattr(transformers, family.config)(**config_values)
    )
    folder = folder_of_session() / f"{name}-{list(family.cases).index(case)}-{layers}"
    model = random_model(getattr(transformers, family.architecture), config, family.seed)
    with exact():
        model.save_pretrained(folder)
    if family.rewrite is not None:
        family.rewrite(folder, config)
    if shards:
        split_checkpoint(folder)
    return FamilyCheckpoint(str(folder), Oracle(model))


def wrapper_config(family: Family, config_values: dict[str, Any]) -> Any:
    """Return the config of a multimodal model: a small vision tower, and a language model with `config_values`."""
    wrapper_values = {
        key: config_values.pop(key) for key in ("image_token_index", "mm_tokens_per_image") if key in config_values
    }
    text_model_type = config_values.pop("model_type", None)
    language_config = (
        transformers.AutoConfig.for_model(text_model_type, **config_values)
        if text_model_type
        else getattr(transformers, family.text)(**config_values)
    )
    vision = {"llava": "clip_vision_model", "mistral3": "pixtral", "gemma3": "siglip_vision_model"}
    outer_class = getattr(transformers, family.config)
    tower = transformers.AutoConfig.for_model(vision[outer_class.model_type], **VISION)
    return outer_class(
        text_config=language_config,
        vision_config=tower,
        tie_word_embeddings=config_values["tie_word_embeddings"],
        eos_token_id=1,
        **wrapper_values,
    )


def random_model(model_class: type[PreTrainedModel], config: Any, seed: int = 0) -> PreTrainedModel:
    """Return a float64 model with random weights.

    Each weight is exactly a float32 number, so float32 files and float64 files hold the same model.
    """
    torch.manual_seed(seed)
    for sub_config in (config, config.get_text_config()):
        sub_config._attn_implementation = sub_config._experts_implementation = "eager"
    with exact():
        model = model_class(config)
        for tensors in (model.named_parameters(), model.named_buffers()):
            for name, tensor in tensors:
                if "inv_freq" in name or "embed_scale" in name:
                    continue
                embedding_scale = (
                    0.15 if config.get_text_config().tie_word_embeddings else 1.0
                )  # or each token predicts itself
                scale = 0.2 if "norm" in name or "bias" in name else embedding_scale if "embed" in name else 0.35
                mean = 1.0 if "norm" in name and "gemma" not in config.model_type else 0.0
                mean += 1.5 * ("q_norm" in name or "k_norm" in name)  # so attention is not nearly uniform
                values = mean + scale * torch.randn(tensor.shape)
                tensor.data.copy_(values.to(FLOAT32))
        model.tie_weights()
    return model.double()
