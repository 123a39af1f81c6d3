"""Every tensor of every family of drafts, removed, renamed, transposed, truncated, or joined by another: named, or
shown to be one that the format lets out.
"""

import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.arch import read_target
from cluster.config import ConfigError
from tests.loading import check_draft
from tests.unit.models.draft_cases import CASES
from tests.unit.models.draft_folders import Tensors

FAMILIES = (
    "original", "specforge", "wide", "five-aux", "sglang-layers", "deepspec-layers", "modelopt", "modelopt-no-aux",
    "speculators", "speculators-before-fc", "qwen3", "mla", "3.1", "3.1-legacy", "eagle1", "eagle1-no-bias", "mistral",
    "mistral-fp8", "mistral-mla", "mimo", "nextn", "nextn-mla", "step", "qwen3-next", "qwen3-next-dense",
    "nextn-experts", "glm",
)  # fmt: skip
# What a format may leave out: `t2d` says nothing new, an embedding or a head comes from the target instead.
FREE = r"shared_head\.head|(nextn|glm).*embed_tokens|qscale_act|sglang-layers:layers\.\d\.input_layernorm"
OPTIONAL = (
    rf"t2d$|embed_tokens|{FREE}|sglang-layers:layers\.\d\.hidden_norm|(wide|five-aux|sglang|deepspec|mla|3.1).*lm_head"
)
"""Tensors whose shape is nobody's concern: copies of the target's, and scales of activations."""


def folders(tmp_path: Path, name: str) -> tuple[Path, Path, Tensors, str]:
    case = CASES[name]
    source = Path(case.folder())
    file = next(source.glob("*.safetensors"))
    made = tmp_path / "draft"
    made.mkdir()
    for config in source.glob("*.json"):
        (made / config.name).write_bytes(config.read_bytes())
    return made, made / file.name, load_file(file), case.target()


def refused(folder: Path, file: Path, held: Tensors, target: str) -> str:
    """The error of a draft of these tensors; empty when it is served."""
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, file)
    began = time.perf_counter()
    try:
        check_draft(str(folder), read_target(target))
        message = ""
    except ConfigError as error:
        message = str(error)
    assert time.perf_counter() - began < 2
    return message


def leaf(name: str) -> str:
    """What an error must say: the part of a name that every dialect keeps, such as `q_proj` or `wq`.

    A lost scale is told by the weight that needs it, a legacy aux norm by its later name.
    """
    for i, legacy in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        name = name.replace(legacy, f"fc_norm.{i}")
    name = name.removesuffix(".qscale_weight").removesuffix(".weight")
    return name if name.startswith("fc_norm") else name.split(".")[-1]


def said(tensor: str, message: str) -> bool:
    return leaf(tensor) in message or tensor in message


@pytest.mark.parametrize("name", FAMILIES)
def test_any_wrong_draft_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder, file, whole, target = folders(tmp_path, name)
    assert refused(folder, file, whole, target) == ""
    wrong = []
    for tensor in whole:
        known = f"{name}:{tensor}"
        changes: dict[str, Tensors] = {"added": whole | {f"{tensor}_more": torch.ones(2)}}
        if not re.search(OPTIONAL, known):
            changes["removed"] = {k: v for k, v in whole.items() if k != tensor}
        changes["renamed"] = {(k if k != tensor else f"{k}_other"): v for k, v in whole.items()}
        held = whole[tensor]
        if held.dim() and not re.search(FREE, known):
            changes["truncated"] = whole | {tensor: held[:-1].clone()}
            if held.dim() == 2 and held.shape[0] != held.shape[1]:
                changes["transposed"] = whole | {tensor: held.T.clone()}
        for change, made in changes.items():
            message = refused(folder, file, made, target)
            if not message or not said(tensor, message) or str(folder) not in message:
                wrong.append(f"{change} {tensor}: {message or 'served'}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_truncated_draft_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder, file, whole, target = folders(tmp_path, name)
    assert refused(folder, file, whole, target) == ""
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=re.escape(file.name)):
        check_draft(str(folder), read_target(target))
