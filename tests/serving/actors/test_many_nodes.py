"""Ranks over several nodes: the ranks of a node are neighbours, the replica's node is first, and a node may die."""

from itertools import groupby
from typing import Any

import pytest

from tests.serving.actors.apart import run_script

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def script_result() -> Any:
    """The result of the script `many_nodes`. The nodes of a gang are a string of letters in rank order. The replica is
    on node b.
    """
    return run_script("tests.serving.actors.many_nodes", 240)


@pytest.mark.parametrize(
    ("strategy", "nodes_used"),
    [("pack", {1}), ("pack over two", {2}), ("strict pack", {1}), ("spread", {2, 3}), ("strict spread", {3})],
)
def test_ranks_are_grouped_by_node_with_the_replica_node_first(
    script_result: Any, strategy: str, nodes_used: set[int]
) -> None:
    nodes = script_result[strategy]
    rank_counts = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    assert len({node for node, _ in rank_counts}) == len(rank_counts), (
        f"the ranks of a node are not neighbours: {nodes}"
    )
    assert len(rank_counts) in nodes_used
    sizes = [count for node, count in rank_counts if node != "b"]
    assert sizes == sorted(sizes, reverse=True), "after the replica's node, a node with more ranks comes first"
    assert "b" not in nodes or nodes[0] == "b", nodes


def test_gang_over_two_nodes_survives_the_loss_of_a_node(script_result: Any) -> None:
    assert script_result["gang"][0] == "b" and script_result["gang"][1] == script_result["lost node"] != "b"
    assert script_result["interfaces"] == ["lo", "lo"]  # the nodes' address is 127.0.0.1
    assert script_result["tokens"] == list(range(2, 602))
    assert script_result["gang after"][0] == "b" and script_result["gang after"][1] not in (
        "b",
        script_result["lost node"],
    )
    (loss,) = script_result["restarts"]
    assert loss["rank"] == 1 and loss["kind"] in ("died", "frozen")  # without its raylet, a rank may take long to die
    assert loss["restored_s"] < 60
    assert script_result["left"] == []
