"""Triton grows the same trees and accepts the same paths as torch."""

from typing import Any

import pytest
import torch

from cluster.engine.backends import tree_backend_of
from cluster.kernels.triton_kernels import TritonKernels
from cluster.spec import triton_tree, verify
from cluster.spec.tree import DraftTree, best_tree
from cluster.spec.triton_tree import TritonGrowth, accept
from tests.unit.kernels.test_product import DTYPES
from tests.unit.spec.growth_contract import (
    TREES,
    check_refusals,
    check_replaced_floor,
    check_same_trees,
    check_ties_and_nan,
    grow_levels,
    proposals,
)
from tests.unit.spec.test_verify import check_accepted, random_tree


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "steps", "nodes"), TREES)
def test_triton_tree_growth_matches_reference(k: int, steps: int, nodes: int, dtype: torch.dtype) -> None:
    check_same_trees(TritonGrowth, k, steps, nodes, dtype, with_candidates=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tree_growth_breaks_ties_by_order_and_ranks_nan_last(dtype: torch.dtype) -> None:
    check_ties_and_nan(TritonGrowth, dtype, lambda growth: growth._candidates)


def test_tree_growth_refuses_missing_levels_and_too_many_nodes() -> None:
    check_refusals(TritonGrowth)


def test_tree_growth_uses_a_replaced_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    check_replaced_floor(TritonGrowth, monkeypatch)


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
