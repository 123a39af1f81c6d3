"""A Ray cluster of two nodes that say they have eight GPUs each, in a process of its own; prints what it found as JSON.

`python -m tests.actors.declared_gpus` is what test_declared_gpus.py runs. The layout that it deploys, by `serve
deploy`, is the text of the comments in deploy/serve.yaml. What a machine without CUDA cannot do is replaced: models are
the demo pair, and ranks count instead of computing.
"""

import asyncio
import copy
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve
from ray.serve import Application
from ray.util.placement_group import placement_group_table

from cluster.actors.cluster_capacity import Layout
from cluster.actors.placement import PlacementError, cluster_gpus, reserve
from cluster.api.serve.application import build_app
from cluster.api.serve.settings import parse
from cluster.config import EngineConfig
from cluster.status import RankInfo
from tests.actors.apart import CHECKOUT, nodes, say
from tests.actors.counting_engine import CountingEngine, Link, PeerLostError, Rendezvous, Store, open_store
from tests.api.layouts import commented
from tests.info import rank_info

__all__ = ["PeerLostError", "Rendezvous", "make_engine", "open_store"]

DEMO = CHECKOUT / "models" / "demo"
SOON_S = 60.0


class Placed(CountingEngine):
    """Says which GPUs CUDA would see in its process, as its kernels."""

    def info(self) -> RankInfo:
        return rank_info(
            self.config.page_size,
            speculative_num_draft_tokens=4,
            rank=self.rank,
            device=self.config.device,
            kernels=os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        )


def make_engine(
    config: EngineConfig, rank: int = 0, rendezvous: Rendezvous | None = None, store: Store | None = None
) -> CountingEngine:
    link = None if rendezvous is None else Link(rank, config.tp_size, rendezvous, store)
    return Placed(config, rank, link)


def build(args: dict[str, Any]) -> Application:
    """The `import_path` of applications whose ranks count."""
    return build_app(parse(args), "tests.actors.declared_gpus:make_engine")


def section() -> dict[str, Any]:
    """The arguments of the layout for one host with eight GPUs, with the demo pair as its models."""
    args: dict[str, Any] = copy.deepcopy(commented()[0]["args"])
    (llm,) = args["llm_configs"]
    llm["model_loading_config"]["model_source"] = str(DEMO / "target")
    llm["engine_kwargs"]["speculative_draft_model_path"] = str(DEMO / "draft")
    return args


def changed(llm: dict[str, Any], engine: dict[str, Any], **deployment: Any) -> dict[str, Any]:
    """The layout with other settings; those with None are left out."""
    args = section()
    (given,) = args["llm_configs"]
    options = {"max_constructor_retry_count": 1, "ray_actor_options": {"num_cpus": 0.1}, **deployment}
    given["deployment_config"] = {**given["deployment_config"], **options}
    given["engine_kwargs"] = {**given["engine_kwargs"], **engine}
    given.update(llm)
    return {**args, "llm_configs": [{key: value for key, value in given.items() if value is not None}]}


def deploy(folder: Path, dashboard: str, port: int, apps: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """`serve deploy` applications by name: what builds each, and its arguments."""
    written = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": name,
                "route_prefix": f"/{name}",
                "import_path": path,
                "args": {**args, "log_file": str(folder / "log")},
            }
            for name, (path, args) in apps.items()
        ],
    }
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(written))
    command = [str(Path(sys.executable).with_name("serve")), "deploy", str(file), "--address", dashboard]
    subprocess.run(command, check=True, timeout=SOON_S, capture_output=True)


def settled(names: list[str]) -> dict[str, dict[str, Any]]:
    """The status of each application once Serve has started it, or has given it up; and when that was."""
    began, found = time.monotonic(), dict[str, dict[str, Any]]()
    while len(found) < len(names):
        assert time.monotonic() - began < 4 * SOON_S, serve.status()
        for name, app in serve.status().applications.items():
            state = str(app.status.value if hasattr(app.status, "value") else app.status)
            if name not in found and state in ("RUNNING", "DEPLOY_FAILED"):
                said = " ".join([app.message, *(one.message for one in app.deployments.values())])
                found[name] = {"state": state, "said": said, "after_s": time.monotonic() - began}
        time.sleep(0.1)
    return found


def groups(name: str) -> list[dict[str, Any]]:
    """The placement groups of an application that are there."""
    return [
        {
            "strategy": group["strategy"],
            "bundles": list(group["bundles"].values()),
            "nodes": sorted(set(group["bundles_to_node_id"].values())),
        }
        for group in placement_group_table().values()
        if group["name"].startswith(f"{name}/") and group["state"] == "CREATED"
    ]


def refused(layout: Layout, name: str = "other/deployment/gang", **waits: float) -> dict[str, Any]:
    """What is said of a layout that has no room, and after how long."""
    began = time.monotonic()
    try:
        asyncio.run(reserve(replace(layout, **{"join_wait_s": 0.5, "busy_wait_s": 0.5, **waits}), name)).remove()
    except PlacementError as error:
        return {"said": str(error), "after_s": time.monotonic() - began}
    return {"said": "", "after_s": time.monotonic() - began}


def layout(llm: dict[str, Any], engine: dict[str, Any], **deployment: Any) -> Layout:
    return parse(changed(llm, engine, **deployment)).llm.layout("cuda")


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    port, dashboard = unused_port(), unused_port()
    small = {"num_cpus": 64, "num_gpus": 8}
    head = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": dashboard}
    hopper, ada = ({"resources": {f"accelerator_type:{kind}": 1}} for kind in ("H100", "L4"))
    with nodes({**small, **head, **hopper}, {"ada": {**small, **ada}}) as started:
        kinds = {
            node["NodeID"]: next(name for name in node["Resources"] if name.startswith("accelerator_type:"))
            for node in ray.nodes()
        }
        counting, real = "tests.actors.declared_gpus:build", "cluster.api.app:build_openai_app"
        two = {"tp_size": 2, "attn_dp_size": 2, "device": "auto"}
        apps = {
            "section": (counting, section()),
            "pair": (counting, changed({"accelerator_type": "L4"}, two, num_replicas=2)),
            "absent": (counting, changed({"accelerator_type": "A100"}, {})),
            "torch": (real, changed({"accelerator_type": "L4"}, {"tp_size": 1, "attn_dp_size": 1})),
        }
        deploy(started.folder, f"http://127.0.0.1:{dashboard}", port, apps)
        found: dict[str, Any] = {"apps": settled([*apps]), "kinds": kinds}
        found["groups"] = {name: groups(name) for name in apps}
        found["info"] = {
            name: httpx.get(f"http://127.0.0.1:{port}/{name}/server_info", timeout=SOON_S).json()
            for name in ("section", "pair")
        }
        strict, any_node = (
            {"bundle_per_worker": {"GPU": 1, "CPU": 4}, "strategy": "STRICT_PACK"},
            {"accelerator_type": None},
        )
        found["refused"] = {
            "on one node": refused(layout({**any_node, "placement_group_config": strict}, {"tp_size": 16})),
            "too many": refused(layout({**any_node, "placement_group_config": None}, {"tp_size": 32})),
            "two gangs": refused(layout({}, {}, num_replicas=2)),
            "another's": refused(layout({}, {})),
            "its own": refused(layout({}, {}), "section/aerie-my-model/next", redeploy_wait_s=0.5),
        }
        auto = changed({"accelerator_type": None, "placement_group_config": None}, {"device": "auto"})
        found["auto"] = parse(auto).llm.device(cluster_gpus())
        say(found)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
