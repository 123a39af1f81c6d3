"""An installed package is `cluster/` and nothing else: every command works on a folder, or says where the demo is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.paths.checkout import CHECKOUT
from tests.tiny import draft_folder, target_folder

SCRIPT = """
import sys
from cluster.cli import main
for words in sys.argv[1].split(";"):
    sys.stderr.write(f"@begin {words}\\n")
    sys.stderr.write(f"@end {main(words.split())}\\n")
"""
NO_DEMO = "the demo is part of Aerie's source repository"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(CHECKOUT / "cluster", root / "cluster", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def said(installed: Path, commands: list[str], here: Path, **environment: str) -> dict[str, tuple[int, str]]:
    """Status and words of each command, run one after another in one process that finds only what is installed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("AERIE_HOME", "PYTHONPATH")}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, ";".join(commands)],
        cwd=here,
        env={**clean, "PYTHONPATH": str(installed), "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout
    found = {}
    for part in ran.stdout.split("@begin ")[1:]:
        words, _, rest = part.partition("\n")
        text, _, status = rest.rpartition("@end ")
        found[words] = (int(status), text)
    return found


def test_installed_commands_work_on_a_folder_or_say_where_the_demo_is(installed: Path, tmp_path: Path) -> None:
    target, draft = target_folder(), draft_folder(target_folder())
    without = ["serve", "demo", "bench", "bench faults"]
    generated = f"generate {target} --draft {draft} --prompt-token-ids 5,6 --max-tokens 3"
    commands = [*without, "serve /no/folder", f"inspect {target} --draft {draft}", generated]
    found = said(installed, commands, tmp_path)
    for words in without:
        status, text = found[words]
        assert (status, NO_DEMO in text) == (2, True), text
        assert "set AERIE_HOME to a checkout" in text
    assert "aerie serve MODEL" in found["serve"][1]
    assert found["serve /no/folder"][0] == 2
    assert "'/no/folder' does not exist" in found["serve /no/folder"][1]
    assert found[commands[-2]][0] == 0
    assert "can be served" in found[commands[-2]][1]
    assert found[generated][0] == 0
    assert "3 tokens" in found[generated][1]


def test_installed_serve_finds_the_demo_in_aerie_home(installed: Path, tmp_path: Path) -> None:
    """Its settings are read, so the port that is none is what is refused."""
    words = "serve --set http_port=0"
    status, text = said(installed, [words], tmp_path, AERIE_HOME=str(CHECKOUT))[words]
    assert status == 2
    assert "http_options.port" in text
