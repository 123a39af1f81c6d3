"""One accepted path says what other trees would have given: only what is known, and nothing wrong."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.config.tree_shape import TreeShape, lookup_tiers, tiers
from cluster.dp_attention.facts import TreeVote
from cluster.dp_attention.tree_choice import OUTLOOK_UNIT
from cluster.dp_attention.tree_times import MeasuredStep, TreeCosts, TreeTimes
from cluster.engine.tree_kinds import ALL_NODES, ROW_YIELD, TreeKinds
from cluster.engine.tree_outlook import TreeOutlook
from cluster.spec.result import AcceptedTree

STEPS, TOKENS = 3, 5
CHAIN = TreeShape(num_steps=STEPS, topk=1, num_draft_tokens=STEPS + 1)
TREE = TreeShape(num_steps=2, topk=2, num_draft_tokens=5)
SHAPES = (*tiers(CHAIN), *lookup_tiers(CHAIN, TOKENS))
SHARED = (*tiers(CHAIN), *lookup_tiers(CHAIN, TOKENS, share_rows=True))


def path_of(shape: TreeShape, right_drafted: int, right_looked_up: int) -> AcceptedTree:
    """Return the accepted path of a tree all of whose nodes are verified. The draft's first `right_drafted` tokens are
    right, and the first `right_looked_up` looked-up tokens.
    """
    drafted = min(right_drafted, shape.drafted_shape.num_steps)
    accepted = max(drafted, min(right_looked_up, shape.lookup_tokens))
    return AcceptedTree(range(1, accepted + 1), drafted, min(right_looked_up, accepted + 1))


def test_tiers_with_looked_up_tokens_are_one_kind() -> None:
    kinds = TreeKinds(SHAPES)
    assert kinds.has_lookups and not TreeKinds(tiers(CHAIN)).has_lookups
    assert kinds.nodes.tolist() == [ALL_NODES] * 2 and kinds.kind_of_tier.tolist() == [0, 0, 0, 0, 1]
    assert kinds.looks_up.tolist() == [False, True] and kinds.drafted_levels.tolist() == [ALL_NODES, 2]
    shared = TreeKinds(SHARED)
    assert shared.nodes.tolist() == [ALL_NODES] * 2 and shared.kind_of_tier.tolist() == [0, 0, 0, 0, 1, 1, 1]
    trees = TreeKinds((*tiers(TREE, share_rows=True), *lookup_tiers(TREE, TOKENS, share_rows=True)))
    assert trees.nodes.tolist() == [2, 3, 4, ALL_NODES, ALL_NODES] and trees.kind_of_tier.tolist()[-3:] == [4, 4, 4]


def test_what_is_tried_is_true() -> None:
    """Where a kind is tried, its hits are those of its tree. An exception are steps that draft fewer levels than a tree
    with looked-up tokens has: the other levels count as missed unless looked-up tokens are right.
    """
    kinds, tried_total = TreeKinds(SHAPES), 0
    for tier, right_drafted, right_looked_up in product(range(len(SHAPES)), range(5), range(TOKENS + 1)):
        path = path_of(SHAPES[tier], right_drafted, right_looked_up)
        tried, hit = kinds.read(np.array([tier]), [path])
        for number, shape in enumerate(SHAPES):
            kind = kinds.kind_of_tier[number]
            reach = len(path_of(shape, right_drafted, right_looked_up).ranks)
            for depth in range(1, shape.num_steps + 1):
                if not tried[0, kind, depth - 1]:
                    continue
                if shape.lookup_tokens and SHAPES[tier].num_steps < shape.lookup_drafted_steps:
                    assert hit[0, kind, depth - 1] <= (depth <= reach)
                    continue
                assert depth <= reach + 1, "the token before was not accepted"
                assert hit[0, kind, depth - 1] == (depth <= reach)
                tried_total += 1
    assert tried_total > 500


@pytest.mark.parametrize(("right_drafted", "right_looked_up"), [(0, 0), (2, 0), (1, 4), (3, 3), (0, 5)])
def test_a_tree_tries_its_own_kind_up_to_the_first_wrong_token(right_drafted: int, right_looked_up: int) -> None:
    kinds = TreeKinds(SHAPES)
    for tier, shape in enumerate(SHAPES[1:], 1):
        path = path_of(shape, right_drafted, right_looked_up)
        tried, _ = kinds.read(np.array([tier]), [path])
        expected = min(len(path.ranks) + 1, shape.num_steps)
        assert int(tried[0, kinds.kind_of_tier[tier]].sum()) == expected


def test_steps_without_trees_show_what_looked_up_tokens_would_have_given() -> None:
    kinds = TreeKinds(SHAPES)
    tried, hit = kinds.read(np.array([0, 0, 0]), [AcceptedTree((), 0, agreeing) for agreeing in (0, 1, 0)])
    assert tried[:, 1].tolist() == [[True, *[False] * 4]] * 3
    assert hit[:, 1, 0].tolist() == [False, True, False]
    assert not tried[:, 0].any()


def test_nodes_that_were_not_verified_count_only_as_far_as_tokens_were_committed() -> None:
    """A step verified some nodes. Of the branch of 5 right tokens it accepted 2, so 3 are known to be right."""
    kinds, path = TreeKinds(SHARED), AcceptedTree((1, 2), 0, 3)
    tried, hit = kinds.read(np.array([4]), [path])
    assert tried[0, 1].tolist() == [True, True, True, False, False] and hit[0, 1].tolist() == tried[0, 1].tolist()


def test_trees_that_verify_some_looked_up_tokens_yield_a_share_of_their_rows() -> None:
    outlook = TreeOutlook(SHARED, 2, TreeTimes(TreeCosts((1,), ((100,),) * len(SHARED))))
    requests: list[Any] = [(None, SimpleNamespace(row=row)) for row in range(2)]
    for _ in range(100):  # all looked-up tokens are right, and no drafted ones
        outlook.observe(
            TreeVote(6), MeasuredStep(6, 2, 100), [6] * 2, [(row, AcceptedTree(range(1, 6), 0, 5)) for row in (0, 1)]
        )
    expected = [tokens / OUTLOOK_UNIT for tokens in outlook.vote(requests, 6).outlook]
    assert expected[6] == pytest.approx(2 * 6, rel=0.05)
    nodes = [shape.num_draft_tokens for shape in SHARED[4:6]]
    assert expected[4:6] == pytest.approx([2 * (1 + ROW_YIELD * (count - 1)) for count in nodes], rel=0.01)
    assert outlook.vote([], 6).outlook == (0,) * 7
