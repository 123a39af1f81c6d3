"""Start a Ray cluster of two nodes that declare eight GPUs each, deploy applications on it, and print a JSON result.

test_declared_gpus.py runs this script, which deploys, by `serve deploy`, the layout in
the comments of deploy/serve.yaml. It replaces what a machine without CUDA cannot run: the models are the demo pair, and
the ranks are counting engines.
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
from tests.serving.actors.apart import CHECKOUT, print_result, start_ray_cluster
from tests.serving.actors.counting_engine import CountingEngine, Link, PeerLostError, Rendezvous, Store, open_store
from tests.serving.api.layouts import commented_layouts
from tests.support.rank_info import rank_info

__all__ = ["PeerLostError", "Rendezvous", "make_engine", "open_store"]

DEMO = CHECKOUT / "models" / "demo"
SOON_S = 60.0


class GpuReportingEngine(CountingEngine):
    """A counting engine whose `RankInfo.kernels` holds the GPUs that CUDA would see in its process."""

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
    return GpuReportingEngine(config, rank, link)


def build(args: dict[str, Any]) -> Application:
    """Build an application whose ranks are counting engines. Serve imports this function by its `import_path`."""
    return build_app(parse(args), "tests.serving.actors.declared_gpus:make_engine")


def eight_gpu_args() -> dict[str, Any]:
    """The application's arguments in the layout for one host with eight GPUs, with the demo pair as the models."""
    args: dict[str, Any] = copy.deepcopy(commented_layouts()[0]["args"])
    (llm_config,) = args["llm_configs"]
    llm_config["model_loading_config"]["model_source"] = str(DEMO / "target")
    llm_config["engine_kwargs"]["speculative_draft_model_path"] = str(DEMO / "draft")
    return args


def changed_args(llm_settings: dict[str, Any], engine_settings: dict[str, Any], **deployment: Any) -> dict[str, Any]:
    """The arguments of `eight_gpu_args` with changed settings of the LLM, its engine and its deployment.

    An LLM setting of None is removed from the arguments.
    """
    args = eight_gpu_args()
    (llm_config,) = args["llm_configs"]
    options = {"max_constructor_retry_count": 1, "ray_actor_options": {"num_cpus": 0.1}, **deployment}
    llm_config["deployment_config"] = {**llm_config["deployment_config"], **options}
    llm_config["engine_kwargs"] = {**llm_config["engine_kwargs"], **engine_settings}
    llm_config.update(llm_settings)
    return {**args, "llm_configs": [{key: value for key, value in llm_config.items() if value is not None}]}


def deploy(folder: Path, dashboard: str, port: int, apps: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Run `serve deploy` for applications. `apps` maps an application's name to its import path and its arguments."""
    serve_config = {
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
    config_file = folder / "serve.yaml"
    config_file.write_text(yaml.safe_dump(serve_config))
    command = [str(Path(sys.executable).with_name("serve")), "deploy", str(config_file), "--address", dashboard]
    subprocess.run(command, check=True, timeout=SOON_S, capture_output=True)


def wait_for_applications(app_names: list[str]) -> dict[str, dict[str, Any]]:
    """Wait until each application runs or has failed to deploy, and return its outcome.

    An outcome has `state`, Serve's status; `messages`, Serve's messages; and `after_s`, the seconds that this took.
    """
    started_at, outcome_of_app = time.monotonic(), dict[str, dict[str, Any]]()
    while len(outcome_of_app) < len(app_names):
        assert time.monotonic() - started_at < 4 * SOON_S, serve.status()
        for name, app in serve.status().applications.items():
            state = str(app.status.value if hasattr(app.status, "value") else app.status)
            if name not in outcome_of_app and state in ("RUNNING", "DEPLOY_FAILED"):
                messages = " ".join([app.message, *(deployment.message for deployment in app.deployments.values())])
                outcome_of_app[name] = {"state": state, "said": messages, "after_s": time.monotonic() - started_at}
        time.sleep(0.1)
    return outcome_of_app


def placement_groups_of(name: str) -> list[dict[str, Any]]:
    """The created placement groups of an application: strategy, bundles and node ids of each."""
    return [
        {
            "strategy": group["strategy"],
            "bundles": list(group["bundles"].values()),
            "nodes": sorted(set(group["bundles_to_node_id"].values())),
        }
        for group in placement_group_table().values()
        if group["name"].startswith(f"{name}/") and group["state"] == "CREATED"
    ]


def refusal_of(requested_layout: Layout, name: str = "other/deployment/gang", **wait_settings: float) -> dict[str, Any]:
    """Try to reserve a layout that does not fit. Returns the error's message as `said` and its seconds as `after_s`."""
    started_at = time.monotonic()
    try:
        asyncio.run(
            reserve(replace(requested_layout, **{"join_wait_s": 0.5, "busy_wait_s": 0.5, **wait_settings}), name)
        ).remove()
    except PlacementError as error:
        return {"said": str(error), "after_s": time.monotonic() - started_at}
    return {"said": "", "after_s": time.monotonic() - started_at}


def layout(llm_settings: dict[str, Any], engine_settings: dict[str, Any], **deployment: Any) -> Layout:
    """The layout on CUDA of the arguments that `changed_args` makes of these settings."""
    return parse(changed_args(llm_settings, engine_settings, **deployment)).llm.layout("cuda")


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    port, dashboard = unused_port(), unused_port()
    node_settings = {"num_cpus": 64, "num_gpus": 8}
    head = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": dashboard}
    hopper, ada = ({"resources": {f"accelerator_type:{kind}": 1}} for kind in ("H100", "L4"))
    with start_ray_cluster({**node_settings, **head, **hopper}, {"ada": {**node_settings, **ada}}) as running_cluster:
        accelerator_of_node = {
            node["NodeID"]: next(name for name in node["Resources"] if name.startswith("accelerator_type:"))
            for node in ray.nodes()
        }
        counting_app, real_app = "tests.serving.actors.declared_gpus:build", "cluster.api.app:build_openai_app"
        two_ranks = {"tp_size": 2, "attn_dp_size": 2, "device": "auto"}
        apps = {
            "section": (counting_app, eight_gpu_args()),
            "pair": (counting_app, changed_args({"accelerator_type": "L4"}, two_ranks, num_replicas=2)),
            "absent": (counting_app, changed_args({"accelerator_type": "A100"}, {})),
            "torch": (real_app, changed_args({"accelerator_type": "L4"}, {"tp_size": 1, "attn_dp_size": 1})),
        }
        deploy(running_cluster.folder, f"http://127.0.0.1:{dashboard}", port, apps)
        result: dict[str, Any] = {"apps": wait_for_applications([*apps]), "kinds": accelerator_of_node}
        result["groups"] = {name: placement_groups_of(name) for name in apps}
        result["info"] = {
            name: httpx.get(f"http://127.0.0.1:{port}/{name}/server_info", timeout=SOON_S).json()
            for name in ("section", "pair")
        }
        strict_pack, any_node = (
            {"bundle_per_worker": {"GPU": 1, "CPU": 4}, "strategy": "STRICT_PACK"},
            {"accelerator_type": None},
        )
        result["refused"] = {
            "on one node": refusal_of(layout({**any_node, "placement_group_config": strict_pack}, {"tp_size": 16})),
            "too many": refusal_of(layout({**any_node, "placement_group_config": None}, {"tp_size": 32})),
            "two gangs": refusal_of(layout({}, {}, num_replicas=2)),
            "another's": refusal_of(layout({}, {})),
            "its own": refusal_of(layout({}, {}), "section/aerie-my-model/next", redeploy_wait_s=0.5),
        }
        auto_args = changed_args({"accelerator_type": None, "placement_group_config": None}, {"device": "auto"})
        result["auto"] = parse(auto_args).llm.device(cluster_gpus())
        print_result(result)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
