"""Recognises a draft's format, mainly by tensor names and shapes, and refuses known formats that are not served."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.arch.draft.spec import Kind
from cluster.arch.keys import Shapes
from cluster.config import ConfigError

REFUSED_TENSORS = (
    (r"^mask_hidden$", "P-EAGLE (arXiv 2602.01469), which drafts in parallel"),
    (r"^efficient_lm_head", "EAGLE-4, whose licence forbids serving it"),
    (r"^parallel_draft_heads\.", "ModelOpt's EAGLE with parallel (Medusa) heads"),
    (r"^medusa_head\.|^\d+\.\d+\.linear\.weight$", "Medusa heads (arXiv 2401.10774)"),
    (r"^(markov_head|confidence_head)", "DSpark (arXiv 2607.05147)"),
    (r"(^|\.)embed_layernorm\.|(^|\.)post_embedding_layernorm\.", "HASS's EAGLE with embedding norms"),
    (r"\.(lora_A|lora_B)\.", "a LoRA adapter"),
)
REFUSED_NAMES = (
    (r"^p_?eagle", "P-EAGLE (arXiv 2602.01469), which drafts in parallel"),
    (r"eagle4", "EAGLE-4, whose licence forbids serving it"),
    (r"^dflash2|^xpress|^domino|^lilicorr", "a block-diffusion draft"),
    (r"^dflash", "DFlash (arXiv 2602.06036)"),
    (r"^dspark", "DSpark (arXiv 2607.05147)"),
    (r"^medusa", "Medusa heads (arXiv 2401.10774)"),
    (r"^hydra", "Hydra heads"),
    (r"^mlp_?speculator", "an MLP speculator"),
    (r"^mtp(draftmodel)?$", "speculators' MTP layer, which has MiMo's names but not its order"),
)
MTP_TENSORS = r"^layers\.\d+\.(eh_proj|enorm|hnorm|shared_head)\.|^mtp_layers\.\d+\.|^mtp\."
SERVED_FORMATS = "EAGLE-1/2, EAGLE-3 and 3.1, Mistral EAGLE, MTP layers, and Gemma-4's assistant"


def _not_served(folder: str, format_name: str, evidence: str) -> ConfigError:
    return ConfigError(
        f"draft {folder!r} is {format_name} ({evidence}); that is not served, use one of: {SERVED_FORMATS}"
    )


def refuse_unserved(folder: str, data: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise if the draft has a known format that is not served.

    Raises:
        ConfigError: the message names the format.
    """
    for pattern, format_name in REFUSED_TENSORS:
        tensor = next((name for name in shapes if re.search(pattern, name)), None)
        if tensor is not None:
            raise _not_served(folder, format_name, f"it holds {tensor!r}")
    names = [str(name) for name in data.get("architectures") or []]
    names += [str(data[key]) for key in ("speculators_model_type", "model_type") if data.get(key)]
    for name in names:
        for pattern, format_name in REFUSED_NAMES:
            if re.search(pattern, name.lower()):
                raise _not_served(folder, format_name, f"config.json says {name!r}")
    if "dflash_config" in data:
        raise _not_served(folder, "DFlash (arXiv 2602.06036)", "config.json has dflash_config")
    if (Path(folder) / "adapter_config.json").is_file():
        raise _not_served(folder, "shipped with a LoRA adapter for its target", "adapter_config.json is beside it")


def recognise_kind(folder: str, data: Mapping[str, Any], shapes: Shapes) -> Kind:
    """Return the kind of draft that has these tensors.

    Raises:
        ConfigError: the format is not served; the message names it if it is known.
    """
    refuse_unserved(folder, data, shapes)
    if has_mistral_names(shapes):
        return "mistral"
    if any(re.search(MTP_TENSORS, name) for name in shapes):
        return "mtp"
    if {"pre_projection.weight", "post_projection.weight"} <= shapes.keys():
        return "frozen_kv"
    if not any(name.startswith("layers.0.self_attn.") for name in shapes):
        raise ConfigError(
            f"draft {folder!r} is in no known format: there is no 'layers.0.self_attn' (or 'midlayer'); served are "
            f"{SERVED_FORMATS}"
        )
    query = shapes.get("layers.0.self_attn.q_proj.weight", (0, 0))
    has_all_model_tensors = {"embed_tokens.weight", "norm.weight", "layers.1.self_attn.q_proj.weight"} <= shapes.keys()
    hidden_inputs = {"fc.weight", "layers.0.hidden_norm.weight"} & shapes.keys()
    if has_all_model_tensors and not hidden_inputs and query[-1] == data.get("hidden_size"):
        raise _not_served(folder, "a whole model, not a draft", "its layers read a hidden state and nothing beside it")
    eagle3_tensors = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight")
    return "eagle3" if any(name in shapes for name in eagle3_tensors) else "eagle1"


def has_mistral_names(shapes: Shapes) -> bool:
    """Whether the tensors have the names of Mistral's own format."""
    return "eagle_linear.weight" in shapes or any(name.startswith("layers.0.attention.") for name in shapes)
