"""Checkpoints and flags that the commands refuse: exit code 2, a message that names the file or setting, no
traceback.
"""

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
from tests.support.tiny_checkpoints import draft_folder, target_folder

WEIGHTS = "model.safetensors"


def edit_config(**changes: Any) -> Callable[[Path], None]:
    """A function that changes keys of a folder's config.json; None removes a key."""

    def edit(folder: Path) -> None:
        config = {**json.loads((folder / "config.json").read_text()), **changes}
        new_config = {key: value for key, value in config.items() if key not in changes or value is not None}
        (folder / "config.json").write_text(json.dumps(new_config))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-40]) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace_weights_by_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def replace_folder_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"GGUF")


def move_into_hub_cache(folder: Path) -> None:
    """Move the checkpoint to its place in a hub cache. `folder` becomes the cache folder of all revisions."""
    revision_folder = folder.parent / "away"
    folder.rename(revision_folder)
    (folder / "snapshots").mkdir(parents=True)
    revision_folder.rename(folder / "snapshots" / "5f0b02c7")


def drop_first_shard(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def split_without_index(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")


def turn_into_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def add_adapter_files(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    shutil.copy(folder / WEIGHTS, folder / "adapter_model.safetensors")


def turn_into_llama_format(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "consolidated.00.pth")
    (folder / "params.json").write_text('{"dim": 32, "n_layers": 2}')


def replace_file_by_folder(name: str) -> Callable[[Path], None]:
    """A function that puts a folder in the place of a file. Nobody can read that as a file, not even root."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def write_index(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / f"{WEIGHTS}.index.json").write_text(content) and None


def copy_target_over_draft(folder: Path) -> None:
    """Overwrite the draft's files with the target's files."""
    shutil.copytree(folder.parent / "target", folder, dirs_exist_ok=True)


# name: (change of the target's folder, change of the draft's folder, a part of the error message)
FILES: dict[str, tuple[Callable[[Path], None] | None, Callable[[Path], None] | None, str]] = {
    "no target": (shutil.rmtree, None, "does not exist"),
    "a file": (replace_folder_by_file, None, "is a file; give the folder that holds config.json"),
    "a hub cache": (move_into_hub_cache, None, "snapshots/5f0b02c7'"),
    "a missing shard: its name": (drop_first_shard, None, "model-00001-of-00002.safetensors is missing"),
    "a missing shard: the reason": (drop_first_shard, None, "names it: the download was not finished"),
    "shards without an index": (split_without_index, None, "without model.safetensors.index.json, which lists them"),
    "a git-lfs pointer": (write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), None, "git lfs pull"),
    "an adapter": (turn_into_adapter, None, "merge it into its base model"),
    "an adapter beside the model": (add_adapter_files, None, "merge it into the weights, or remove"),
    "Llama's own format": (turn_into_llama_format, None, "often the one above"),
    "GGUF": (lambda folder: (folder / "config.json").rename(folder / "m.gguf") and None, None, "GGUF files are not"),
    "config is a folder": (replace_file_by_folder("config.json"), None, "cannot be read: Is a directory"),
    "weights are a folder": (replace_file_by_folder(WEIGHTS), None, "Is a directory"),
    "an empty index": (write_index('{"weight_map": {}}'), None, "is not a weight index"),
    "weights and an index of other files": (
        write_index('{"weight_map": {"a": "b.safetensors"}}'),
        None,
        "names other files",
    ),
    "no config": (remove("config.json"), None, "config.json is missing"),
    "config is cut off": (truncate("config.json"), None, "is not valid JSON"),
    "config is a list": (write("config.json", b"[]"), None, "must hold a JSON object"),
    "config is not text": (write("config.json", b"\xff\xfe\x00"), None, "config.json"),
    "an unknown architecture": (edit_config(architectures=["GPT2LMHeadModel"]), None, "GPT2LMHeadModel"),
    "hidden_size is text": (edit_config(hidden_size="wide"), None, "hidden_size must be a positive integer"),
    "vocab_size is negative": (edit_config(vocab_size=-1), None, "vocab_size must be a positive integer"),
    "heads that do not divide": (edit_config(num_key_value_heads=3), None, "num_key_value_heads 3"),
    "no weights": (remove(WEIGHTS), None, "model.safetensors is missing"),
    "weights in a pickle": (replace_weights_by_pickle, None, "only safetensors are read"),
    "weights cut off": (truncate(WEIGHTS), None, "is not a readable safetensors file"),
    "weights are empty": (write(WEIGHTS, b""), None, "is not a readable safetensors file"),
    "a tensor is missing": (edit_tensors(lambda t: t.pop("model.norm.weight")), None, "'model.norm.weight' is missing"),
    "an unknown tensor": (edit_tensors(lambda t: t.update(odd=torch.ones(2))), None, "'odd'"),
    "a tensor of another shape": (
        edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(7)})),
        None,
        "model.norm.weight",
    ),
    "no draft": (None, shutil.rmtree, "does not exist"),
    "draft config is cut off": (None, truncate("config.json"), "is not valid JSON"),
    "draft weights cut off": (None, truncate(WEIGHTS), "is not a readable safetensors file"),
    "a target as its own draft": (None, copy_target_over_draft, "not a draft"),
    "a draft for another width": (None, edit_config(target_hidden_size=48), "48"),
    "a draft for another vocabulary": (None, edit_config(vocab_size=80), "80"),
    "aux layers the target does not have": (
        None,
        edit_config(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 99]}),
        "eagle_aux_hidden_state_layer_ids give boundaries [1, 2, 100]",
    ),
    "num_aux_hidden_states unlike fc": (None, edit_config(num_aux_hidden_states=2), "num_aux"),
    "a draft tensor is missing": (None, edit_tensors(lambda t: t.pop("fc.weight")), "fc.weight"),
    "an unknown draft tensor": (None, edit_tensors(lambda t: t.update(odd=torch.ones(2))), "'odd'"),
    "a draft vocabulary without d2t": (None, edit_tensors(lambda t: t.pop("d2t")), "d2t"),
    "d2t beyond the vocabulary": (None, edit_tensors(lambda t: t["d2t"].add_(1000)), "d2t"),
}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of a tiny target and of a draft that fits it. A test may damage them."""
    target_source = target_folder()
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(target_source, target)
    shutil.copytree(draft_folder(target_source, draft_vocab=32), draft)
    return target, draft


def generate(target: Path, draft: Path, *flags: str) -> int:
    """Run `aerie generate` and return its exit code."""
    prompt_flags = ["--prompt-token-ids", "5,6,7"]
    return main(["generate", "--model", str(target), "--draft", str(draft), *prompt_flags, "--max-tokens", "4", *flags])


def assert_refused(capsys: pytest.CaptureFixture[str], exit_code: int, message_part: str) -> None:
    """Assert that a command ended with code 2, and wrote only an error message that has `message_part` in it."""
    captured = capsys.readouterr()
    assert exit_code == 2, captured
    assert message_part in captured.err
    assert captured.err.startswith("aerie ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_unchanged_pair_generates_tokens(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(*pair, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4


@pytest.mark.parametrize("name", FILES)
def test_generate_refuses_a_broken_checkpoint(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage_target, damage_draft, message_part = FILES[name]
    for damage, folder in ((damage_target, pair[0]), (damage_draft, pair[1])):
        if damage:
            damage(folder)
    assert_refused(capsys, generate(*pair), message_part)


@pytest.mark.parametrize(
    ("flags", "message_part"),
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
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], flags: list[str], message_part: str
) -> None:
    assert_refused(capsys, generate(*pair, *flags), message_part)


@pytest.mark.parametrize(
    ("ids", "message_part"),
    [
        ("5,x", "must be integers joined by commas, got '5,x'"),
        ("", "must be integers joined by commas, got ''"),
        ("5,64", "token id 64, outside the vocabulary of 64"),
        ("-1", "token id -1, outside the vocabulary of 64"),
        ("1,,2", "must be integers joined by commas, got '1,,2'"),
    ],
)
def test_generate_refuses_bad_prompt_token_ids(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], ids: str, message_part: str
) -> None:
    exit_code = main(["generate", "--model", str(pair[0]), f"--prompt-token-ids={ids}", "--max-tokens", "2"])
    assert_refused(capsys, exit_code, message_part)


def serve_config(folder: Path, pair: tuple[Path, Path], **engine: Any) -> str:
    """A file for `aerie serve --config`; JSON is YAML."""
    loading_config = {"model_id": "tiny", "model_source": str(pair[0])}
    llm_config = {"model_loading_config": loading_config, "engine_kwargs": engine}
    application = {
        "name": "aerie",
        "import_path": "cluster.api.app:build_openai_app",
        "args": {"llm_configs": [llm_config]},
    }
    file = folder / "serve.yaml"
    file.write_text(json.dumps({"http_options": {"port": 18999}, "applications": [application]}))
    return str(file)


@pytest.mark.parametrize(
    ("override", "message_part"), [("http_port=99999", "port"), ("model_source=/nowhere/at/all", "/nowhere/at/all")]
)
def test_serve_refuses_bad_settings_over_a_config_file(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message_part: str
) -> None:
    """`--set` overrides a setting of the config file. `serving/actors/test_settings.py` tests the others."""
    assert_refused(capsys, main(["serve", "--config", serve_config(tmp_path, pair), "--set", override]), message_part)


def test_serve_refuses_a_port_in_use_before_ray_starts(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command refuses the port before it starts Ray."""
    monkeypatch.setattr(LocalRay, "start", lambda _: pytest.fail("Ray is started"))
    with socket.socket() as listening_socket:
        listening_socket.bind(("127.0.0.1", 0))
        listening_socket.listen()
        port = listening_socket.getsockname()[1]
        exit_code = main(["serve", "--config", serve_config(tmp_path, pair), "--set", f"http_port={port}"])
    assert_refused(capsys, exit_code, f"http_port {port} on 127.0.0.1 cannot be used: Address already in use")
