"""`aerie serve` as its users meet it: a process that starts, answers, stops and leaves nothing; or says why not."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil  # Ray's own copy: the actors' conftest imports Ray first
import pytest

from tests.tiny import draft_folder, target_folder

pytestmark = pytest.mark.ray


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def aerie_serve(*settings: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    words = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tiny_pair() -> list[str]:
    target = target_folder()
    return [
        f"model_path={target}",
        f"speculative_draft_model_path={draft_folder(target)}",
        "model_id=tiny",
        "dtype=float64",
    ]


def listening_on(processes: list[psutil.Process]) -> set[str]:
    """The addresses that a set of processes listens on."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections()
            found |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The lines up to READY, which names the URL."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if line.startswith("READY "):
            return said
    raise AssertionError(f"it ended with {process.wait()}: {said}")


@pytest.mark.parametrize("proxy", ["0", "1"], ids=["serve's proxy", "haproxy"])
def test_it_starts_answers_stops_and_leaves_nothing(proxy: str) -> None:
    port = free_port()
    with aerie_serve(f"http_port={port}", *tiny_pair(), RAY_SERVE_ENABLE_HA_PROXY=proxy) as process:
        said = wait_ready(process)
        assert f"READY http://127.0.0.1:{port}/v1" in said
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 9
        children = psutil.Process(process.pid).children(recursive=True)
        assert listening_on(children) <= ({"127.0.0.1"} if proxy == "0" else {"127.0.0.1", "0.0.0.0"})
        folder = next(match for child in children if (match := re.search(r"/tmp/aerie-\w+", " ".join(child.cmdline()))))
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert time.monotonic() - asked < 10
        _, alive = psutil.wait_procs(children, timeout=2)
        assert alive == []
        assert not Path(folder.group()).exists()


def test_an_interrupt_before_it_is_ready_stops_it_too() -> None:
    with aerie_serve(f"http_port={free_port()}", *tiny_pair()) as process:
        time.sleep(4)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        _, alive = psutil.wait_procs(children, timeout=2)
        assert alive == []


def test_a_broken_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    target = Path(target_folder())
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with aerie_serve(f"http_port={free_port()}", f"model_path={tmp_path}", "speculative_algorithm=null") as process:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 2, said
        assert "aerie serve: " in said and "safetensors" in said and "Traceback" not in said


def test_a_port_in_use_is_said_before_ray_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        asked = time.monotonic()
        with aerie_serve(f"http_port={port}", *tiny_pair()) as process:
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 2
            assert f"http_port {port} on 127.0.0.1 cannot be used: Address already in use" in said
        assert time.monotonic() - asked < 10
