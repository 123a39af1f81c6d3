"""Ray clusters of several nodes on this machine, each in a process of its own that prints what it found."""

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

CHECKOUT = Path(__file__).resolve().parents[2]


def found_by(module: str, seconds: float) -> Any:
    """What `python -m module` said by `say`."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=seconds)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


def say(found: Any) -> None:
    """To the process that waits in `found_by`."""
    print("FOUND " + json.dumps(found))


@dataclass(frozen=True)
class Nodes:
    """A running cluster: the folder of its files, and its nodes besides the head, by the names that tests give them."""

    cluster: Cluster
    folder: Path
    added: dict[str, Any]

    def called(self, node_ids: list[str]) -> str:
        """The names of nodes, one after the other."""
        names = {node.node_id: name for name, node in self.added.items()}
        return "".join(names[node_id] for node_id in node_ids)


@contextmanager
def nodes(head: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> Iterator[Nodes]:
    """A cluster of a head and named nodes, each with Ray's settings for one, that this process is connected to."""
    folder = Path(tempfile.mkdtemp(prefix="aerie-nodes-"))
    prepare_environment(folder)
    small = {"object_store_memory": 80 * MIB}
    cluster = Cluster(initialize_head=True, head_node_args={**small, **head})
    try:
        added = {name: cluster.add_node(**small, **settings) for name, settings in others.items()}
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield Nodes(cluster, folder, added)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
