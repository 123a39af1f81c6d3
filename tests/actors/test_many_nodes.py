"""Ranks over several nodes: those of a node are neighbours, the replica's node is first, and a node may die."""

from itertools import groupby
from typing import Any

import pytest

from tests.actors.apart import found_by

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> Any:
    """What the cluster of `many_nodes` showed: nodes are letters in rank order, and the replica is on b."""
    return found_by("tests.actors.many_nodes", 240)


@pytest.mark.parametrize(
    ("strategy", "nodes_used"),
    [("pack", {1}), ("pack over two", {2}), ("strict pack", {1}), ("spread", {2, 3}), ("strict spread", {3})],
)
def test_ranks_are_grouped_by_node_with_the_replica_node_first(found: Any, strategy: str, nodes_used: set[int]) -> None:
    nodes = found[strategy]
    groups = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    assert len({node for node, _ in groups}) == len(groups), f"a node's ranks are apart: {nodes}"
    assert len(groups) in nodes_used
    sizes = [count for node, count in groups if node != "b"]
    assert sizes == sorted(sizes, reverse=True), "the nodes after the replica's go by how many ranks they have"
    assert "b" not in nodes or nodes[0] == "b", nodes


def test_gang_over_two_nodes_survives_the_loss_of_a_node(found: Any) -> None:
    assert found["gang"][0] == "b" and found["gang"][1] == found["lost node"] != "b"
    assert found["interfaces"] == ["lo", "lo"]  # the nodes' address is 127.0.0.1
    assert found["tokens"] == list(range(2, 602))
    assert found["gang after"][0] == "b" and found["gang after"][1] not in ("b", found["lost node"])
    (loss,) = found["restarts"]
    assert loss["rank"] == 1 and loss["kind"] in ("died", "frozen")  # its last moments without a raylet may be long
    assert loss["restored_s"] < 60
    assert found["left"] == []
