"""The whole application on a Serve of its own, over counting engines: deployed, asked, disturbed."""

import asyncio
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema
from ray.util import list_named_actors

import psutil  # isort: skip  # Ray's own copy: importable once Ray is

from cluster.api.serve.application import build_app
from cluster.api.serve.settings import parse

FACTORY = "tests.actors.counting_engine:build"
LOGS = tempfile.TemporaryDirectory(prefix="aerie-logs-")  # of all applications here, gone with this process
LOG = Path(LOGS.name) / "counting.log"


def arguments(replicas: int = 1, ranks: int = 1, app: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    options = {
        "num_replicas": replicas,
        "health_check_period_s": 0.5,
        "graceful_shutdown_timeout_s": 20,
        "ray_actor_options": {"num_cpus": 0.1},
    }
    return {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "counting", "model_source": "/counting"},
                "engine_kwargs": {
                    "watchdog_timeout_s": 1.0,
                    "max_model_len": 4096,
                    "tp_size": ranks,
                    "attn_dp_size": ranks,
                    **engine,
                },
                "placement_group_config": {"bundle_per_worker": {"CPU": 0.5}},
                "deployment_config": options,
            }
        ],
        "log_file": str(LOG),
        **(app or {}),
    }


def build(args: dict[str, Any]) -> Application:
    """The `import_path` of the applications of `deploy_config`."""
    return build_app(parse(args), FACTORY)


def deploy_config(args: dict[str, Any], *deployments: dict[str, Any]) -> None:
    """What `serve deploy` does with a config of these arguments, and these options of deployments laid over them."""
    application = {
        "name": "counting",
        "route_prefix": "/",
        "import_path": "tests.api.apps:build",
        "args": args,
        "deployments": list(deployments),
    }
    client: Any = serve.context._get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def settled(within_s: float = 60.0) -> None:
    """Wait until Serve has carried out what it was told last."""
    time.sleep(0.5)
    until = time.monotonic() + within_s
    while serve.status().applications["counting"].status != "RUNNING":
        assert time.monotonic() < until, serve.status()
        time.sleep(0.1)


@contextmanager
def serving(args: dict[str, Any], *deployments: dict[str, Any]) -> Iterator[str]:
    """The URL of an application; nothing of it is left afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    try:
        deploy_config(args, *deployments)
        settled()
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
    assert eventually(lambda: not shards()), f"left behind: {shards()}"


def shards() -> list[str]:
    return [entry["name"] for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == "aerie"]


def eventually(condition: Callable[[], Any], within_s: float = 15.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.1)
    return False


def processes(word: str) -> list[int]:
    """The ids of the processes that this one started whose command line has a word in it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def kill(word: str, number: int = signal.SIGKILL) -> list[int]:
    """Send a signal to the processes of Ray's own name for them; there must be some."""
    found = processes(word)
    assert found, f"no process {word!r}"
    for pid in found:
        os.kill(pid, number)
    return found


def health(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code
    except httpx.TransportError:  # while Serve has no replica at all, its proxy lets requests wait
        return 0


def total(page: str, name: str) -> float:
    """The sum of a series over its labels on a Prometheus page."""
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    status: int = 0
    error: str = ""
    began: float = 0.0
    seconds: float = 0.0
    longest_pause_s: float = 0.0

    def whole(self, count: int) -> bool:
        return self.status == 200 and not self.error and len(self.tokens) == count


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], max_tokens: int, **more: Any) -> Answer:
    """One completion, streamed or not; errors of every kind are noted, none is raised."""
    body = {"model": "counting", "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **more}
    answer = Answer(began=time.monotonic())
    last = answer.began
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            answer.status = response.status_code
            async for line in response.aiter_lines():
                text = line.removeprefix("data: ")
                if text.startswith("{"):
                    data = json.loads(text)
                    if "error" in data:
                        answer.error = data["error"]["message"]
                    else:
                        answer.tokens += data["choices"][0].get("token_ids") or []
                    now = time.monotonic()
                    answer.longest_pause_s, last = max(answer.longest_pause_s, now - last), now
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.monotonic() - answer.began
    return answer


def ask_all(url: str, prompts: list[list[int]], max_tokens: int, **more: Any) -> list[Answer]:
    """Streams of many prompts at once."""

    async def whole() -> list[Answer]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as client:
            return await asyncio.gather(*(ask(client, url, p, max_tokens, stream=True, **more) for p in prompts))

    return asyncio.run(whole())
