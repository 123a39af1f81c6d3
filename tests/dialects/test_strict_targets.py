"""For every family one tensor wrong is an error that names tensor and file, from headers alone, within two seconds."""

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
from tests.families import FAMILIES, all_cases, made
from tests.loading import check_target
from tests.tiny import target_folder
from tests.unit.models.checkpoints import Tensors, copy_of

FOREIGN = re.compile(r"vision|projector|mtp_layers")


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def kinds_of(names: list[str]) -> list[str]:
    """One tensor of each kind, numbers aside, from as late a layer as there is."""
    found = {re.sub(r"\d+", "*", name): name for name in sorted(names) if not FOREIGN.search(name)}
    return list(found.values())


def from_headers(folder: str) -> None:
    """What `aerie serve` does before anything starts."""
    check_tensors(folder, read_target(folder))


@pytest.mark.parametrize(("family", "case"), all_cases())
def test_target_tensors_equal_the_tensors_that_the_loader_reads(
    family: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[str, tuple[int, ...] | None] = {}
    matrix = Checkpoint.matrix

    def note(
        self: Checkpoint, name: str, shape: tuple[int, ...] | None = None, *cut: Any, **more: Any
    ) -> CheckpointMatrix:
        taken[name] = shape
        return matrix(self, name, shape, *cut, **more)

    monkeypatch.setattr(Checkpoint, "matrix", note)
    arch = check_target(made(family, case).folder)
    assert dict(target_tensors(arch)) == taken
    check_tensors(made(family, case).folder, arch)


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
    def add(held: Tensors) -> None:
        held[f"model.layers.0.{name}"] = torch.tensor(0.5)

    folder = copy_of(target_folder(), tmp_path / "target", add)
    from_headers(folder)
    report = inspect(folder, None)
    assert not report.problems
    assert report.target["quantised"] == [
        "1 scales for attention in FP8 are not used: cells of the KV cache have their own"
    ]
    assert summary(folder) is None, "what has something to be said has the whole report"


@pytest.mark.parametrize("name", OTHER_SCALES)
def test_other_scale_tensors_are_refused_as_unknown(name: str, tmp_path: Path) -> None:
    def add(held: Tensors) -> None:
        held[f"model.layers.0.{name}"] = torch.tensor(0.5)

    folder = copy_of(target_folder(), tmp_path / "target", add)
    with pytest.raises(ConfigError, match=f"does not know: .*{name}"):
        from_headers(folder)
    assert name in inspect(folder, None).problems[0]


def removed(held: Tensors, name: str) -> str:
    del held[name]
    return name


def renamed(held: Tensors, name: str) -> str:
    held[name + "_"] = held.pop(name)
    return name


def added(held: Tensors, name: str) -> str:
    extra = re.sub(r"\w+$", "surplus", name)
    held[extra] = torch.ones(3)
    return extra


def transposed(held: Tensors, name: str) -> str | None:
    tensor = held[name]
    turned = tensor.transpose(-1, -2).contiguous() if tensor.dim() > 1 else tensor[None]
    held[name] = turned
    return None if turned.shape == tensor.shape else name


def truncated(held: Tensors, name: str) -> str:
    held[name] = held[name][..., :-1].contiguous()
    return name


CHANGES: list[Callable[[Tensors, str], str | None]] = [removed, renamed, added, transposed, truncated]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES)
def test_error_names_the_wrong_tensor_and_its_file(
    family: str, change: Callable[[Tensors, str], str | None], tmp_path: Path
) -> None:
    whole = Path(made(family, next(iter(FAMILIES[family].cases))).folder)
    folder = tmp_path / "bad"
    shutil.copytree(whole, folder)
    file = file_of(folder)
    good = load_file(file)
    tried = 0
    for name in kinds_of(list(good)):
        held = dict(good)
        expected = change(held, name)
        if expected is None:
            continue
        save_file(held, file)
        started = time.perf_counter()
        for check in (from_headers, check_target):
            with pytest.raises(ConfigError) as caught:
                check(str(folder))
            assert time.perf_counter() - started < 2.0
            assert normalise_name(expected) in str(caught.value), (name, str(caught.value))
            assert str(file) in str(caught.value), (name, str(caught.value))
        tried += 1
    assert tried >= 6
    save_file(good, file)
    from_headers(str(folder))
    assert check_target(str(folder)).num_layers == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_truncated_target_file_error_names_a_tensor(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(made(family, next(iter(FAMILIES[family].cases))).folder, folder)
    file = file_of(folder)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"tensor '.*' ends at byte \d+ of a file of \d+") as caught:
        check_target(str(folder))
    assert str(file) in str(caught.value)


def test_missing_tensor_error_names_the_file_given_by_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(made("llama", "linear rope, sharded").folder, folder)
    table = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.2.mlp.up_proj.weight"
    held = load_file(folder / table[name])
    del held[name]
    save_file(held, folder / table[name])
    with pytest.raises(ConfigError, match=rf"{re.escape(normalise_name(name))}' is missing in '.*{table[name]}'"):
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
    folder = copy_of(made("llama", "dynamic rope").folder, tmp_path / "target", architectures=[name])
    with pytest.raises(ConfigError, match=rf"{name} is recognised; .*not served; known: LlamaForCausalLM") as caught:
        read_target(folder)
    assert folder in str(caught.value)


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
    folder = copy_of(made("llama", "dynamic rope").folder, tmp_path / "target", **config)
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
        ("llava", {"text_config": {"model_type": "mamba"}}, "LlavaForConditionalGeneration around 'mamba'"),
    ],
)
def test_unsupported_option_of_a_target_family_is_refused_by_name(
    family: str, config: dict[str, object], message: str, tmp_path: Path
) -> None:
    whole = made(family, next(iter(FAMILIES[family].cases))).folder
    with pytest.raises(ConfigError, match=message):
        read_target(copy_of(whole, tmp_path / "target", **config))


@pytest.mark.parametrize("key", ["moe", "q_lora_rank", "vision_encoder"])
def test_unsupported_key_of_mistral_native_params_is_refused_by_name(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(made("mistral_native", "yarn").folder, folder)
    params = json.loads((folder / "params.json").read_text()) | {key: {"x": 1}}
    (folder / "params.json").write_text(json.dumps(params))
    with pytest.raises(ConfigError, match=rf"params\.json of .*: {key} is recognised and not served"):
        read_target(str(folder))


def test_every_target_family_has_a_test_case() -> None:
    tried = {read_target(made(name, next(iter(f.cases))).folder).family.split("/")[0] for name, f in FAMILIES.items()}
    assert set(TARGET_FAMILIES) == tried - {"Mistral (native)"}


def test_declared_mtp_layers_in_a_target_are_left_to_the_draft(tmp_path: Path) -> None:
    def add(held: Tensors) -> None:
        held["model.layers.4.eh_proj.weight"] = torch.ones(32, 64)

    whole = made("deepseek_v3", "low-rank queries").folder
    with pytest.raises(ConfigError, match=r"layers\.4\.eh_proj"):
        check_target(copy_of(whole, tmp_path / "unsaid", add))
    check_target(copy_of(whole, tmp_path / "said", add, num_nextn_predict_layers=1, num_mtp_layers=1))
