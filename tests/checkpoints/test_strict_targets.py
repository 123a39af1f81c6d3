"""Tests of the strict check of targets, for every family.

One wrong tensor is an error that names the tensor and its file. The check reads only the headers of the files and takes
less than two seconds.
"""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.arch import TARGET_FAMILIES, read_target
from cluster.arch.safetensors.stored import normalise_name
from cluster.arch.safetensors.tensors import check_tensors, target_tensors
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint, CheckpointMatrix
from cluster.tools.summary import summary
from cluster.tools.tensor_report import inspect
from tests.support.families import FAMILIES, all_cases, family_checkpoint
from tests.support.loading import check_target
from tests.support.slow_cases import diagonals_fast
from tests.support.tiny_checkpoints import target_folder
from tests.unit.models.checkpoints import Tensors, copy_of

NOTHING = r"(?!)"
NON_TARGET_TENSORS = re.compile(r"vision|projector|mtp|eh_proj")


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def kinds_of(names: list[str]) -> list[str]:
    """Return one tensor name of each kind. Names that differ only in numbers are one kind; the last in sorted order is
    returned.
    """
    name_by_kind = {re.sub(r"\d+", "*", name): name for name in sorted(names) if not NON_TARGET_TENSORS.search(name)}
    return list(name_by_kind.values())


def check_headers(folder: str) -> None:
    """Check a target from its file headers, as `aerie serve` does before it starts any process."""
    check_tensors(folder, read_target(folder))


@pytest.mark.parametrize(("family", "case"), all_cases())
def test_target_tensors_equal_the_tensors_that_the_loader_reads(
    family: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_shapes: dict[str, tuple[int, ...] | None] = {}
    original_matrix = Checkpoint.matrix

    def record_matrix(
        self: Checkpoint, name: str, shape: tuple[int, ...] | None = None, *args: Any, **kwargs: Any
    ) -> CheckpointMatrix:
        read_shapes[name] = shape
        return original_matrix(self, name, shape, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "matrix", record_matrix)
    arch = check_target(family_checkpoint(family, case).folder)
    assert dict(target_tensors(arch)) == read_shapes
    check_tensors(family_checkpoint(family, case).folder, arch)


ATTENTION_SCALES = (
    "self_attn.q_scale",
    "self_attn.k_scale",
    "self_attn.v_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
)
OTHER_SCALES = ("self_attn.k_proj.v_scale", "mlp.k_scale", "self_attn.k_zero_point")


@pytest.mark.parametrize("name", ATTENTION_SCALES)
def test_fp8_attention_scales_are_accepted_and_reported_as_unused(name: str, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"model.layers.0.{name}"] = torch.tensor(0.5)

    folder = copy_of(target_folder(), tmp_path / "target", add)
    check_headers(folder)
    report = inspect(folder, None)
    assert not report.problems
    assert report.target["quantised"] == [
        "1 scales for attention in FP8 are not used: cells of the KV cache have their own"
    ]
    assert summary(folder) is None, "a target with a remark must get the full report, not the summary"


@pytest.mark.parametrize("name", OTHER_SCALES)
def test_other_scale_tensors_are_refused_as_unknown(name: str, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"model.layers.0.{name}"] = torch.tensor(0.5)

    folder = copy_of(target_folder(), tmp_path / "target", add)
    with pytest.raises(ConfigError, match=f"does not know: .*{name}"):
        check_headers(folder)
    assert name in inspect(folder, None).problems[0]


# Each of these functions changes one tensor and returns the tensor name that the error must contain.
def remove_tensor(tensors: Tensors, name: str) -> str:
    del tensors[name]
    return name


def rename_tensor(tensors: Tensors, name: str) -> str:
    tensors[name + "_"] = tensors.pop(name)
    return name


def add_tensor(tensors: Tensors, name: str) -> str:
    extra = re.sub(r"\w+$", "surplus", name)
    tensors[extra] = torch.ones(3)
    return extra


def transpose_tensor(tensors: Tensors, name: str) -> str | None:
    """Transpose a matrix, or add an axis to a vector. Return None if the shape stays the same."""
    tensor = tensors[name]
    changed = tensor.transpose(-1, -2).contiguous() if tensor.dim() > 1 else tensor[None]
    tensors[name] = changed
    return None if changed.shape == tensor.shape else name


def truncate_tensor(tensors: Tensors, name: str) -> str:
    tensors[name] = tensors[name][..., :-1].contiguous()
    return name


CHANGES: list[Callable[[Tensors, str], str | None]] = [
    remove_tensor,
    rename_tensor,
    add_tensor,
    transpose_tensor,
    truncate_tensor,
]


@pytest.mark.parametrize(("family", "change"), diagonals_fast(3, list(FAMILIES), list(CHANGES)))
def test_error_names_the_wrong_tensor_and_its_file(
    family: str, change: Callable[[Tensors, str], str | None], tmp_path: Path
) -> None:
    original_folder = Path(family_checkpoint(family, next(iter(FAMILIES[family].cases))).folder)
    folder = tmp_path / "bad"
    shutil.copytree(original_folder, folder)
    file = file_of(folder)
    good_tensors = load_file(file)
    change_count = 0
    ignored = re.compile("|".join((NOTHING, *read_target(str(original_folder)).ignored_patterns)))
    # An added tensor must be refused beside ignored tensors too, so only the other changes leave these out.
    names = [name for name in good_tensors if change is add_tensor or not ignored.search(normalise_name(name))]
    for name in kinds_of(names):
        tensors = dict(good_tensors)
        expected = change(tensors, name)
        if expected is None:
            continue
        save_file(tensors, file)
        start = time.perf_counter()
        for check in (check_headers, check_target):
            with pytest.raises(ConfigError) as error:
                check(str(folder))
            assert time.perf_counter() - start < 2.0
            assert normalise_name(expected) in str(error.value), (name, str(error.value))
            assert str(file) in str(error.value), (name, str(error.value))
        change_count += 1
    assert change_count >= 6
    save_file(good_tensors, file)
    check_headers(str(folder))
    assert check_target(str(folder)).num_layers == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_truncated_target_file_error_names_a_tensor(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(family_checkpoint(family, next(iter(FAMILIES[family].cases))).folder, folder)
    file = file_of(folder)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"tensor '.*' ends at byte \d+ of a file of \d+") as error:
        check_target(str(folder))
    assert str(file) in str(error.value)


def test_missing_tensor_error_names_the_file_given_by_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(family_checkpoint("llama", "linear rope, sharded").folder, folder)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(folder / weight_map[name])
    del tensors[name]
    save_file(tensors, folder / weight_map[name])
    with pytest.raises(ConfigError, match=rf"{re.escape(normalise_name(name))}' is missing in '.*{weight_map[name]}'"):
        check_target(str(folder))


@pytest.mark.parametrize(
    "name",
    [
        "MambaForCausalLM",
        "Mamba2ForCausalLM",
        "FalconMambaForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "JambaForCausalLM",
        "BambaForCausalLM",
        "Zamba2ForCausalLM",
        "FalconH1ForCausalLM",
        "NemotronHForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "RecurrentGemmaForCausalLM",
        "RwkvForCausalLM",
        "KimiLinearForCausalLM",
        "MiniMaxForCausalLM",
        "Lfm2ForCausalLM",
    ],
)
def test_targets_with_recurrent_state_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = copy_of(family_checkpoint("llama", "dynamic rope").folder, tmp_path / "target", architectures=[name])
    with pytest.raises(ConfigError, match=rf"{name} is recognised; .*not served; known: LlamaForCausalLM") as error:
        read_target(folder)
    assert folder in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*no target served here; known: LlamaForCausalLM"),
        ({"architectures": ["LlavaNextForConditionalGeneration"]}, "LlavaNextForConditionalGeneration.*known"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not served; known: fp8, mxfp4"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not served; known: default, dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 7}, "head_dim must be even.*got 7"),
    ],
)
def test_unsupported_target_config_is_refused_by_name(config: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = copy_of(family_checkpoint("llama", "dynamic rope").folder, tmp_path / "target", **config)
    with pytest.raises(ConfigError, match=message):
        read_target(folder)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, r"\['linear_attention'\] are recognised and not served"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types must list the 4 layers"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not served"),
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot be split into n_group 3"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false"),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace must be an integer from 0, got '1'"),
        ("glm4_moe", {"num_nextn_predict_layers": [1]}, "num_nextn_predict_layers must be an integer from 0"),
        ("qwen3", {"max_window_layers": -1}, "max_window_layers must be an integer from 0, got -1"),
        ("llava", {"text_config": {"model_type": "mamba"}}, "LlavaForConditionalGeneration around 'mamba'"),
    ],
)
def test_unsupported_option_of_a_target_family_is_refused_by_name(
    family: str, config: dict[str, object], message: str, tmp_path: Path
) -> None:
    original_folder = family_checkpoint(family, next(iter(FAMILIES[family].cases))).folder
    with pytest.raises(ConfigError, match=message):
        read_target(copy_of(original_folder, tmp_path / "target", **config))


@pytest.mark.parametrize("key", ["moe", "q_lora_rank", "vision_encoder"])
def test_unsupported_key_of_mistral_native_params_is_refused_by_name(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(family_checkpoint("mistral_native", "yarn").folder, folder)
    params = json.loads((folder / "params.json").read_text()) | {key: {"x": 1}}
    (folder / "params.json").write_text(json.dumps(params))
    with pytest.raises(ConfigError, match=rf"params\.json of .*: {key} is recognised and not served"):
        read_target(str(folder))


def test_every_target_family_has_a_test_case() -> None:
    tested_families = {
        read_target(family_checkpoint(name, next(iter(tested_family.cases))).folder).family.split("/")[0]
        for name, tested_family in FAMILIES.items()
    }
    assert set(TARGET_FAMILIES) == tested_families - {"Mistral (native)"}


def test_declared_mtp_layers_in_a_target_are_left_to_the_draft(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.4.eh_proj.weight"] = torch.ones(32, 64)

    original_folder = family_checkpoint("deepseek_v3", "low-rank queries").folder
    with pytest.raises(ConfigError, match=r"layers\.4\.eh_proj"):
        check_target(copy_of(original_folder, tmp_path / "undeclared", add))
    check_target(copy_of(original_folder, tmp_path / "declared", add, num_nextn_predict_layers=1, num_mtp_layers=1))
