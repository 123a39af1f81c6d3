"""Recognises a draft's format, from tensor names and shapes first, and refuses known formats that are not served."""

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
MTP = r"^layers\.\d+\.(eh_proj|enorm|hnorm|shared_head)\.|^mtp_layers\.\d+\.|^mtp\."
SERVED = "EAGLE-1/2, EAGLE-3 and 3.1, Mistral EAGLE, and MTP layers"


def _refuse(folder: str, what: str, by: str) -> ConfigError:
    return ConfigError(f"draft {folder!r} is {what} ({by}); that is not served, use one of: {SERVED}")


def refuse_unserved(folder: str, data: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise if the draft has a known format that is not served.

    Raises:
        ConfigError: the message names the format.
    """
    for pattern, what in REFUSED_TENSORS:
        found = next((name for name in shapes if re.search(pattern, name)), None)
        if found is not None:
            raise _refuse(folder, what, f"it holds {found!r}")
    names = [str(name) for name in data.get("architectures") or []]
    names += [str(data[key]) for key in ("speculators_model_type", "model_type") if data.get(key)]
    for name in names:
        for pattern, what in REFUSED_NAMES:
            if re.search(pattern, name.lower()):
                raise _refuse(folder, what, f"config.json says {name!r}")
    if "dflash_config" in data:
        raise _refuse(folder, "DFlash (arXiv 2602.06036)", "config.json has dflash_config")
    if (Path(folder) / "adapter_config.json").is_file():
        raise _refuse(folder, "shipped with a LoRA adapter for its target", "adapter_config.json is beside it")


def kind_of(folder: str, data: Mapping[str, Any], shapes: Shapes) -> Kind:
    """Return the kind of draft that has these tensors.

    Raises:
        ConfigError: the format is not served; the message names it if it is known.
    """
    refuse_unserved(folder, data, shapes)
    if is_native(shapes):
        return "mistral"
    if any(re.search(MTP, name) for name in shapes):
        return "mtp"
    if not any(name.startswith("layers.0.self_attn.") for name in shapes):
        raise ConfigError(
            f"draft {folder!r} is in no known format: there is no 'layers.0.self_attn' (or 'midlayer'); served are "
            f"{SERVED}"
        )
    query = shapes.get("layers.0.self_attn.q_proj.weight", (0, 0))
    whole = {"embed_tokens.weight", "norm.weight", "layers.1.self_attn.q_proj.weight"} <= shapes.keys()
    entrance = {"fc.weight", "layers.0.hidden_norm.weight"} & shapes.keys()
    if whole and not entrance and query[-1] == data.get("hidden_size"):
        raise _refuse(folder, "a whole model, not a draft", "its layers read a hidden state and nothing beside it")
    signs = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight")
    return "eagle3" if any(name in shapes for name in signs) else "eagle1"


def is_native(shapes: Shapes) -> bool:
    """Whether the tensors have the names of Mistral's own format."""
    return "eagle_linear.weight" in shapes or any(name.startswith("layers.0.attention.") for name in shapes)
