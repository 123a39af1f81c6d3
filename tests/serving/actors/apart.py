"""Ray clusters of several nodes on this machine. A script in its own process starts a cluster and prints a result."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from cluster.actors.local_ray import MIB, prepare_environment

CHECKOUT = Path(__file__).resolve().parents[3]


def run_script(module: str, timeout_s: float) -> Any:
    """Run `python -m module` and return the value that the module passed to `print_result`."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-m", module]
    completed = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    result_lines = [line for line in completed.stdout.splitlines() if line.startswith("FOUND ")]
    assert result_lines, completed.stdout[-3000:] + completed.stderr[-6000:]
    return json.loads(result_lines[-1].removeprefix("FOUND "))


def print_result(result: Any) -> None:
    """Print the result for the test process that waits in `run_script`."""
    print("FOUND " + json.dumps(result))


@dataclass(frozen=True)
class RunningCluster:
    """A running Ray cluster. `folder` holds its files. `node_of_name` maps a test's name for a node to the node; the
    head node is not in it.
    """

    cluster: Cluster
    folder: Path
    node_of_name: dict[str, Any]

    def names_of(self, node_ids: list[str]) -> str:
        """The names of the nodes with these ids, joined to one string."""
        names = {node.node_id: name for name, node in self.node_of_name.items()}
        return "".join(names[node_id] for node_id in node_ids)


@contextmanager
def start_ray_cluster(
    head: Mapping[str, Any], settings_by_name: Mapping[str, Mapping[str, Any]]
) -> Iterator[RunningCluster]:
    """Start a cluster of a head node and named nodes, and connect this process to it.

    `head` and the values of `settings_by_name` are Ray's settings of a node.
    """
    folder = Path(tempfile.mkdtemp(prefix="aerie-nodes-"))
    prepare_environment(folder)
    common_settings = {"object_store_memory": 80 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**common_settings, **head})
    try:
        node_of_name = {
            name: cluster.add_node(**common_settings, **settings) for name, settings in settings_by_name.items()
        }
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield RunningCluster(cluster, folder, node_of_name)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
