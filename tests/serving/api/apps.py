"""The whole application on its own Ray Serve, over counting engines. Helpers deploy it, call it and kill processes."""

import asyncio
import json
import os
import re
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

import psutil  # isort: skip  # Ray's own copy, importable only after ray

from cluster.api.serve.application import build_app
from cluster.api.serve.settings import parse

FACTORY = "tests.serving.actors.counting_engine:build"
LOGS = tempfile.TemporaryDirectory(prefix="aerie-logs-")  # logs of all applications; deleted when the process ends
LOG = Path(LOGS.name) / "counting.log"


def app_args(
    replicas: int = 1, ranks: int = 1, app: dict[str, Any] | None = None, **engine_kwargs: Any
) -> dict[str, Any]:
    """The Serve arguments of an application of counting engines. `engine_kwargs` and `app` add or replace settings."""
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
                    **engine_kwargs,
                },
                "placement_group_config": {"bundle_per_worker": {"CPU": 0.5}},
                "deployment_config": options,
            }
        ],
        "log_file": str(LOG),
        **(app or {}),
    }


def build(args: dict[str, Any]) -> Application:
    """Build the application. The config of `deploy_config` names this function as its `import_path`."""
    return build_app(parse(args), FACTORY)


def deploy_config(args: dict[str, Any], *deployments: dict[str, Any]) -> None:
    """Deploy the application as `serve deploy` does. `deployments` hold options that override those of a deployment."""
    application = {
        "name": "counting",
        "route_prefix": "/",
        "import_path": "tests.serving.api.apps:build",
        "args": args,
        "deployments": list(deployments),
    }
    client: Any = serve.context._get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def wait_until_running(within_s: float = 60.0) -> None:
    """Wait until Serve has finished the last deploy and reports the application as RUNNING."""
    time.sleep(0.5)
    deadline = time.monotonic() + within_s
    while serve.status().applications["counting"].status != "RUNNING":
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.1)


@contextmanager
def serving(args: dict[str, Any], *deployments: dict[str, Any]) -> Iterator[str]:
    """Deploy an application and yield its URL. At the end Serve shuts down, and no shard actor may be left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    try:
        deploy_config(args, *deployments)
        wait_until_running()
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
    assert eventually(lambda: not shard_actor_names()), f"shard actors after the shutdown: {shard_actor_names()}"


def shard_actor_names() -> list[str]:
    return [entry["name"] for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == "aerie"]


def eventually(condition: Callable[[], Any], within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def descendant_pids(class_name: str) -> list[int]:
    """Return the process ids of this process's descendants in which an actor of class `class_name` runs.

    Ray writes the class of an actor into the command line of its process, as `ray::CLASS`. While the actor runs a
    method, a dot and the name of the method follow. Serve puts the names of the application and of the deployment into
    the class name of a replica.
    """
    title = re.compile(rf"ray::{re.escape(class_name)}(?![\w-])")
    pids = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title.search(" ".join(process.cmdline())):
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def kill(class_name: str, signal_number: int = signal.SIGKILL) -> list[int]:
    """Send a signal to all processes that `descendant_pids` finds, at least one, and return their ids."""
    pids = descendant_pids(class_name)
    assert pids, f"no process has {class_name!r} in its command line"
    for pid in pids:
        os.kill(pid, signal_number)
    return pids


def health_status(url: str) -> int:
    """The status of /health, or 0 when no answer comes within 2 s."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code
    except httpx.TransportError:  # Serve's proxy holds requests while there is no replica
        return 0


def metric_sum(page: str, name: str) -> float:
    """The sum of a metric's values over all its label sets on a Prometheus page."""
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))


@dataclass
class Answer:
    """The outcome of one request: tokens, status, error and times."""

    tokens: list[int] = field(default_factory=list)
    status: int = 0
    error: str = ""
    start_time: float = 0.0
    seconds: float = 0.0
    longest_pause_s: float = 0.0

    def is_complete(self, count: int) -> bool:
        return self.status == 200 and not self.error and len(self.tokens) == count


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], max_tokens: int, **fields: Any) -> Answer:
    """Send one completion request, streamed or not. The answer records HTTP errors of every kind; none is raised."""
    body = {"model": "counting", "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **fields}
    answer = Answer(start_time=time.monotonic())
    last_event_time = answer.start_time
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
                    answer.longest_pause_s, last_event_time = max(answer.longest_pause_s, now - last_event_time), now
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.monotonic() - answer.start_time
    return answer


def ask_all(url: str, prompts: list[list[int]], max_tokens: int, **fields: Any) -> list[Answer]:
    """Stream one completion per prompt, all at the same time. The answers are in the order of the prompts."""

    async def ask_every_prompt() -> list[Answer]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as client:
            return await asyncio.gather(*(ask(client, url, p, max_tokens, stream=True, **fields) for p in prompts))

    return asyncio.run(ask_every_prompt())
