"""The resources that a gang reserves depend on the cluster's GPUs. Ray declares two GPUs, which need not exist."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SCRIPT = """
import asyncio, json
from cluster.actors.local_ray import LocalRay
from cluster.actors.placement import cluster_gpus, reserve
from cluster.api.serve.settings import parse

async def place(**engine_kwargs):
    loading = {"model_id": "m", "model_source": "/models/m"}
    llm = parse({"llm_configs": [{"model_loading_config": loading, "engine_kwargs": engine_kwargs}]}).llm
    device, reason = llm.device(cluster_gpus())
    placement = await reserve(llm.layout(device), "test")
    options = [placement.actor_options(rank) for rank in range(placement.layout.world)]
    placement.remove()
    return device, reason, [(o["num_cpus"], o["num_gpus"]) for o in options]

ray = LocalRay(num_cpus=3, num_gpus=2, object_store_mib=80)
ray.start()
try:
    cases = [{"tp_size": 2}, {"device": "cuda"}, {"device": "cpu", "tp_size": 2}]
    print(json.dumps([asyncio.run(place(**engine_kwargs)) for engine_kwargs in cases]))
finally:
    ray.stop()
"""


def test_cluster_with_gpus_reserves_a_gpu_for_each_rank() -> None:
    completed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    auto, cuda, cpu = json.loads(completed.stdout.splitlines()[-1])
    assert auto == ["cuda", "device: auto; the cluster has 2 GPU(s)", [[1, 1], [1, 1]]]
    assert cuda == ["cuda", "device: cuda; the cluster has 2 GPU(s)", [[1, 1]]]
    assert cpu == ["cpu", "device: cpu", [[1, 0], [1, 0]]]
