"""Triton grows the same trees and accepts the same paths as torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.backends import tree_backend_of
from cluster.kernels.triton_kernels import TritonKernels
from cluster.spec import triton_tree, verify
from cluster.spec.tree import FLOOR, Candidates, DraftTree, Growth, TorchGrowth, best_tree
from cluster.spec.triton_tree import TritonGrowth, accept
from tests.unit.kernels.test_product import DTYPES
from tests.unit.spec.test_tree import assert_valid, naive_tree
from tests.unit.spec.test_verify import check_accepted, random_tree

ODD_VALUES = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.5, -80.0])


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "steps", "nodes"), [(1, 3, 4), (2, 1, 3), (3, 3, 7), (8, 4, 40), (5, 5, 33)])
def test_triton_tree_growth_matches_reference(k: int, steps: int, nodes: int, dtype: torch.dtype) -> None:
    for r in (0, 2):
        tokens, log_probabilities = proposals(r, k, steps, dtype if k < 8 else torch.float64)
        triton_growth, torch_growth = (
            growth_class(tokens[0], log_probabilities[0], steps) for growth_class in (TritonGrowth, TorchGrowth)
        )
        actual, expected = (
            grow_levels(triton_growth, tokens, log_probabilities),
            grow_levels(torch_growth, tokens, log_probabilities),
        )
        if dtype != torch.bfloat16:  # in bfloat16 scores tie, and torch takes any of them
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        bonus = torch.arange(r) + 7
        tree, expected_tree = triton_growth.tree(bonus, nodes), torch_growth.tree(bonus, nodes)
        assert (tree.tokens.shape, tree.ancestors.shape) == ((r, nodes), (r, nodes, nodes))
        if dtype != torch.bfloat16:
            for name in ("tokens", "parents", "depths", "ancestors", "scores"):
                actual_field, expected_field = getattr(tree, name), getattr(expected_tree, name)
                assert actual_field.dtype == expected_field.dtype and torch.equal(actual_field, expected_field), name
        assert_valid(tree, steps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tree_growth_breaks_ties_by_order_and_ranks_nan_last(dtype: torch.dtype) -> None:
    k, steps, nodes = 4, 4, 20
    tokens, log_probabilities = proposals(6, k, steps, dtype, with_odd_values=True)
    log_probabilities[0][0], log_probabilities[1][0] = -1.0, -1.0
    log_probabilities[0][1, 0] = float("nan")
    growth = TritonGrowth(tokens[0], log_probabilities[0], steps)
    bests_by_level = grow_levels(growth, tokens, log_probabilities)
    assert bests_by_level[1][0].tolist() == [0, 0, 0, 0], "all scores tie, so the first row's candidates must win"
    candidate_tokens, scores, parents = growth._candidates
    depths = torch.tensor([1] * k + [2] * k * k + [3] * k * k + [4] * k * k)
    candidates = Candidates(candidate_tokens, scores, parents.long(), depths, steps)
    tree = growth.tree(torch.full((6,), 5), nodes)
    for i in range(6):
        expected = naive_tree(candidates, i, 5, nodes)
        assert (tree.tokens[i].tolist(), tree.parents[i].tolist(), tree.depths[i].tolist()) == expected
    assert_valid(tree, steps)
    assert scores.isfinite().all() and scores[1, 0] <= FLOOR, "NaN counts as the lowest log-probability"


def test_tree_growth_refuses_missing_levels_and_too_many_nodes() -> None:
    tokens, log_probabilities = proposals(1, 2, 3, torch.float32)
    growth = TritonGrowth(tokens[0], log_probabilities[0], 3)
    with pytest.raises(ValueError, match="2 candidates were added of the 10 of 3 levels"):
        growth.tree(tokens[0][:, 0], 3)
    grow_levels(growth, tokens, log_probabilities)
    with pytest.raises(ValueError, match="12 nodes of 10 candidates and a root"):
        growth.tree(tokens[0][:, 0], 12)


def test_too_many_tree_candidates_fall_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, log_probabilities = proposals(3, 3, 3, torch.float64)
    trees, limits_at_fallback = [], []

    def record_fallback(*arguments: Any) -> DraftTree:
        limits_at_fallback.append(triton_tree.MAX_CANDIDATES)
        return best_tree(*arguments)

    monkeypatch.setattr(triton_tree, "best_tree", record_fallback)
    for max_candidates in (21, 20):
        monkeypatch.setattr(triton_tree, "MAX_CANDIDATES", max_candidates)
        growth = TritonGrowth(tokens[0], log_probabilities[0], 3)
        grow_levels(growth, tokens, log_probabilities)
        trees.append(growth.tree(torch.arange(3), 9))
    assert limits_at_fallback == [20]
    assert torch.equal(trees[0].tokens, trees[1].tokens) and torch.equal(trees[0].ancestors, trees[1].ancestors)


def test_triton_accept_matches_torch_for_chains_padding_and_empty_batches() -> None:
    check_accepted(accept, 4)


@pytest.mark.parametrize(("nodes", "steps", "vocab"), [(1, 0, 3), (2, 1, 2), (12, 5, 3), (30, 16, 3)])
def test_triton_accept_matches_torch_on_random_trees(nodes: int, steps: int, vocab: int) -> None:
    tree = random_tree(5, nodes, steps, vocab, nodes)
    chosen = torch.randint(vocab, (5, nodes), generator=torch.Generator().manual_seed(1))
    actual = tree_backend_of(TritonKernels()).accept(tree, chosen, torch.tensor([41]), steps)
    expected = verify.accept(tree, chosen, torch.tensor([41]), steps)
    for name in ("path", "tokens", "accept_len", "bonus"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def test_triton_kernels_select_the_triton_tree_backend() -> None:
    backend = tree_backend_of(TritonKernels())
    assert backend.create_growth is TritonGrowth and backend.accept is accept
