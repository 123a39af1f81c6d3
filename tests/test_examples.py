"""Every program of examples/ runs as its README says, and does what it is there to show."""

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
from tests.actors.apart import found_by
from tests.api.listening import listening
from tests.api.test_engine import EngineService

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, TARGET, DRAFT = ROOT / "examples", "models/demo/target", "models/demo/draft"


def run(name: str, *words: str, typed: str = "") -> str:
    """What the example prints."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the demo target."""
    service = EngineService(str(ROOT / TARGET), model_path=str(ROOT / TARGET))
    with listening(make_app(service)) as url:
        yield url
    service.grammars.close()
    assert service.engine.loop.stop()


def test_the_chat_client_streams_a_conversation(url: str) -> None:
    words = ["--url", url, "--temperature", "0", "--max-tokens", "12", "--system", "be brief"]
    first = run("chat_client.py", *words, typed="import os\n")
    both = run("chat_client.py", *words, typed="import os\nimport sys\n")
    assert first.strip() and both.startswith(first) and len(both) > len(first)


def test_structured_output_follows_its_schema(url: str) -> None:
    lines = [json.loads(line) for line in run("structured_output.py", "--url", url).splitlines()]
    assert len(lines) == 3 and all({*line} == {"name", "arguments", "returns"} for line in lines)


def test_batch_scoring_finds_code_likelier_than_nonsense(tmp_path: Path) -> None:
    texts = ["import os", "colourless green ideas sleep furiously", "x"]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    said = run("batch_scoring.py", TARGET, str(tmp_path / "texts.txt"), "--draft", DRAFT)
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert all(line["label"] in ("code", "prose") for line in lines)
    assert lines[0]["perplexity"] < lines[1]["perplexity"] and lines[2]["perplexity"] is None


def test_custom_draft_passes_inspect_and_does_not_change_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    draft = str(tmp_path / "my-draft")
    assert "next: aerie inspect" in run("custom_draft.py", TARGET, draft)

    def said(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert not said("inspect", TARGET, "--draft", draft)["problems"]
    plain, drafted = (
        said("generate", TARGET, "class Queue:", "--max-tokens", "16", *more) for more in ([], ["--draft", draft])
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
    found = found_by("tests.actors.two_nodes", 290)
    assert found["status"] == "RUNNING" and found["text"], found
    assert len(set(found["nodes"])) == 2
