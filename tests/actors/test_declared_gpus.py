"""deploy/serve.yaml's layout for GPUs, deployed by `serve deploy` where nodes say that they have some: it is placed as
it says, and what cannot be placed is refused soon, with the setting to change.
"""

from typing import Any

import pytest

from tests.actors.apart import found_by

pytestmark = [pytest.mark.ray, pytest.mark.slow]  # a minute: it begins clusters of declared GPUs

EIGHT = [str(gpu) for gpu in range(8)]


@pytest.fixture(scope="module")
def found() -> Any:
    """What the cluster of `declared_gpus` showed."""
    return found_by("tests.actors.declared_gpus", 290)


def test_serve_yaml_gpu_layout_is_placed_on_a_matching_node(found: Any) -> None:
    assert found["apps"]["section"]["state"] == "RUNNING", found["apps"]["section"]
    (group,) = found["groups"]["section"]
    assert group["strategy"] == "STRICT_PACK"
    assert group["bundles"] == [{"GPU": 1, "CPU": 4, "accelerator_type:H100": 0.001}] * 8
    (node,) = group["nodes"]
    assert found["kinds"][node] == "accelerator_type:H100"
    info = found["info"]["section"]
    assert info["device"] == "cuda" and info["device_chosen_by"] == "device: cuda; the cluster has 16 GPU(s)"
    assert [rank["node"] for rank in info["ranks"]] == [node] * 8


def test_each_rank_sees_only_the_gpu_that_ray_reserves(found: Any) -> None:
    info = found["info"]["section"]
    given = [gpu for rank in info["ranks"] for gpu in rank["gpus"]]
    assert sorted(given) == EIGHT and all(len(rank["gpus"]) == 1 for rank in info["ranks"])
    assert info["kernels"] == given[0], "CUDA_VISIBLE_DEVICES of rank 0"


def test_two_gangs_share_a_node_and_device_auto_selects_cuda(found: Any) -> None:
    assert found["apps"]["pair"]["state"] == "RUNNING", found["apps"]["pair"]
    groups = found["groups"]["pair"]
    assert len(groups) == 2 and groups[0]["nodes"] == groups[1]["nodes"]
    assert found["kinds"][groups[0]["nodes"][0]] == "accelerator_type:L4"
    info = found["info"]["pair"]
    assert info["device"] == "cuda"
    assert info["device_chosen_by"] == "device: auto; placement_group_config reserves GPUs"
    assert found["auto"] == ["cuda", "device: auto; the cluster has 16 GPU(s)"]


def test_deployment_fails_for_an_accelerator_type_that_no_node_has(found: Any) -> None:
    app = found["apps"]["absent"]
    assert app["state"] == "DEPLOY_FAILED"
    assert "accelerator_type A100: no node of the cluster has it, nodes have H100, L4" in app["said"]
    assert "placement_group_config.wait_s" in app["said"]
    assert found["groups"]["absent"] == []


def test_rank_without_cuda_fails_with_a_clear_message(found: Any) -> None:
    app = found["apps"]["torch"]
    assert app["state"] == "DEPLOY_FAILED"
    assert "sees no CUDA device (CUDA_VISIBLE_DEVICES is" in app["said"]
    assert "install a CUDA build of torch, or set device to cpu" in app["said"]
    assert found["groups"]["torch"] == [], "the gang's bundles are given back"


@pytest.mark.parametrize(
    ("what", "said"),
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
def test_gang_that_does_not_fit_is_refused_with_field_and_remedy(found: Any, what: str, said: list[str]) -> None:
    words = found["refused"][what]["said"]
    assert all(part in words for part in said), words
