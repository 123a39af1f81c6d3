"""What all commands share: they end quietly when the reader of stdout closes it, and hide no error of another pipe."""

import os
import subprocess
import sys
import types

import pytest

from cluster import cli
from tests.support.tiny_checkpoints import target_folder


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["inspect", "DIR"], ""), (["inspect", "DIR", "--json"], "1"), (["--help"], ""), (["--help"], "1")],
)
def test_closed_stdout_reader_ends_the_command_without_error_output(arguments: list[str], unbuffered: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "cluster.cli",
            *(target_folder() if argument == "DIR" else argument for argument in arguments),
        ],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=120,
    )
    os.close(write_end)
    ignored = arguments == ["--help"] and unbuffered  # argparse ignores the closed pipe
    assert (process.returncode, process.stderr) == (0 if ignored else 141, "")


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
