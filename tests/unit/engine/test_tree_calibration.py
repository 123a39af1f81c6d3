"""The times of trees that are not measured follow from those that are."""

import pytest

from cluster.config.tree_shape import TreeShape, tiers
from cluster.engine.tree_calibration import completed

SHAPES = {
    "chain": tiers(TreeShape(num_steps=5, topk=1, num_draft_tokens=6), share_rows=True),
    "tree": tiers(TreeShape(num_steps=3, topk=4, num_draft_tokens=12), share_rows=True),
    "shallow": tiers(TreeShape(num_steps=1, topk=1, num_draft_tokens=2), share_rows=True),
}


def true_us(shape: TreeShape) -> int:
    """Return a time that grows with the levels that run the draft, and with the rows of the target."""
    return 900 + 100 * max(0, shape.num_steps - 1) + 70 * shape.num_draft_tokens


@pytest.mark.parametrize("name", SHAPES)
def test_times_of_smaller_trees_are_those_of_fewer_rows(name: str) -> None:
    shapes = SHAPES[name]
    deepest = shapes[-1].num_steps
    measured = {t: true_us(s) for t, s in enumerate(shapes) if s.num_steps == deepest or not s.selects_nodes}
    assert completed(measured, shapes) == [true_us(shape) for shape in shapes]


def test_noise_never_makes_a_smaller_tree_slower_nor_faster_than_plain_decoding() -> None:
    shapes = SHAPES["chain"]
    measured = {t: true_us(s) for t, s in enumerate(shapes) if s.num_steps == 5 or not s.selects_nodes}
    measured[shapes.index(next(s for s in shapes if s.num_steps == 5))] = 100  # a clock that stood still
    times = completed(measured, shapes)
    assert min(times) == 100 and times[0] == 100, "a part of a tree never takes longer than the tree"
    measured = dict.fromkeys(measured, 500) | {0: 480}
    assert set(completed(measured, shapes)[1:]) == {500}
