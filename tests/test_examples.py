"""Every program in examples/ runs as its README says, and does what it demonstrates."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.api.http.routes import make_app
from cluster.api.serve.settings import parse
from cluster.cli import main
from tests.serving.actors.apart import run_script
from tests.serving.api.listening import listening
from tests.serving.api.test_engine import EngineService

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, TARGET, DRAFT = ROOT / "examples", "models/demo/target", "models/demo/draft"


def run(name: str, *arguments: str, stdin_text: str = "") -> str:
    """Run an example with these arguments and this text on stdin, and return what it prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    completed = subprocess.run(command, cwd=ROOT, input=stdin_text, capture_output=True, text=True, timeout=280)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server of the demo target."""
    service = EngineService(str(ROOT / TARGET), model_path=str(ROOT / TARGET))
    with listening(make_app(service)) as url:
        yield url
    service.grammars.close()
    assert service.engine.loop.stop()


def test_the_chat_client_streams_a_conversation(url: str) -> None:
    arguments = ["--url", url, "--temperature", "0", "--max-tokens", "12", "--system", "be brief"]
    one_turn_output = run("chat_client.py", *arguments, stdin_text="import os\n")
    two_turn_output = run("chat_client.py", *arguments, stdin_text="import os\nimport sys\n")
    assert (
        one_turn_output.strip()
        and two_turn_output.startswith(one_turn_output)
        and len(two_turn_output) > len(one_turn_output)
    )


def test_structured_output_follows_its_schema(url: str) -> None:
    lines = [json.loads(line) for line in run("structured_output.py", "--url", url).splitlines()]
    assert len(lines) == 3 and all({*line} == {"name", "arguments", "returns"} for line in lines)


@pytest.mark.slow
def test_batch_scoring_finds_code_likelier_than_nonsense(tmp_path: Path) -> None:
    texts = ["import os", "colourless green ideas sleep furiously", "x"]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    printed = run("batch_scoring.py", TARGET, str(tmp_path / "texts.txt"), "--draft", DRAFT)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert all(line["label"] in ("code", "prose") for line in lines)
    assert lines[0]["perplexity"] < lines[1]["perplexity"] and lines[2]["perplexity"] is None


def test_custom_draft_passes_inspect_and_does_not_change_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    draft = str(tmp_path / "my-draft")
    assert "next: aerie inspect" in run("custom_draft.py", TARGET, draft)

    def run_json_command(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        output: dict[str, Any] = json.loads(capsys.readouterr().out)
        return output

    assert not run_json_command("inspect", TARGET, "--draft", draft)["problems"]
    plain, drafted = (
        run_json_command("generate", TARGET, "class Queue:", "--max-tokens", "16", *draft_options)
        for draft_options in ([], ["--draft", draft])
    )
    assert drafted["text"] == plain["text"] and 1.0 <= drafted["accept_length"] < 1.2


@pytest.mark.slow
def test_probe_draft_command_accepts_a_custom_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = str(tmp_path / "my-draft")
    run("custom_draft.py", TARGET, draft)
    assert main(["probe-draft", draft, "--target", str(ROOT / TARGET), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["readings"]) > 2


def test_two_nodes_config_has_two_ranks_spread_over_nodes() -> None:
    config = yaml.safe_load((EXAMPLES / "two_nodes/serve.yaml").read_text(encoding="utf-8"))
    llm = parse(config["applications"][0]["args"]).llm
    assert (llm.layout().world, llm.layout().strategy) == (2, "STRICT_SPREAD")
    assert config["http_options"]["host"] == "127.0.0.1"
    commands = (EXAMPLES / "two_nodes/README.md").read_text(encoding="utf-8")
    assert "serve deploy examples/two_nodes/serve.yaml" in commands


@pytest.mark.ray
@pytest.mark.slow
def test_two_nodes_config_serves_from_two_nodes() -> None:
    result = run_script("tests.serving.actors.two_nodes", 290)
    assert result["status"] == "RUNNING" and result["text"], result
    assert len(set(result["nodes"])) == 2
