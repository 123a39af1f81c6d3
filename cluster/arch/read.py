"""Reads a target from a checkpoint folder: the table of target families, and the families that are refused by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.arch.families.deepseek import deepseek_v3
from cluster.arch.families.gemma3 import gemma3
from cluster.arch.families.gemma4 import gemma4
from cluster.arch.families.glm import glm4_moe
from cluster.arch.families.gpt_oss import gpt_oss
from cluster.arch.families.llama import llama, ministral3, mistral
from cluster.arch.families.llama4 import llama4
from cluster.arch.families.mimo import mimo_v2
from cluster.arch.families.mistral_native import mistral_native
from cluster.arch.families.mixtral import mixtral
from cluster.arch.families.qwen import mimo, qwen2, qwen3, qwen3_moe
from cluster.arch.families.step import step3p5
from cluster.arch.families.wrapped import WRAPPERS, read_wrapped
from cluster.arch.keys import ConfigKeys, family_of, read_json
from cluster.arch.layer import geometry_of
from cluster.arch.quantisation import quantisation_of
from cluster.arch.target import TargetArch, target_of
from cluster.config import ConfigError

FAMILIES: dict[str, Callable[[ConfigKeys], TargetArch]] = {
    "LlamaForCausalLM": llama,
    "Llama4ForCausalLM": llama4,
    "MistralForCausalLM": mistral,
    "Ministral3ForCausalLM": ministral3,
    "Qwen2ForCausalLM": qwen2,
    "MiMoForCausalLM": mimo,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
    "GptOssForCausalLM": gpt_oss,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Glm4MoeForCausalLM": glm4_moe,
    "MiMoV2FlashForCausalLM": mimo_v2,
    "Step3p5ForCausalLM": step3p5,
    **{name: partial(read_wrapped, wrapper=name) for name in WRAPPERS},
}
TARGET_FAMILIES = tuple(FAMILIES)
# Architectures with one of these parts in their names have layers with recurrent state. They are not served.
RECURRENT_NAME_PARTS = (
    "Mamba",
    "Qwen3Next",
    "Qwen3_5",
    "Jamba",
    "Bamba",
    "Zamba",
    "FalconH1",
    "NemotronH",
    "MoeHybrid",
    "RecurrentGemma",
    "Rwkv",
    "RWKV",
    "KimiLinear",
    "BailingHybrid",
    "OlmoHybrid",
    "MiniMaxForCausalLM",
    "MiniMaxText01",
    "MiniMaxM1",
    "Lfm2",
    "xLSTM",
)


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def _refuse_llama_original(folder: str) -> None:
    """Raise ConfigError if the folder has Llama's original format, which has a params.json as Mistral's format has."""
    if any(Path(folder).glob("consolidated.*.pth")):
        raise ConfigError(
            f"{folder!r} holds Llama's own format (consolidated.*.pth), which is not read; give the folder of the same "
            "model with config.json and safetensors, which is often the one above"
        )


def is_mistral_native(folder: str) -> bool:
    """Whether the folder has Mistral's own format: a params.json and no complete Hugging Face checkpoint."""
    path = Path(folder)
    if not (path / "params.json").is_file():
        return False
    weight_files = ("model.safetensors", "model.safetensors.index.json")
    return not (path / "config.json").is_file() or not any((path / name).is_file() for name in weight_files)


def read_target(folder: str) -> TargetArch:
    """Return the target in `folder`, read from config.json or params.json. End tokens are also read from
    generation_config.json and the tokenizer's files.

    Raises:
        ConfigError: there is no config, the folder has an adapter or Llama's own format, or the config has a family or
            feature that is not served. The message names what is not served.
    """
    if is_mistral_native(folder):
        _refuse_llama_original(folder)
        return mistral_native(ConfigKeys(read_json(folder, "params.json"), folder, "params.json"))
    if all((Path(folder) / name).is_file() for name in ADAPTER_FILES):
        raise ConfigError(
            f"{folder!r} has an adapter (LoRA) next to the model, {' and '.join(ADAPTER_FILES)}, which is not applied; "
            "merge it into the weights, or remove these files to serve the model without it"
        )
    keys = ConfigKeys(read_json(folder, "config.json"), folder)
    name = _recurrent_architecture(keys)
    if name is not None:
        raise ConfigError(
            f"config.json of {folder!r}: {name} is recognised; its linear-attention or state-space layers are not "
            f"served; known: {', '.join(TARGET_FAMILIES)}"
        )
    quantisation_of(keys)
    return FAMILIES[family_of(keys, TARGET_FAMILIES, "target")](keys)


def read_recurrent_target(folder: str) -> TargetArch | None:
    """Return what a draft must know (width, vocabulary, number of layers) of a target with recurrent-state layers.

    A target with such layers is recognised but not served. For any other folder, return None.

    Raises:
        ConfigError: there is no config, or it lacks a value.
    """
    if is_mistral_native(folder):
        return None
    keys = ConfigKeys(read_json(folder, "config.json"), folder)
    name = _recurrent_architecture(keys)
    if name is None:
        return None
    return target_of(keys, name, (geometry_of(keys, allow_partial_rotary=True),) * keys.integer("num_hidden_layers"))


def _recurrent_architecture(keys: ConfigKeys) -> str | None:
    names = [str(name) for name in keys.data.get("architectures") or []]
    return next((n for n in names if n not in FAMILIES and any(part in n for part in RECURRENT_NAME_PARTS)), None)
