"""Checkpoints and flags that must not start: exit code 2, one line that names the file or setting, no traceback."""

import json
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.actors.local_ray import LocalRay
from cluster.cli import main
from tests.tiny import draft_folder, target_folder

WEIGHTS = "model.safetensors"


def edit_config(**changes: Any) -> Callable[[Path], None]:
    """Replace keys of config.json; None removes one."""

    def edit(folder: Path) -> None:
        config = {**json.loads((folder / "config.json").read_text()), **changes}
        kept = {key: value for key, value in config.items() if key not in changes or value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-40]) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def only_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"GGUF")


def in_a_hub_cache(folder: Path) -> None:
    """As the hub's cache holds it: the folder given is the one of all revisions."""
    inner = folder.parent / "away"
    folder.rename(inner)
    (folder / "snapshots").mkdir(parents=True)
    inner.rename(folder / "snapshots" / "5f0b02c7")


def half_downloaded(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def no_index(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")


def an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def an_adapter_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    shutil.copy(folder / WEIGHTS, folder / "adapter_model.safetensors")


def original(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "consolidated.00.pth")
    (folder / "params.json").write_text('{"dim": 32, "n_layers": 2}')


def a_folder_for(name: str) -> Callable[[Path], None]:
    """What cannot be read, also by a user who may read everything."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def an_index(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / f"{WEIGHTS}.index.json").write_text(content) and None


def the_target(folder: Path) -> None:
    """Put the target's files where the draft's are."""
    shutil.copytree(folder.parent / "target", folder, dirs_exist_ok=True)


# name: (what happens to the target, what happens to the draft, words of the message)
FILES: dict[str, tuple[Callable[[Path], None] | None, Callable[[Path], None] | None, str]] = {
    "no target": (shutil.rmtree, None, "does not exist"),
    "a file": (only_a_file, None, "is a file; give the folder that holds config.json"),
    "a cache of the hub": (in_a_hub_cache, None, "snapshots/5f0b02c7'"),
    "half a download": (half_downloaded, None, "model-00001-of-00002.safetensors is missing"),
    "half a download, the other half": (half_downloaded, None, "names it: the download was not finished"),
    "parts without their index": (no_index, None, "without model.safetensors.index.json, which lists them"),
    "a pointer of git-lfs": (write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), None, "git lfs pull"),
    "an adapter": (an_adapter, None, "merge it into its base model"),
    "an adapter beside the model": (an_adapter_beside, None, "merge it into the weights, or remove"),
    "Llama's own format": (original, None, "often the one above"),
    "GGUF": (lambda folder: (folder / "config.json").rename(folder / "m.gguf") and None, None, "GGUF files are not"),
    "config is a folder": (a_folder_for("config.json"), None, "cannot be read: Is a directory"),
    "weights are a folder": (a_folder_for(WEIGHTS), None, "Is a directory"),
    "an index of nothing": (an_index('{"weight_map": {}}'), None, "is not a weight index"),
    "weights beside an index of others": (
        an_index('{"weight_map": {"a": "b.safetensors"}}'),
        None,
        "names other files",
    ),
    "no config": (remove("config.json"), None, "config.json is missing"),
    "config is cut off": (cut("config.json"), None, "is not valid JSON"),
    "config is a list": (write("config.json", b"[]"), None, "must hold a JSON object"),
    "config is not text": (write("config.json", b"\xff\xfe\x00"), None, "config.json"),
    "a family nobody serves": (edit_config(architectures=["GPT2LMHeadModel"]), None, "GPT2LMHeadModel"),
    "hidden_size is text": (edit_config(hidden_size="wide"), None, "hidden_size must be a positive integer"),
    "vocab_size is negative": (edit_config(vocab_size=-1), None, "vocab_size must be a positive integer"),
    "heads that do not divide": (edit_config(num_key_value_heads=3), None, "num_key_value_heads 3"),
    "no weights": (remove(WEIGHTS), None, "model.safetensors is missing"),
    "weights in a pickle": (only_a_pickle, None, "only safetensors are read"),
    "weights cut off": (cut(WEIGHTS), None, "is not a readable safetensors file"),
    "weights are empty": (write(WEIGHTS, b""), None, "is not a readable safetensors file"),
    "a tensor is missing": (edit_tensors(lambda t: t.pop("model.norm.weight")), None, "'model.norm.weight' is missing"),
    "a tensor too many": (edit_tensors(lambda t: t.update(odd=torch.ones(2))), None, "'odd'"),
    "a tensor of another shape": (
        edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(7)})),
        None,
        "model.norm.weight",
    ),
    "not a draft": (None, shutil.rmtree, "does not exist"),
    "draft config is cut off": (None, cut("config.json"), "is not valid JSON"),
    "draft weights cut off": (None, cut(WEIGHTS), "is not a readable safetensors file"),
    "a target as its own draft": (None, the_target, "not a draft"),
    "a draft for another width": (None, edit_config(target_hidden_size=48), "48"),
    "a draft for another vocabulary": (None, edit_config(vocab_size=80), "80"),
    "aux layers the target does not have": (
        None,
        edit_config(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 99]}),
        "eagle_aux_hidden_state_layer_ids give boundaries [1, 2, 100]",
    ),
    "num_aux against fc": (None, edit_config(num_aux_hidden_states=2), "num_aux"),
    "a draft tensor is missing": (None, edit_tensors(lambda t: t.pop("fc.weight")), "fc.weight"),
    "a draft tensor too many": (None, edit_tensors(lambda t: t.update(odd=torch.ones(2))), "'odd'"),
    "a draft vocabulary without its map": (None, edit_tensors(lambda t: t.pop("d2t")), "d2t"),
    "a map out of the vocabulary": (None, edit_tensors(lambda t: t["d2t"].add_(1000)), "d2t"),
}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny target and a draft that fits it, to be spoiled."""
    good = target_folder()
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(good, target)
    shutil.copytree(draft_folder(good, draft_vocab=32), draft)
    return target, draft


def generate(target: Path, draft: Path, *more: str) -> int:
    ids = ["--prompt-token-ids", "5,6,7"]
    return main(["generate", "--model", str(target), "--draft", str(draft), *ids, "--max-tokens", "4", *more])


def refused(capsys: pytest.CaptureFixture[str], code: int, words: str) -> None:
    said = capsys.readouterr()
    assert code == 2, said
    assert words in said.err
    assert said.err.startswith("aerie ")
    assert "Traceback" not in said.err
    assert said.out == ""


def test_unchanged_pair_generates_tokens(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(*pair, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4


@pytest.mark.parametrize("name", FILES)
def test_generate_refuses_a_broken_checkpoint(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil_target, spoil_draft, words = FILES[name]
    for spoil, folder in ((spoil_target, pair[0]), (spoil_draft, pair[1])):
        if spoil:
            spoil(folder)
    refused(capsys, generate(*pair), words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--topk", "4", "--num-steps", "2", "--num-draft-tokens", "99"], "speculative_num_draft_tokens 99"),
        (["--num-steps", "99"], "speculative_num_steps"),
        (["--page-size", "0"], "page_size"),
        (["--temperature", "-1"], "temperature must lie in"),
        (["--top-p", "0"], "top_p must lie in"),
        (["--seed", str(2**64)], "seed must lie in"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--max-tokens", "100000"], "max_tokens"),
        (["--stop", "x"], "stop"),
    ],
)
def test_generate_refuses_bad_flags(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    refused(capsys, generate(*pair, *more), words)


@pytest.mark.parametrize("ids", ["5,x", "", "5,64", "-1", "1,,2"])
def test_generate_refuses_bad_prompt_token_ids(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], ids: str
) -> None:
    code = main(["generate", "--model", str(pair[0]), f"--prompt-token-ids={ids}", "--max-tokens", "2"])
    refused(capsys, code, "")


def serve_config(folder: Path, pair: tuple[Path, Path], **engine: Any) -> str:
    """A file for `aerie serve --config`; JSON is YAML."""
    model = {"model_id": "tiny", "model_source": str(pair[0])}
    entry = {"model_loading_config": model, "engine_kwargs": engine}
    application = {"name": "aerie", "import_path": "cluster.api.app:build_openai_app", "args": {"llm_configs": [entry]}}
    file = folder / "serve.yaml"
    file.write_text(json.dumps({"http_options": {"port": 18999}, "applications": [application]}))
    return str(file)


@pytest.mark.parametrize(
    ("override", "words"), [("http_port=99999", "port"), ("model_source=/nowhere/at/all", "/nowhere/at/all")]
)
def test_serve_refuses_bad_settings_over_a_config_file(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    """Over a file of settings; all others are tried in tests/actors/test_settings.py."""
    refused(capsys, main(["serve", "--config", serve_config(tmp_path, pair), "--set", override]), words)


def test_serve_refuses_a_port_in_use_before_ray_starts(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before Ray starts."""
    monkeypatch.setattr(LocalRay, "start", lambda _: pytest.fail("Ray is started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main(["serve", "--config", serve_config(tmp_path, pair), "--set", f"http_port={port}"])
    refused(capsys, code, f"http_port {port} on 127.0.0.1 cannot be used: Address already in use")
