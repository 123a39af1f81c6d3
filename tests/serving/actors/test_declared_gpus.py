"""`serve deploy` of deploy/serve.yaml's GPU layout on nodes that declare GPUs.

Ray places a gang as the layout says. A gang that does not fit is refused soon, and the message names the setting to
change.
"""

from typing import Any

import pytest

from tests.serving.actors.apart import run_script

pytestmark = [pytest.mark.ray, pytest.mark.slow]  # takes a minute: it starts a cluster that declares GPUs

EIGHT_GPUS = [str(gpu) for gpu in range(8)]


@pytest.fixture(scope="module")
def script_result() -> Any:
    """The result of the script `declared_gpus`. See its `main` for the keys."""
    return run_script("tests.serving.actors.declared_gpus", 290)


def test_serve_yaml_gpu_layout_is_placed_on_a_matching_node(script_result: Any) -> None:
    assert script_result["apps"]["section"]["state"] == "RUNNING", script_result["apps"]["section"]
    (group,) = script_result["groups"]["section"]
    assert group["strategy"] == "STRICT_PACK"
    assert group["bundles"] == [{"GPU": 1, "CPU": 4, "accelerator_type:H100": 0.001}] * 8
    (node,) = group["nodes"]
    assert script_result["kinds"][node] == "accelerator_type:H100"
    info = script_result["info"]["section"]
    assert info["device"] == "cuda" and info["device_chosen_by"] == "device: cuda; the cluster has 16 GPU(s)"
    assert [rank["node"] for rank in info["ranks"]] == [node] * 8


def test_each_rank_sees_only_the_gpu_that_ray_reserves(script_result: Any) -> None:
    info = script_result["info"]["section"]
    gpus_by_rank = [gpu for rank in info["ranks"] for gpu in rank["gpus"]]
    assert sorted(gpus_by_rank) == EIGHT_GPUS and all(len(rank["gpus"]) == 1 for rank in info["ranks"])
    assert info["kernels"] == gpus_by_rank[0], "CUDA_VISIBLE_DEVICES of rank 0"


def test_two_gangs_share_a_node_and_device_auto_selects_cuda(script_result: Any) -> None:
    assert script_result["apps"]["pair"]["state"] == "RUNNING", script_result["apps"]["pair"]
    groups = script_result["groups"]["pair"]
    assert len(groups) == 2 and groups[0]["nodes"] == groups[1]["nodes"]
    assert script_result["kinds"][groups[0]["nodes"][0]] == "accelerator_type:L4"
    info = script_result["info"]["pair"]
    assert info["device"] == "cuda"
    assert info["device_chosen_by"] == "device: auto; placement_group_config reserves GPUs"
    assert script_result["auto"] == ["cuda", "device: auto; the cluster has 16 GPU(s)"]


def test_deployment_fails_for_an_accelerator_type_that_no_node_has(script_result: Any) -> None:
    app = script_result["apps"]["absent"]
    assert app["state"] == "DEPLOY_FAILED"
    assert "accelerator_type A100: no node of the cluster has it, nodes have H100, L4" in app["said"]
    assert "placement_group_config.wait_s" in app["said"]
    assert script_result["groups"]["absent"] == []


def test_rank_without_cuda_fails_with_a_clear_message(script_result: Any) -> None:
    app = script_result["apps"]["torch"]
    assert app["state"] == "DEPLOY_FAILED"
    assert "sees no CUDA device (CUDA_VISIBLE_DEVICES is" in app["said"]
    assert "install a CUDA build of torch, or set device to cpu" in app["said"]
    assert script_result["groups"]["torch"] == [], "the failed gang still has a placement group"


@pytest.mark.parametrize(
    ("case", "expected_parts"),
    [
        (
            "on one node",
            ["placement_group_config.strategy STRICT_PACK: 16", "set strategy to PACK, or lower tp_size to 8"],
        ),
        ("too many", ["tp_size 32", "GPU 32 of 16", "lower tp_size to 16"]),
        ("two gangs", ["deployment_config.num_replicas: 2 gangs of 8", "lower num_replicas"]),
        ("another's", ["GPU: needs 8, free", "held by", "section/", "{GPU: 8}", "end what holds them"]),
        ("its own", ["GPU: needs 8, free", "held by", "section/"]),
    ],
)
def test_gang_that_does_not_fit_is_refused_with_field_and_remedy(
    script_result: Any, case: str, expected_parts: list[str]
) -> None:
    message = script_result["refused"][case]["said"]
    assert all(part in message for part in expected_parts), message
