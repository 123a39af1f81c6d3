"""`aerie serve` with settings that cannot run: it refuses within 10 s of CPU time, names the remedy and leaves no
process.
"""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_checkpoints import draft_folder, target_folder

MAX_CPU_S = 10.0


def checkpoint_with(folder: str, copy: Path, **keys: Any) -> str:
    """Copy a checkpoint with changed keys in its config.json, and return the copy's path."""
    copy.mkdir()
    for file in Path(folder).iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**json.loads((Path(folder) / "config.json").read_text()), **keys}))
    return str(copy)


def pair_settings(target: str | None = None, draft: str | None = None) -> list[str]:
    """The settings of a target and its draft; by default a tiny pair."""
    target = target or target_folder()
    draft = draft or draft_folder(target)
    return [f"model_path={target}", f"speculative_draft_model_path={draft}", "speculative_algorithm=EAGLE3"]


def children_cpu_s() -> float:
    """The CPU seconds of all ended child processes; on a busy machine too, they take no more."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def refusal_of(*settings: str) -> str:
    """Run `aerie serve` and return its output. It must end with exit code 2 in time, and leave no process behind."""
    flags = [word for setting in settings for word in ("--set", setting)]
    cpu_s_before = children_cpu_s()
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 2, output
    assert children_cpu_s() - cpu_s_before < MAX_CPU_S, output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert output.startswith("aerie serve: ") and "Traceback" not in output
    return output


def test_serve_refuses_a_tp_size_that_does_not_divide_the_heads() -> None:
    """`test_settings` and `test_engine_config` test refusals that need no checkpoint, without a new process."""
    assert "cannot be split over 3 ranks of an attention group" in refusal_of(
        *pair_settings(), "tp_size=3", "attn_dp_size=1"
    )


def test_serve_refuses_a_draft_with_another_target_hidden_size(tmp_path: Path) -> None:
    wide_draft = checkpoint_with(draft_folder(target_folder()), tmp_path / "draft", target_hidden_size=64)
    assert "does not fit the target: target_hidden_size 64 against 32" in refusal_of(*pair_settings(draft=wide_draft))


def test_serve_refuses_a_draft_whose_heads_do_not_divide(tmp_path: Path) -> None:
    draft = checkpoint_with(
        draft_folder(target_folder()), tmp_path / "draft", num_attention_heads=3, num_key_value_heads=3
    )
    output = refusal_of(*pair_settings(draft=draft), "tp_size=2", "attn_dp_size=1")
    assert "the draft: 3 attention heads" in output and "set speculative_draft_parallel to replicated" in output


def test_serve_refuses_more_gpus_than_the_machine_has() -> None:
    with socket.socket() as probe:  # a free port, because the server checks the port first
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = refusal_of(
        *pair_settings(), "placement_group_config.bundle_per_worker={CPU: 1, GPU: 64}", f"http_port={port}"
    )
    assert "2 rank(s) need 128 GPU" in output and "--address" in output
