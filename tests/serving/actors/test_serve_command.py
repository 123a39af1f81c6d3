"""`aerie serve` as a process: it starts, answers, stops and leaves no process and no file; or it says why it cannot."""

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil  # Ray's own copy: the actors' conftest imports Ray first
import pytest

from tests.serving.api.apps import Answer, ask, metric_sum
from tests.support.tiny_checkpoints import draft_folder, target_folder

pytestmark = pytest.mark.ray


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def aerie_serve(*settings: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `aerie serve` with `--set` for each setting and with these environment variables; kill it at the end."""
    set_arguments = [argument for setting in settings for argument in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", "--log-file", str(log), *set_arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,  # a process group of its own, as in a terminal
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tiny_pair() -> list[str]:
    """Settings of `aerie serve` for the tiny target and draft."""
    target = target_folder()
    return [
        f"model_path={target}",
        f"speculative_draft_model_path={draft_folder(target)}",
        "model_id=tiny",
        "dtype=float64",
    ]


def listening_addresses(processes: list[psutil.Process]) -> set[str]:
    """The IP addresses that these processes listen on."""
    addresses = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections()
            addresses |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
    return addresses


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the process's output up to the first line that contains `text`, and return what was read."""
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"the process ended with status {process.wait()}: {output}")


class Streams:
    """Streams from one server that a thread reads while the test goes on.

    The constructor's `begun` is a number of streams. The event `begun` is set once so many streams have a first token.
    """

    def __init__(self, url: str, count: int, max_tokens: int, begun: int) -> None:
        self.answers: list[Answer] = []
        self.begun = threading.Event()
        self._url, self._count, self._max_tokens, self._required_count = url, count, max_tokens, begun
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            warmup = client.post(f"{self._url}/v1/completions", json={"model": "tiny", "prompt": [1], "max_tokens": 1})
            assert (await warmup).status_code == 200
            body_fields = {"model": "tiny", "stream": True, "ignore_eos": True}
            tasks = [
                asyncio.create_task(ask(client, self._url, [5, 6, i], self._max_tokens, **body_fields))
                for i in range(self._count)
            ]
            while (
                metric_sum((await client.get(f"{self._url}/metrics")).text, "aerie_ttft_seconds_count")
                < 1 + self._required_count
            ):
                await asyncio.sleep(0.02)
            self.begun.set()
            self.answers = list(await asyncio.gather(*tasks))

    def join(self) -> list[Answer]:
        self._thread.join()
        return self.answers


def completion_response(url: str) -> httpx.Response:
    """The response to a completion request that the draining server should refuse."""
    return httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 1}, timeout=20)


@pytest.mark.parametrize("proxy", ["0", pytest.param("1", marks=pytest.mark.slow)], ids=["serve's proxy", "haproxy"])
def test_serve_command_starts_answers_drains_and_leaves_no_process(proxy: str, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    url = f"http://127.0.0.1:{port}"
    settings = (f"http_port={port}", *tiny_pair(), "graceful_shutdown_timeout_s=120", "max_running_requests=8")
    with aerie_serve(*settings, log=log, RAY_SERVE_ENABLE_HA_PROXY=proxy) as process:
        console_text = wait_for(process, "READY ")
        assert f"log: {log}" in console_text
        assert f"READY http://127.0.0.1:{port}/v1" in console_text
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0}
        response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 9
        children = psutil.Process(process.pid).children(recursive=True)
        assert listening_addresses(children) <= ({"127.0.0.1"} if proxy == "0" else {"127.0.0.1", "0.0.0.0"})
        folder = next(match for child in children if (match := re.search(r"/tmp/aerie-\w+", " ".join(child.cmdline()))))
        assert stat.S_IMODE(Path(folder.group()).stat().st_mode) == 0o700
        streams = Streams(url, 8, 480, begun=8)
        assert streams.begun.wait(60)
        process.send_signal(signal.SIGTERM)
        assert "8 calls open" in wait_for(process, "draining")
        refused_response = completion_response(url)
        assert refused_response.status_code == 503 and refused_response.json()["error"]["code"] == "shutting_down", (
            refused_response.text
        )
        assert [response.error for response in streams.join() if not response.is_complete(480)] == []
        assert process.wait(timeout=40) == 0
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
        assert not Path(folder.group()).exists()
    log_text = log.read_text()
    success_line = r"INFO cluster\.api\.http\.access_log .*POST /v1/completions status=200 .* outcome=ok"
    assert len(re.findall(success_line, log_text)) == 10
    assert log_text.count("outcome=refused") == 1 and "/health" not in log_text


@pytest.mark.slow
def test_api_keys_from_the_environment_are_required_and_never_shown(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    url, keys = f"http://127.0.0.1:{port}", ("sk-one-of-two-keys", "sk-two-of-two-keys")
    body = {"model": "tiny", "prompt": [5, 6, 7] * 20, "max_tokens": 2}

    def cached_tokens(key: str) -> int:
        response = httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=20)
        assert response.status_code == 200, response.text
        token_count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return token_count

    settings = (f"http_port={port}", *tiny_pair(), "page_size=4", "tp_size=1", "attn_dp_size=1")
    with aerie_serve(*settings, log=log, AERIE_API_KEY=",".join(keys)) as process:
        console_text = wait_for(process, "READY ")
        assert "API keys: AERIE_API_KEY (use), AERIE_API_KEY.2 (use)" in console_text
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 401
        assert [cached_tokens(keys[0]), cached_tokens(keys[1])] == [0, 0], "a key finds cached tokens of the other key"
        assert cached_tokens(keys[0]) > 50 and cached_tokens(keys[1]) > 50
        process.send_signal(signal.SIGTERM)
        console_text += process.communicate(timeout=60)[0]
    for key in keys:
        assert key not in console_text and key not in log.read_text()


@pytest.mark.slow
def test_interrupt_ends_open_streams_with_an_error_at_the_shutdown_timeout(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = (
        f"http_port={port}",
        *tiny_pair(),
        "graceful_shutdown_timeout_s=1",
        "max_running_requests=1",
        "max_queue_wait_s=600",  # eight requests wait for one slot before the server has measured its speed
    )
    with aerie_serve(
        *settings,
        "ingress=resilient",
        "ingress_deployment_config.graceful_shutdown_timeout_s=1",
        log=tmp_path / "server.log",
    ) as process:
        wait_for(process, "READY ")
        children = psutil.Process(process.pid).children(recursive=True)
        streams = Streams(url, 8, 480, begun=1)
        assert streams.begun.wait(60)
        os.killpg(process.pid, signal.SIGINT)
        wait_for(process, "ended with an error")
        answers = streams.join()
        assert all("shutting down" in answer.error for answer in answers if not answer.is_complete(480)), answers
        assert any(answer.error for answer in answers)
        assert process.wait(timeout=40) == 0
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []


@pytest.mark.slow
def test_second_interrupt_ends_the_server_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    port = free_port()
    with aerie_serve(f"http_port={port}", *tiny_pair(), log=tmp_path / "server.log") as process:
        wait_for(process, "READY ")
        children = psutil.Process(process.pid).children(recursive=True)
        folder = next(match for child in children if (match := re.search(r"/tmp/aerie-\w+", " ".join(child.cmdline()))))
        streams = Streams(f"http://127.0.0.1:{port}", 8, 480, begun=8)
        assert streams.begun.wait(60)
        os.killpg(process.pid, signal.SIGINT)
        wait_for(process, "draining")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=10) == 128 + signal.SIGINT
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
        assert not Path(folder.group()).exists()
        assert all(answer.error for answer in streams.join())


@pytest.mark.slow
@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_startup_stops_the_server_and_leaves_no_process(
    stop_signal: signal.Signals, tmp_path: Path
) -> None:
    """The signal comes while the command imports, while Ray starts, or while the model loads. The exit status is 0."""
    for after_s in (0.5, 2.5, 4.0, 7.0):
        with (
            tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder,  # a short path, for Ray's sockets
            aerie_serve(f"http_port={free_port()}", *tiny_pair(), log=tmp_path / "log", TMPDIR=folder) as process,
        ):
            time.sleep(after_s)
            children = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, stop_signal)  # to the process group, as `timeout` and terminals do
            assert process.wait(timeout=60) == 0, after_s
            _, alive = psutil.wait_procs(children, timeout=2)
            assert alive == [] and not any(Path(folder).iterdir()), after_s


def test_broken_checkpoint_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    target = Path(target_folder())
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:480])
    with aerie_serve(
        f"http_port={free_port()}", f"model_path={tmp_path}", "speculative_algorithm=null", log=tmp_path / "server.log"
    ) as process:
        console_text, _ = process.communicate(timeout=120)
        assert process.returncode == 2, console_text
        assert "aerie serve: " in console_text and "safetensors" in console_text and "Traceback" not in console_text
