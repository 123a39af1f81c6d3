"""Tiny random checkpoints of the target families in `family_cases`, made by `transformers`."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support.family_cases import FAMILIES
from tests.support.family_sizes import LAYERS, SIZES, VOCAB, Family
from tests.support.float64_transformers import FLOAT32, Oracle, exact
from tests.support.published_formats import split_checkpoint
from tests.support.tiny_checkpoints import folder_of_session

__all__ = ["FAMILIES", "LAYERS", "VOCAB", "FamilyCheckpoint", "all_cases", "family_checkpoint", "random_model"]

WRAPPER_KEYS = ("image_token_index", "image_token_id", "mm_tokens_per_image")
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
    for key, value in config_values.items():  # lists with an entry for each layer
        if isinstance(value, list) and len(value) == LAYERS:
            config_values[key] = value * (layers // LAYERS)
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
    wrapper_values = {key: config_values.pop(key) for key in WRAPPER_KEYS if key in config_values}
    text_model_type = config_values.pop("model_type", None)
    language_config = (
        transformers.AutoConfig.for_model(text_model_type, **config_values)
        if text_model_type
        else getattr(transformers, family.text)(**config_values)
    )
    vision = {
        "llava": "clip_vision_model",
        "mistral3": "pixtral",
        "gemma3": "siglip_vision_model",
        "gemma4": "gemma4_vision",
        "llama4": "llama4_vision_model",
        "step3p7": "step3p5_vision",
    }
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
                has_unit_offset = re.match("gemma3|step3", config.model_type)
                mean = 1.0 if ("norm" in name and not has_unit_offset) or re.search("scal(e|ar)$", name) else 0.0
                mean += 1.5 * ("q_norm" in name or "k_norm" in name)  # so attention is not nearly uniform
                values = mean + scale * torch.randn(tensor.shape)
                tensor.data.copy_(values.to(FLOAT32))
        model.tie_weights()
    return model.double()
