"""LLaVA-style wrappers. The language model in them is served; the vision tower and the projector are ignored."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cluster.arch.families.deepseek import deepseek_v3
from cluster.arch.families.gemma3 import gemma3
from cluster.arch.families.gemma4 import gemma4
from cluster.arch.families.llama import llama, ministral3, mistral
from cluster.arch.families.llama4 import llama4
from cluster.arch.families.qwen import qwen2
from cluster.arch.families.step import step3p5
from cluster.arch.keys import ConfigKeys
from cluster.arch.target import TargetArch

WRAPPERS = (
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
)
TEXT_FAMILIES: dict[str, Callable[[ConfigKeys], TargetArch]] = {
    "llama": llama,
    "mistral": mistral,
    "ministral3": ministral3,
    "kimi_k2": deepseek_v3,
    "deepseek_v3": deepseek_v3,
    "qwen2": qwen2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "llama4_text": llama4,
    "step3p5": step3p5,
}
LLAMA_7B: Mapping[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
# Values that published text_configs leave out, because at publication they were the defaults of the model type.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**LLAMA_7B, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": {
        **LLAMA_7B,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
    },
    "qwen2": {**LLAMA_7B, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    "gemma3_text": {"hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216},
}
NON_TEXT_TENSORS = (
    r"^(vision_tower|vision_model|multi_modal_projector|mm_projector|vit_large_projector)\.",
    r"^(audio_tower|embed_vision|embed_audio)\.",
)


def text_keys(keys: ConfigKeys) -> ConfigKeys:
    """If the config is that of a multimodal model (`WRAPPERS`), return the config of the language model inside it, with
    default values for keys that published configs leave out. Otherwise return the config unchanged.
    """
    if not set(keys.data.get("architectures") or ()) & set(WRAPPERS):
        return keys
    text_config = keys.section("text_config")
    text_fields = {
        key: value for key, value in text_config.data.items() if value is not None or key == "sliding_window"
    }
    outer_fields = {
        key: keys.data[key] for key in ("dtype", "torch_dtype", "eos_token_id") if keys.data.get(key) is not None
    }
    defaults = DEFAULTS.get(str(text_config.data.get("model_type") or "llama"), {})
    return keys.with_data({**defaults, **outer_fields, **text_fields})


def read_wrapped(keys: ConfigKeys, wrapper: str) -> TargetArch:
    """Return the language model inside `wrapper`. The result's `family` names the wrapper and the language model."""
    model_type = str(keys.section("text_config").data.get("model_type") or "llama")
    if model_type not in TEXT_FAMILIES:
        raise keys.error(f"{wrapper} around {model_type!r} is not served; known: {', '.join(TEXT_FAMILIES)}")
    arch = TEXT_FAMILIES[model_type](text_keys(keys))
    tied = keys.flag("tie_word_embeddings", arch.tied) if keys.data.get("tie_word_embeddings") else arch.tied
    return replace(
        arch, family=f"{wrapper}/{arch.family}", tied=tied, ignored_patterns=(*arch.ignored_patterns, *NON_TEXT_TENSORS)
    )
