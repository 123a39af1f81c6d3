"""A gang over nodes that have one GPU or two: its attention groups are whole where a node has both, the replica's node
comes first, each rank sees the GPU that Ray gave it, and all meet at the address of rank 0's node.
"""

from typing import Any

import pytest

from tests.actors.apart import found_by

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> Any:
    """What the cluster of `uneven_nodes` showed, by the node of the replica."""
    return found_by("tests.actors.uneven_nodes", 280)


@pytest.mark.parametrize(("replica", "orders"), [("b", {"bbccad", "bbccda"}), ("a", {"adbbcc", "adccbb"})])
def test_attention_groups_stay_on_a_single_node_where_possible(found: Any, replica: str, orders: set[str]) -> None:
    one = found[replica]
    assert one["nodes"] in orders
    assert one["left"] == []


@pytest.mark.parametrize("replica", ["b", "a"])
def test_each_rank_sees_its_own_gpu_and_connects_to_rank_0(found: Any, replica: str) -> None:
    one = found[replica]
    seen: dict[str, list[str]] = {}
    for node, said in zip(one["nodes"], one["said"], strict=True):
        gpus, met = said.split(" at ")
        seen.setdefault(node, []).append(gpus)
        assert met == one["address"]
    assert "".join(f"{node}{gpu}" for node in sorted(seen) for gpu in sorted(seen[node])) == "a0b0b1c0c1d0"
    assert one["tokens"] == list(range(2, 8))
