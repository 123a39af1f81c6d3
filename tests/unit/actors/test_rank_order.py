"""Which rank gets which bundle: as many attention groups as possible lie on a single node; the replica's
node is first.
"""

import random
from itertools import groupby

import pytest

from cluster.actors.placement import bundle_of_each_rank


def groups_on_one_node(nodes: list[str], group: int) -> int:
    """Return how many groups of `group` ranks lie on a single node. `nodes` holds the node of each rank."""
    return sum(len(set(nodes[at : at + group])) == 1 for at in range(0, len(nodes), group))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_bundle_order_maximizes_attention_groups_on_a_single_node(group: int) -> None:
    draw = random.Random(group)
    for _ in range(200):
        world = group * draw.randint(1, 4)
        node_of = {bundle: draw.choice("abcd") for bundle in range(world)}
        replica_node = draw.choice("abcde")
        order = bundle_of_each_rank(node_of, replica_node, group)
        nodes = [node_of[bundle] for bundle in order]
        assert sorted(order) == list(range(world))
        assert groups_on_one_node(nodes, group) == sum([*node_of.values()].count(node) // group for node in "abcd")
        assert replica_node not in nodes or nodes[0] == replica_node
        if group in (1, world):
            assert len([*groupby(nodes)]) == len(set(nodes)), "the ranks of a node must be contiguous"


def test_bundle_order_does_not_split_a_group_for_the_replica_node() -> None:
    node_of = dict(enumerate("abbccd"))
    assert bundle_of_each_rank(node_of, "a", 2) == (0, 5, 1, 2, 3, 4)
    assert bundle_of_each_rank(node_of, "elsewhere", 2) == (1, 2, 3, 4, 0, 5)


def test_equal_nodes_are_ordered_by_their_first_bundle() -> None:
    """So if the bundles of a config name their nodes, the ranks follow the order of the bundles."""
    assert bundle_of_each_rank(dict(enumerate("zzaa")), "elsewhere", 2) == (0, 1, 2, 3)
