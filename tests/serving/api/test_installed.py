"""The installed package is only `cluster/`. Every command works on a model folder, or says where the demo is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.paths.checkout import CHECKOUT
from tests.support.tiny_checkpoints import draft_folder, target_folder

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


def run_commands(
    installed: Path, commands: list[str], working_folder: Path, **environment: str
) -> dict[str, tuple[int, str]]:
    """Exit status and output of each command. One process, which imports only the installed package, runs them all."""
    base_environment = {name: value for name, value in os.environ.items() if name not in ("AERIE_HOME", "PYTHONPATH")}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, ";".join(commands)],
        cwd=working_folder,
        env={**base_environment, "PYTHONPATH": str(installed), "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stdout
    results = {}
    for section in process.stdout.split("@begin ")[1:]:
        command, _, remainder = section.partition("\n")
        text, _, status = remainder.rpartition("@end ")
        results[command] = (int(status), text)
    return results


def test_installed_commands_work_on_a_folder_or_say_where_the_demo_is(installed: Path, tmp_path: Path) -> None:
    target, draft = target_folder(), draft_folder(target_folder())
    demo_commands = ["serve", "demo", "bench", "bench faults"]
    generate_command = f"generate {target} --draft {draft} --prompt-token-ids 5,6 --max-tokens 3"
    commands = [*demo_commands, "serve /no/folder", f"inspect {target} --draft {draft}", generate_command]
    results = run_commands(installed, commands, tmp_path)
    for command in demo_commands:
        status, text = results[command]
        assert (status, NO_DEMO in text) == (2, True), text
        assert "set AERIE_HOME to a checkout" in text
    assert "aerie serve MODEL" in results["serve"][1]
    assert results["serve /no/folder"][0] == 2
    assert "'/no/folder' does not exist" in results["serve /no/folder"][1]
    assert results[commands[-2]][0] == 0
    assert "can be served" in results[commands[-2]][1]
    assert results[generate_command][0] == 0
    assert "3 tokens" in results[generate_command][1]


def test_installed_serve_finds_the_demo_in_aerie_home(installed: Path, tmp_path: Path) -> None:
    """The command reads the demo's settings, so the only thing that it refuses is the invalid port 0."""
    command = "serve --set http_port=0"
    status, text = run_commands(installed, [command], tmp_path, AERIE_HOME=str(CHECKOUT))[command]
    assert status == 2
    assert "http_options.port" in text
