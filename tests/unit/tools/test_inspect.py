"""`aerie inspect` reports what loading a model would do, without reading a weight."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.arch.dtypes import select_compute_dtype
from cluster.cli import main
from cluster.config import ConfigError, EngineConfig
from cluster.engine import build_engine
from cluster.models.checkpoint import Checkpoint
from cluster.tools.inspect import has_gpu
from cluster.tools.summary import summary
from cluster.tools.tensor_report import ServingSetup, inspect
from tests.support.families import family_checkpoint
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.kv.test_pool import resident_bytes
from tests.unit.models import draft_folders as write
from tests.unit.models.checkpoints import copy_of
from tests.unit.models.mtp_layers import qwen_next


def test_inspect_describes_target_and_draft(capsys: pytest.CaptureFixture[str]) -> None:
    target = target_folder()
    draft = draft_folder(target, draft_vocab=40)
    assert main(["inspect", target, "--draft", draft, "--tp", "2", "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["target"]["family"], report["target"]["layers"]) == ("LlamaForCausalLM", 4)
    assert report["draft"]["aux_boundaries"] == [1, 2, 3]
    assert report["draft"]["shared_with_target"] == ["embedding"]
    assert report["draft"]["choices"]["aux_numbering"]["value"] == "outputs"
    destinations = {t["name"]: t["goes_to"] for t in report["draft"]["tensors"]}
    assert destinations["midlayer.hidden_norm.weight"] == "layers.0.hidden_norm.weight"
    sharded_numbers = {t["name"]: t["numbers"] for t in report["draft"]["tensors"]}["midlayer.mlp.up_proj.weight"]
    assert sharded_numbers == 32 * 64 // 2, "each of two ranks holds half"
    assert report["memory"]["kv_bytes_per_token"] == (4 + 1) * 2 * 1 * 8 * 4
    assert report["features"]["speculation"] == "EAGLE3"


@pytest.mark.parametrize("draft", [False, True])
def test_fp8_kv_bytes_per_token_match_the_pools_of_the_engine(draft: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The target has four layers and the draft one, each with two KV heads of 8. A token takes 32 codes and 4 scales
    per layer, 48 bytes.
    """
    target = target_folder()
    folder = draft_folder(target) if draft else None
    arguments = ["inspect", target, "--dtype", "float32", "--kv-cache-dtype", "fp8_e4m3"]
    assert main([*arguments, *(["--draft", folder] if folder else [])]) == 0
    output = capsys.readouterr().out
    assert f"kv_bytes_per_token: {(4 + draft) * 48}" in output and "kv_cache_dtype: fp8_e4m3" in output
    settings = {"dtype": "float32", "device": "cpu", "max_total_tokens": 1 << 12, "num_threads": 1}
    settings |= {"speculative_draft_model_path": folder, "kv_cache_dtype": "fp8_e4m3", "mixed_prefill_size": 8}
    engine = build_engine(EngineConfig(model_path=target, **settings))
    info, step = engine.info(), engine._parts.lockstep.step
    assert (info.kv_cache_dtype, info.kv_bytes_per_token) == ("fp8_e4m3", (4 + draft) * 48)
    runners = [step._target, *([step._draft._runner] if draft else [])]
    assert sum(runner.pools.nbytes for runner in runners) == (info.kv_tokens + info.page_size) * info.kv_bytes_per_token


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_kv_bytes_per_token_match_the_engine_with_mtp_drafts(layers: int) -> None:
    """Only three of four MTP layers are loaded, as many as there are levels. Each loaded layer keeps a hidden state
    beside its KV pool.
    """
    target, draft = target_folder(), write.mtp("mimo", layers)
    memory, one_layer_memory = (
        inspect(target, path, ServingSetup(dtype="float32")).memory for path in (draft, write.mtp("mimo", 1))
    )
    assert memory["draft_bytes_per_rank"] == min(layers, 3) * one_layer_memory["draft_bytes_per_rank"]
    resident_before = resident_bytes()
    settings = {"dtype": "float32", "device": "cpu", "max_total_tokens": 1 << 20, "num_threads": 1}
    config = EngineConfig(model_path=target, speculative_draft_model_path=draft, mixed_prefill_size=8, **settings)
    info = build_engine(config).info()
    assert info.kv_gb == round(info.kv_tokens * memory["kv_bytes_per_token"] / 1e9, 3) > 0.5
    assert resident_bytes() - resident_before < 1 << 26, "no page is written yet"


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("gpt_oss", "own layer types"),
        ("gemma3", "three local, one global"),
        ("mistral", "window of 9"),
        ("mimo_v2", "one full KV head, two with a window"),
        ("gemma4", "layers that borrow, with inputs of their own"),
    ],
)
def test_kv_memory_of_layers_with_a_window_matches_the_engine(family: str, case: str) -> None:
    """A request of 1,000 tokens takes what inspect says; the layers that keep every token and others are both right."""
    target = family_checkpoint(family, case).folder
    full, short = inspect(target, None, ServingSetup(dtype="float32", device="cpu")), summary(target, "float32", "cpu")
    assert short is not None
    settings = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2048, "num_threads": 1}
    engine = build_engine(EngineConfig(model_path=target, mixed_prefill_size=8, **settings))
    info, pools = engine.info(), engine._parts.lockstep.step._target.pools
    for name in ("kv_bytes_per_token", "kv_window_bytes_per_token", "kv_window_request_tokens"):
        assert full.memory[name] == short.memory[name] == getattr(info, name), name
    pages = {pool.window_map is not None: pool for pool in pools.all}
    tokens = {False: info.kv_tokens, True: info.kv_window_tokens}
    bytes_of = {False: info.kv_bytes_per_token, True: info.kv_window_bytes_per_token}
    for windowed, pool in pages.items():
        assert pool.kv.nbytes == (tokens[windowed] + info.page_size) * bytes_of[windowed]
    assert info.kv_window_request_tokens > 0 and True in pages


@pytest.mark.parametrize("dtype", ["auto", "float64", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stored_dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_inspect_dtype_matches_the_engine_dtype(tmp_path: Path, stored_dtype: str, device: str, dtype: str) -> None:
    """Inspect assumes a GPU and reports that it does. The test compares its dtype with an engine only on the CPU."""
    expected_dtype = (
        dtype
        if dtype != "auto"
        else stored_dtype
        if device == "cuda" and stored_dtype != "float8_e4m3fn"
        else "float32"
    )
    assert select_compute_dtype(stored_dtype, dtype, device) == expected_dtype
    target = copy_of(target_folder(), tmp_path / "target", None, torch_dtype=stored_dtype, dtype=stored_dtype)
    if device == "cuda":
        for report in (inspect(target, None, ServingSetup(dtype=dtype)), summary(target, dtype)):
            assert report is not None
            assert (report.memory["dtype"], report.memory["device"]) == (expected_dtype, "cuda")
    else:
        config = EngineConfig(model_path=target, dtype=dtype, device="cpu", max_total_tokens=256, mixed_prefill_size=8)
        assert build_engine(config).info().dtype == expected_dtype


@pytest.mark.parametrize("draft", [False, True], ids=["without torch", "with torch"])
def test_inspect_without_a_gpu_reports_cpu_and_gpu_settings(
    draft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = copy_of(target_folder(), tmp_path / "target", None, torch_dtype="bfloat16", dtype="bfloat16")
    arguments = ["inspect", target, *(["--draft", draft_folder(target_folder())] if draft else [])]

    def inspect_output(gpu: bool, *extra_arguments: str) -> str:
        monkeypatch.setattr("cluster.tools.inspect.has_gpu", lambda: gpu)
        assert main([*arguments, *extra_arguments]) == 0
        return capsys.readouterr().out

    gpu_output = inspect_output(True)
    assert "\ndevice: cuda\n" in gpu_output and "\ndtype: bfloat16\n" in gpu_output and "no GPU" not in gpu_output
    assert inspect_output(False, "--device", "cuda") == gpu_output
    cpu_output = inspect_output(False)
    lines = cpu_output.splitlines()
    [cpu_line] = [line for line in lines if line.startswith("this machine has no GPU; here it is served with: ")]
    assert [line for line in lines if line != cpu_line] == gpu_output.splitlines()
    gpu_bytes = int(gpu_output.split("target_bytes_per_rank: ")[1].split("\n")[0].replace(",", ""))
    for fact in ("dtype float32", "kv_cache_dtype float32", "device cpu", f"target_bytes_per_rank {2 * gpu_bytes:,}"):
        assert f", {fact}" in cpu_line
    json_report = json.loads(inspect_output(False, "--json"))
    assert (json_report["memory"]["device"], json_report["here"]["device"], json_report["here"]["dtype"]) == (
        "cuda",
        "cpu",
        "float32",
    )
    assert json.loads(inspect_output(True, "--json"))["here"] is None


def test_has_gpu_is_false_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cluster.tools.inspect.DRIVER_DEVICES", (str(tmp_path / "none"),))
    assert not has_gpu()
    (tmp_path / "driver").touch()
    monkeypatch.setattr("cluster.tools.inspect.DRIVER_DEVICES", (str(tmp_path / "none"), str(tmp_path / "driver")))
    assert has_gpu() == torch.cuda.is_available()


def test_inspect_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(draft_folder(target_folder()))
    tensors = load_file(source / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    tensors["midlayer.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].T.contiguous()
    tensors["more"] = tensors["norm.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert main(["inspect", target_folder(), "--draft", str(tmp_path)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert len(lines) == 3
    for expected_text in ("hidden_norm", "up_proj", "'more'"):
        assert any(expected_text in line for line in lines), expected_text


def test_inspect_reads_only_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights file ends after its header, so reading a weight fails. The size that its status gives is that of a
    complete file.
    """
    source = Path(target_folder())
    file_bytes = (source / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(file_bytes[:8], "little")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    weights_file, original_stat = tmp_path / "model.safetensors", Path.stat
    weights_file.write_bytes(file_bytes[:length])

    def status_with_full_size(path: Path, **options: bool) -> os.stat_result:
        status = original_stat(path, **options)
        return os.stat_result((*status[:6], len(file_bytes), *status[7:10])) if path == weights_file else status

    assert any("ends at byte" in problem for problem in inspect(str(tmp_path), None).problems), "the file is truncated"
    monkeypatch.setattr(Path, "stat", status_with_full_size)
    assert inspect(str(tmp_path), None).problems == []
    with pytest.raises(ConfigError, match="ends at byte"):
        Checkpoint(str(tmp_path)).tensor("embed_tokens.weight")


def test_inspect_reports_unservable_models_and_invalid_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "nowhere"]) == 1
    assert "does not exist" in capsys.readouterr().out
    assert main(["inspect", target_folder(), "--draft", write.write({}, {"dflash_config": {}})]) == 1
    assert "DFlash" in capsys.readouterr().out
    assert main(["inspect", target_folder(), "--draft-override", "aux_numbering=sideways"]) == 2
    assert main(["inspect", target_folder(), "--draft-override", "recurrent=pre"]) == 2
    assert "give --draft" in capsys.readouterr().err


def test_inspect_lists_tensors_last_with_the_tensors_flag(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", target_folder(), "--draft", draft_folder(target_folder())]
    assert main(arguments) == 0
    short_output = capsys.readouterr().out
    assert "numbers per rank" not in short_output
    assert short_output.splitlines()[-1].endswith("can be served")
    assert main([*arguments, "--tensors"]) == 0
    full_output = capsys.readouterr().out
    assert full_output.startswith(short_output)
    assert "lm_head.weight, 2,048 numbers per rank" in full_output
    assert "midlayer.hidden_norm.weight" in full_output


FAMILY_CASES = [("llama", "one head each, tied"), ("gemma3", "three local, one global"), ("gpt_oss", "yarn")]
FAMILY_CASES += [("deepseek_v3", "low-rank queries"), ("mistral_native", "yarn")]


@pytest.mark.parametrize("case", FAMILY_CASES, ids=str)
def test_summary_equals_the_full_inspect_report(case: tuple[str, str]) -> None:
    folder = family_checkpoint(*case).folder
    short_report, full_report = summary(folder), inspect(folder, None)
    assert short_report is not None
    del full_report.target["tensors"]
    assert short_report == full_report


def imported_modules(code: str, *arguments: str) -> set[str]:
    """The modules that a new Python process has imported at the end of `code`; `arguments` are its sys.argv[1:]."""
    code += "; import json; print(json.dumps(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", f"import sys; {code}", *arguments], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return set(json.loads(process.stdout.splitlines()[-1]))


def test_inspect_of_a_target_does_not_import_torch_or_ray() -> None:
    modules = imported_modules(
        "from cluster.cli import main; assert main(['inspect', sys.argv[1]]) == 0", target_folder()
    )
    assert not {"torch", "transformers", "ray", "tokenizers"} & modules


def test_inspect_does_not_import_the_torch_compiler() -> None:
    """Some functions of torch on the meta device import the compiler, which took most of the time of a check and of a
    start.
    """
    targets = [family_checkpoint(*case).folder for case in FAMILY_CASES]
    drafts = [draft_folder(target_folder()), write.eagle1(), write.mtp("mimo", 2)]
    code = """
from cluster.tools.tensor_report import inspect
first = sys.argv[1]
assert all(inspect(first, draft).problems == [] for draft in sys.argv[2:5])
assert all(inspect(target, None).problems == [] for target in sys.argv[5:])"""
    modules = imported_modules(code, target_folder(), *drafts, *targets)
    assert "torch" in modules
    assert not {"torch._dynamo", "sympy"} & modules


def test_draft_is_checked_alone_when_its_target_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-Next ships a hybrid target and its MTP layer in one checkpoint."""
    source = qwen_next()
    draft_tensors = load_file(Path(source) / "model.safetensors")
    target_tensors = {
        "model.layers.0.linear_attn.in_proj_qkvz.weight": torch.ones(8, 32),
        "lm_head.weight": torch.ones(64, 32),
    }
    config = json.loads((Path(source) / "config.json").read_text())
    checkpoint_folder = write.write(draft_tensors | target_tensors, config)
    assert main(["inspect", checkpoint_folder, "--draft", checkpoint_folder, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["problems"]) == 1
    assert "Qwen3NextForCausalLM is recognised" in report["problems"][0]
    assert report["target"] == {
        "folder": checkpoint_folder,
        "family": "Qwen3NextForCausalLM",
        "served": False,
        "tensors": [],
    }
    assert (report["draft"]["kind"], report["draft"]["dialect"]) == ("mtp", "qwen3-next")
    assert {t["name"] for t in report["draft"]["tensors"]} == draft_tensors.keys()
    assert report["memory"]["kv_bytes_per_token"] == 2 * 2 * 8 * 2, "k and v of two heads of 8, float16"
    assert report["features"] == {"checked": "the draft alone", "speculation": "NEXTN"}

    del draft_tensors["mtp.fc.weight"]
    assert main(["inspect", checkpoint_folder, "--draft", write.write(draft_tensors, config)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert len(lines) == 2
    assert "mtp.fc.weight" in lines[1]


def test_draft_is_not_inspected_when_its_target_is_unknown() -> None:
    unknown = write.write({"x": torch.ones(1)}, {"architectures": ["GPT2LMHeadModel"]})
    report = inspect(unknown, qwen_next())
    assert report.draft is None
    assert len(report.problems) == 1
