"""Tests of the strict check of drafts, for every family.

Each tensor is removed, renamed, transposed or truncated, or another tensor is added. The error must name the tensor,
unless the format allows the change.
"""

import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.arch import read_target
from cluster.config import ConfigError
from tests.support.loading import check_draft
from tests.support.slow_cases import every_nth_fast
from tests.unit.models.draft_cases import CASES
from tests.unit.models.draft_folders import Tensors

FAMILIES = (
    "original", "specforge", "wide", "five-aux", "sglang-layers", "deepspec-layers", "modelopt", "modelopt-no-aux",
    "speculators", "speculators-before-fc", "qwen3", "mla", "3.1", "3.1-legacy", "eagle1", "eagle1-no-bias", "mistral",
    "mistral-fp8", "mistral-mla", "mimo", "nextn", "nextn-mla", "step", "qwen3-next", "qwen3-next-dense",
    "nextn-experts", "glm",
)  # fmt: skip
# Tensors that are never read, so they may have any shape: copies of the target's tensors, and scales of activations.
ANY_SHAPE = r"shared_head\.head|(nextn|glm).*embed_tokens|qscale_act|sglang-layers:layers\.\d\.input_layernorm"
# Tensors that a format may leave out: `t2d` adds no information, and the target has an embedding and a head.
OPTIONAL = (
    rf"t2d$|embed_tokens|{ANY_SHAPE}|sglang-layers:layers\.\d\.hidden_norm"
    r"|(wide|five-aux|sglang|deepspec|mla|3.1).*lm_head"
)


def copy_case(tmp_path: Path, name: str) -> tuple[Path, Path, Tensors, str]:
    """Copy the config of a draft case. Return the folder, the path for its weights, the tensors, and the target."""
    case = CASES[name]
    source = Path(case.folder())
    file = next(source.glob("*.safetensors"))
    folder = tmp_path / "draft"
    folder.mkdir()
    for config in source.glob("*.json"):
        (folder / config.name).write_bytes(config.read_bytes())
    return folder, folder / file.name, load_file(file), case.target()


def refusal_of(folder: Path, file: Path, tensors: Tensors, target: str) -> str:
    """Save the tensors and check the draft. Return the error message, or an empty string if the draft is accepted."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    start = time.perf_counter()
    try:
        check_draft(str(folder), read_target(target))
        message = ""
    except ConfigError as error:
        message = str(error)
    assert time.perf_counter() - start < 2
    return message


def expected_name(name: str) -> str:
    """Return the part of a tensor name that an error must contain. Every dialect has it, such as `q_proj` or `wq`.

    The error for a missing scale names the weight that needs the scale. The error for a legacy aux norm contains the
    newer name of the norm.
    """
    for i, legacy in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        name = name.replace(legacy, f"fc_norm.{i}")
    name = name.removesuffix(".qscale_weight").removesuffix(".weight")
    return name if name.startswith("fc_norm") else name.split(".")[-1]


def names_tensor(tensor: str, message: str) -> bool:
    return expected_name(tensor) in message or tensor in message


@pytest.mark.parametrize("name", every_nth_fast(2, FAMILIES))
def test_any_wrong_draft_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder, file, original, target = copy_case(tmp_path, name)
    assert refusal_of(folder, file, original, target) == ""
    failures = []
    for tensor in original:
        qualified_name = f"{name}:{tensor}"
        changes: dict[str, Tensors] = {"added": original | {f"{tensor}_more": torch.ones(2)}}
        if not re.search(OPTIONAL, qualified_name):
            changes["removed"] = {k: v for k, v in original.items() if k != tensor}
        changes["renamed"] = {(k if k != tensor else f"{k}_other"): v for k, v in original.items()}
        tensor_data = original[tensor]
        if tensor_data.dim() and not re.search(ANY_SHAPE, qualified_name):
            changes["truncated"] = original | {tensor: tensor_data[:-1].clone()}
            if tensor_data.dim() == 2 and tensor_data.shape[0] != tensor_data.shape[1]:
                changes["transposed"] = original | {tensor: tensor_data.T.clone()}
        for change, changed_tensors in changes.items():
            message = refusal_of(folder, file, changed_tensors, target)
            if not message or not names_tensor(tensor, message) or str(folder) not in message:
                failures.append(f"{change} {tensor}: {message or 'accepted'}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", FAMILIES)
def test_truncated_draft_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder, file, original, target = copy_case(tmp_path, name)
    assert refusal_of(folder, file, original, target) == ""
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=re.escape(file.name)):
        check_draft(str(folder), read_target(target))
