"""Commands with names of a hub do what they do with folders of the same files; `aerie inspect` reads a few bytes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.arch.hub import outline
from cluster.cli import main
from tests.fake_hub import FakeHub, commit_of
from tests.tiny import draft_folder, target_folder
from tests.unit.arch.hub.conftest import hub

__all__ = ["hub"]  # the fixture

WEIGHTS = "model.safetensors"


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    code = main(["inspect", *words, "--json"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert code == bool(found["problems"])
    return found


@pytest.mark.parametrize("first", [16, 1 << 16])
def test_inspect_reports_the_same_for_hub_names_and_folders(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """With a header that is longer than what is asked for at first, and with one that is not."""
    monkeypatch.setattr(outline, "FIRST_REQUEST_BYTES", first)
    target = target_folder()
    draft = draft_folder(target, draft_vocab=40)  # with a d2t, which is read as well
    hub.add("org/target", target)
    hub.add("org/draft", draft)
    there = report(capsys, "org/target@main", "--draft", "org/draft")
    here = json.dumps(report(capsys, target, "--draft", draft))
    for name, folder in (("org/target", target), ("org/draft", draft)):
        here = here.replace(folder, f"{name}@{commit_of('main')}")
    assert there == json.loads(here)
    sizes = {name: Path(folder, WEIGHTS).stat().st_size for name, folder in (("target", target), ("draft", draft))}
    for name, size in sizes.items():
        sent = [one for one in hub.downloads(WEIGHTS) if f"org/{name}/" in one.path]
        assert all(one.range and one.status == 206 for one in sent)
        header = 8 + int.from_bytes(Path(target if name == "target" else draft, WEIGHTS).read_bytes()[:8], "little")
        d2t = 8 * 40 if name == "draft" else 0
        assert sum(one.bytes for one in sent) == max(header, min(first, size)) + d2t


def test_inspect_reports_unservable_hub_models_without_download(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "pickles"
    shutil.copytree(target_folder(), folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    hub.add("org/pickles", folder)
    (said,) = report(capsys, "org/pickles")["problems"]  # type: ignore[misc]
    assert "['pytorch_model.bin'] are pickles" in said and f"'org/pickles@{commit_of('main')}'" in said
    (said,) = report(capsys, "org/nothing")["problems"]  # type: ignore[misc]
    assert "no such model is there" in said
    assert not hub.downloads(".bin") and not hub.downloads(WEIGHTS)


def test_inspect_command_uses_the_hub_of_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/target", target_folder())
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | own
    command = [sys.executable, "-m", "cluster.cli", "inspect", "org/target"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "can be served" in ended.stdout and f"target org/target@{commit_of('main')}:" in ended.stdout, ended.stderr
    assert not ended.stderr, "there is no terminal to draw bars on"
    assert list((tmp_path / "home" / "hub").rglob("config.json")) and not list((tmp_path / "home").rglob(WEIGHTS))


def test_generate_gives_the_same_tokens_for_hub_names_and_folders(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_folder()
    draft = draft_folder(target)
    hub.add("org/target", target)
    hub.add("org/draft", draft)
    said = []
    for pair in ((target, draft), ("org/target", "org/draft@main")):
        words = ["generate", pair[0], "--draft", pair[1], "--prompt-token-ids", "5,6,7", "--max-tokens", "8", "--json"]
        assert main([*words, "--dtype", "float32"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["token_ids"] == said[1]["token_ids"] and len(said[1]["token_ids"]) == 8
    assert main(["chat", "org/target"]) == 2
    assert "a chat needs a tokenizer" in capsys.readouterr().err
