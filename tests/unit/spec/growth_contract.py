"""What every `Growth` besides the reference must do: grow the same trees, break ties by order, refuse wrong calls."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.spec import tree as tree_module
from cluster.spec.tree import FLOOR, Candidates, Growth, GrowthFactory, TorchGrowth
from tests.unit.spec.test_tree import assert_valid, naive_tree

ODD_VALUES = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.5, -80.0])
TREES = [(1, 3, 4), (2, 1, 3), (3, 3, 7), (8, 4, 40), (5, 5, 33)]
"""Topk, levels and nodes of the trees to compare."""


def grow_levels(growth: Growth, tokens: list[Tensor], log_probabilities: list[Tensor]) -> list[Tensor]:
    """Add all levels to a tree growth; return what `bests_by_level` returns after each level, one list after the other.

    `tokens` and `log_probabilities` have a tensor for each level: `[R, K]` for the first, `[R, K, K]` for the others.
    """
    bests_by_level = []
    for level in range(1, len(log_probabilities)):
        growth.add(tokens[level], log_probabilities[level])
        bests_by_level += growth.best()
    return bests_by_level


def proposals(
    r: int, k: int, steps: int, dtype: torch.dtype, with_odd_values: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Random tokens and log-probabilities of each level, for `r` requests and topk `k`, without ties.

    With `with_odd_values` about a fifth of the log-probabilities of a level are one of `ODD_VALUES`.
    """
    generator = torch.Generator().manual_seed(100 * r + 10 * k + steps)
    shapes = [(r, k), *[(r, k, k)] * (steps - 1)]
    log_probabilities = [
        torch.randn(shape, generator=generator, dtype=torch.float64).abs().neg() for shape in shapes
    ]  # no ties
    if with_odd_values:
        log_probabilities = [
            torch.where(torch.rand(level_values.shape, generator=generator) < 0.2, ODD_VALUES[level], level_values)
            for level, level_values in enumerate(log_probabilities)
        ]
    tokens = [torch.randint(9000, shape, generator=generator) for shape in shapes]
    return tokens, [level_values.to(dtype) for level_values in log_probabilities]


def check_same_trees(
    create: GrowthFactory, k: int, steps: int, nodes: int, dtype: torch.dtype, with_candidates: bool
) -> None:
    """Check that a growth selects the rows and trees of `TorchGrowth`; `with_candidates`: and reports `candidates`."""
    for r in (0, 2):
        tokens, log_probabilities = proposals(r, k, steps, dtype if k < 8 else torch.float64)
        growth, torch_growth = (f(tokens[0], log_probabilities[0], steps) for f in (create, TorchGrowth))
        actual, expected = (grow_levels(each, tokens, log_probabilities) for each in (growth, torch_growth))
        if dtype != torch.bfloat16:  # in bfloat16 scores tie, and torch takes any of them
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        bonus = torch.arange(r) + 7
        tree, expected_tree = growth.tree(bonus, nodes), torch_growth.tree(bonus, nodes)
        assert (tree.tokens.shape, tree.ancestors.shape) == ((r, nodes), (r, nodes, nodes))
        if dtype != torch.bfloat16:
            for name in ("tokens", "parents", "depths", "ancestors", "scores", *["candidates"] * with_candidates):
                actual_field, expected_field = getattr(tree, name), getattr(expected_tree, name)
                assert actual_field.dtype == expected_field.dtype and torch.equal(actual_field, expected_field), name
        assert_valid(tree, steps)


def check_ties_and_nan(
    create: GrowthFactory, dtype: torch.dtype, candidates_of: Callable[[Any], Sequence[Tensor]]
) -> None:
    """Check that the first of equal scores wins, and that NaN counts as the lowest log-probability. `candidates_of`
    returns tokens, scores and parents of all candidates of a growth.
    """
    k, steps, nodes = 4, 4, 20
    tokens, log_probabilities = proposals(6, k, steps, dtype, with_odd_values=True)
    log_probabilities[0][0], log_probabilities[1][0] = -1.0, -1.0
    log_probabilities[0][1, 0] = float("nan")
    growth = create(tokens[0], log_probabilities[0], steps)
    bests_by_level = grow_levels(growth, tokens, log_probabilities)
    assert bests_by_level[1][0].tolist() == [0, 0, 0, 0], "all scores tie, so the first row's candidates must win"
    candidate_tokens, scores, parents = candidates_of(growth)
    depths = torch.tensor([1] * k + [2] * k * k + [3] * k * k + [4] * k * k)
    candidates = Candidates(candidate_tokens, scores, parents.long(), depths, steps)
    tree = growth.tree(torch.full((6,), 5), nodes)
    for i in range(6):
        expected = naive_tree(candidates, i, 5, nodes)
        assert (tree.tokens[i].tolist(), tree.parents[i].tolist(), tree.depths[i].tolist()) == expected
    assert_valid(tree, steps)
    assert scores.isfinite().all() and scores[1, 0] <= FLOOR, "NaN counts as the lowest log-probability"


def check_replaced_floor(create: GrowthFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a growth reads `tree.FLOOR` each time it adds a level. `tests/distributed` sets another floor, because
    candidates below the floor have equal scores, and rounding would decide which of them is chosen.
    """
    monkeypatch.setattr(tree_module, "FLOOR", -300.0)
    k, steps, nodes = 3, 3, 7
    tokens, log_probabilities = proposals(2, k, steps, torch.float64)
    log_probabilities = [level_values - 70.0 for level_values in log_probabilities]
    trees = []
    for each in (create, TorchGrowth):
        growth = each(tokens[0], log_probabilities[0], steps)
        grow_levels(growth, tokens, log_probabilities)
        trees.append(growth.tree(torch.arange(2), nodes))
    assert trees[0].scores is not None and trees[1].scores is not None and trees[1].scores.min() < -70.0
    assert torch.equal(trees[0].scores, trees[1].scores) and torch.equal(trees[0].tokens, trees[1].tokens)


def check_refusals(create: GrowthFactory) -> None:
    """Check that a tree is refused before all levels are added, and with more nodes than candidates; and that a level
    too many is refused.
    """
    tokens, log_probabilities = proposals(1, 2, 3, torch.float32)
    growth = create(tokens[0], log_probabilities[0], 3)
    with pytest.raises(ValueError, match="2 candidates were added of the 10 of 3 levels"):
        growth.tree(tokens[0][:, 0], 3)
    grow_levels(growth, tokens, log_probabilities)
    with pytest.raises(ValueError, match="12 nodes of 10 candidates and a root"):
        growth.tree(tokens[0][:, 0], 12)
    with pytest.raises(ValueError, match="all 3 levels were added already"):
        growth.add(tokens[1], log_probabilities[1])
