"""`aerie serve` with settings that cannot run: refused within 10 s, the remedy named, nothing left behind."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import draft_folder, target_folder

LIMIT_S = 10.0


def changed(folder: str, into: Path, **keys: Any) -> str:
    """The same checkpoint with other keys in its config."""
    into.mkdir()
    for file in Path(folder).iterdir():
        (into / file.name).symlink_to(file)
    (into / "config.json").unlink()
    (into / "config.json").write_text(json.dumps({**json.loads((Path(folder) / "config.json").read_text()), **keys}))
    return str(into)


def pair(target: str | None = None, draft: str | None = None) -> list[str]:
    target = target or target_folder()
    draft = draft or draft_folder(target)
    return [f"model_path={target}", f"speculative_draft_model_path={draft}", "speculative_algorithm=EAGLE3"]


def refused(*settings: str) -> str:
    """What `aerie serve` says; it ends with the status of bad input and leaves no process of its group."""
    words = [word for setting in settings for word in ("--set", setting)]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2, said
    assert time.monotonic() - began < LIMIT_S, said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert said.startswith("aerie serve: ") and "Traceback" not in said
    return said


def test_serve_refuses_a_tp_size_that_does_not_divide_the_heads() -> None:
    """What needs no checkpoint is refused by `test_settings` and `test_engine_config` in their own process."""
    assert "cannot be split over 3 ranks of an attention group" in refused(*pair(), "tp_size=3", "attn_dp_size=1")


def test_serve_refuses_a_draft_with_another_target_hidden_size(tmp_path: Path) -> None:
    wide = changed(draft_folder(target_folder()), tmp_path / "draft", target_hidden_size=64)
    assert "does not fit the target: target_hidden_size 64 against 32" in refused(*pair(draft=wide))


def test_serve_refuses_a_draft_whose_heads_do_not_divide(tmp_path: Path) -> None:
    draft = changed(draft_folder(target_folder()), tmp_path / "draft", num_attention_heads=3, num_key_value_heads=3)
    said = refused(*pair(draft=draft), "tp_size=2", "attn_dp_size=1")
    assert "the draft: 3 attention heads" in said and "set speculative_draft_parallel to replicated" in said


def test_serve_refuses_more_gpus_than_the_machine_has() -> None:
    with socket.socket() as probe:  # the port is looked at first
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = refused(*pair(), "placement_group_config.bundle_per_worker={CPU: 1, GPU: 64}", f"http_port={port}")
    assert "2 rank(s) need 128 GPU" in said and "--address" in said
