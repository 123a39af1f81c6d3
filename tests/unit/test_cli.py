"""What all commands share: a reader of stdout that leaves early, and failures that are somebody else's."""

import os
import subprocess
import sys
import types

import pytest

from cluster import cli
from tests.tiny import target_folder


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["inspect", "DIR"], ["inspect", "DIR", "--json"], ["--help"]], ids=" ".join)
def test_closed_stdout_reader_ends_the_command_without_error_output(words: list[str], unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", *(target_folder() if word == "DIR" else word for word in words)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=120,
    )
    os.close(write)
    swallowed = words == ["--help"] and unbuffered  # by argparse
    assert (done.returncode, done.stderr) == (0 if swallowed else 141, "")


def test_broken_pipe_error_from_another_pipe_is_raised(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise BrokenPipeError("a child is gone")

    module = types.ModuleType("broken")
    module.add_arguments, module.run = lambda parser: None, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken", module)
    monkeypatch.setitem(cli.COMMANDS, "broken", ("broken", "fails"))
    with pytest.raises(BrokenPipeError, match="a child is gone"):
        cli.main(["broken"])
