"""A command gives the same result for a model's name on a hub and for a folder of the same files. `aerie inspect`
downloads only a few bytes of the weights.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.arch.hub import outline
from cluster.cli import main
from tests.support.fake_hub import FakeHub, commit_of
from tests.support.tiny_checkpoints import draft_folder, target_folder

WEIGHTS = "model.safetensors"


def inspect_report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = main(["inspect", *arguments, "--json"])
    report_dict: dict[str, object] = json.loads(capsys.readouterr().out)
    assert code == bool(report_dict["problems"])
    return report_dict


@pytest.mark.parametrize("first_request_bytes", [16, 1 << 16])
def test_inspect_reports_the_same_for_hub_names_and_folders(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first_request_bytes: int
) -> None:
    """The first request for the header is once too short for it and once long enough."""
    monkeypatch.setattr(outline, "FIRST_REQUEST_BYTES", first_request_bytes)
    target = target_folder()
    draft = draft_folder(target, draft_vocab=40)  # with a d2t tensor, whose data inspect reads too
    hub.add("org/target", target)
    hub.add("org/draft", draft)
    hub_report = inspect_report(capsys, "org/target@main", "--draft", "org/draft")
    folder_report = json.dumps(inspect_report(capsys, target, "--draft", draft))
    for name, folder in (("org/target", target), ("org/draft", draft)):
        folder_report = folder_report.replace(folder, f"{name}@{commit_of('main')}")
    assert hub_report == json.loads(folder_report)
    sizes = {name: Path(folder, WEIGHTS).stat().st_size for name, folder in (("target", target), ("draft", draft))}
    for name, size in sizes.items():
        requests = [request for request in hub.downloads(WEIGHTS) if f"org/{name}/" in request.path]
        assert all(request.range and request.status == 206 for request in requests)
        header = 8 + int.from_bytes(Path(target if name == "target" else draft, WEIGHTS).read_bytes()[:8], "little")
        d2t = 8 * 40 if name == "draft" else 0
        assert sum(request.bytes for request in requests) == max(header, min(first_request_bytes, size)) + d2t


def test_inspect_reports_unservable_hub_models_without_download(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "pickles"
    shutil.copytree(target_folder(), folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    hub.add("org/pickles", folder)
    (problem,) = inspect_report(capsys, "org/pickles")["problems"]  # type: ignore[misc]
    assert "['pytorch_model.bin'] are pickles" in problem and f"'org/pickles@{commit_of('main')}'" in problem
    (problem,) = inspect_report(capsys, "org/nothing")["problems"]  # type: ignore[misc]
    assert "no such model is there" in problem
    assert not hub.downloads(".bin") and not hub.downloads(WEIGHTS)


def test_inspect_command_uses_the_hub_of_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/target", target_folder())
    hub_variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | hub_variables
    command = [sys.executable, "-m", "cluster.cli", "inspect", "org/target"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "can be served" in process.stdout and f"target org/target@{commit_of('main')}:" in process.stdout, (
        process.stderr
    )
    assert not process.stderr, "no progress bar without a terminal"
    assert list((tmp_path / "home" / "hub").rglob("config.json")) and not list((tmp_path / "home").rglob(WEIGHTS))


def test_generate_gives_the_same_tokens_for_hub_names_and_folders(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_folder()
    draft = draft_folder(target)
    hub.add("org/target", target)
    hub.add("org/draft", draft)
    results = []
    for pair in ((target, draft), ("org/target", "org/draft@main")):
        arguments = [
            "generate",
            pair[0],
            "--draft",
            pair[1],
            "--prompt-token-ids",
            "5,6,7",
            "--max-tokens",
            "8",
            "--json",
        ]
        assert main([*arguments, "--dtype", "float32"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["token_ids"] == results[1]["token_ids"] and len(results[1]["token_ids"]) == 8
    assert main(["chat", "org/target"]) == 2
    assert "a chat needs a tokenizer" in capsys.readouterr().err
