"""A gang over nodes that have one or two GPUs.

An attention group of two ranks is on one node where a node has two GPUs. The replica's node comes first. Each rank sees
only the GPU that Ray reserves for it. All ranks connect to the address of rank 0's node.
"""

from typing import Any

import pytest

from tests.serving.actors.apart import run_script

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def script_result() -> Any:
    """The result of the script `uneven_nodes`, by the name of the replica's node."""
    return run_script("tests.serving.actors.uneven_nodes", 280)


@pytest.mark.parametrize(("replica", "accepted_orders"), [("b", {"bbccad", "bbccda"}), ("a", {"adbbcc", "adccbb"})])
def test_attention_groups_stay_on_a_single_node_where_possible(
    script_result: Any, replica: str, accepted_orders: set[str]
) -> None:
    gang_facts = script_result[replica]
    assert gang_facts["nodes"] in accepted_orders
    assert gang_facts["left"] == []


@pytest.mark.parametrize("replica", ["b", "a"])
def test_each_rank_sees_its_own_gpu_and_connects_to_rank_0(script_result: Any, replica: str) -> None:
    gang_facts = script_result[replica]
    gpus_of_node: dict[str, list[str]] = {}
    for node, gpus_and_host in zip(gang_facts["nodes"], gang_facts["said"], strict=True):
        gpus, rendezvous_host = gpus_and_host.split(" at ")
        gpus_of_node.setdefault(node, []).append(gpus)
        assert rendezvous_host == gang_facts["address"]
    assert (
        "".join(f"{node}{gpu}" for node in sorted(gpus_of_node) for gpu in sorted(gpus_of_node[node])) == "a0b0b1c0c1d0"
    )
    assert gang_facts["tokens"] == list(range(2, 8))
