"""Trees grown and accepted by Triton are those of the twins."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.backends import tree_backend_of
from cluster.kernels.triton_kernels import TritonKernels
from cluster.spec import triton_tree, verify
from cluster.spec.tree import Candidates, DraftTree, Growth, TorchGrowth, best_tree
from cluster.spec.triton_tree import TritonGrowth, accept
from tests.unit.kernels.test_product import DTYPES
from tests.unit.spec.test_tree import assert_valid, naive_tree
from tests.unit.spec.test_verify import check_accepted, random_tree

ODD = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.5, -80.0])


def grown(growth: Growth, tokens: list[Tensor], likely: list[Tensor]) -> list[Tensor]:
    """What it gives for the next level, level by level; `tokens` and `likely` `[R, K]`, then `[R, K, K]` of each."""
    best = []
    for level in range(1, len(likely)):
        growth.add(tokens[level], likely[level])
        best += growth.best()
    return best


def proposals(r: int, k: int, steps: int, dtype: torch.dtype, odd: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    dice = torch.Generator().manual_seed(100 * r + 10 * k + steps)
    shapes = [(r, k), *[(r, k, k)] * (steps - 1)]
    likely = [torch.randn(shape, generator=dice, dtype=torch.float64).abs().neg() for shape in shapes]  # no ties
    if odd:
        likely = [
            torch.where(torch.rand(each.shape, generator=dice) < 0.2, ODD[level], each)
            for level, each in enumerate(likely)
        ]
    tokens = [torch.randint(9000, shape, generator=dice) for shape in shapes]
    return tokens, [each.to(dtype) for each in likely]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "steps", "nodes"), [(1, 3, 4), (2, 1, 3), (3, 3, 7), (8, 4, 40), (5, 5, 33)])
def test_triton_tree_growth_matches_reference(k: int, steps: int, nodes: int, dtype: torch.dtype) -> None:
    for r in (0, 2):
        tokens, likely = proposals(r, k, steps, dtype if k < 8 else torch.float64)
        own, twin = (make(tokens[0], likely[0], steps) for make in (TritonGrowth, TorchGrowth))
        given, expected = grown(own, tokens, likely), grown(twin, tokens, likely)
        if dtype != torch.bfloat16:  # in which scores tie, and torch takes any
            assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
        bonus = torch.arange(r) + 7
        tree, other = own.tree(bonus, nodes), twin.tree(bonus, nodes)
        assert (tree.tokens.shape, tree.ancestors.shape) == ((r, nodes), (r, nodes, nodes))
        if dtype != torch.bfloat16:
            for name in ("tokens", "parents", "depths", "ancestors"):
                mine, theirs = getattr(tree, name), getattr(other, name)
                assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
        assert_valid(tree, steps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tree_growth_breaks_ties_by_order_and_ranks_nan_last(dtype: torch.dtype) -> None:
    k, steps, nodes = 4, 4, 20
    tokens, likely = proposals(6, k, steps, dtype, odd=True)
    likely[0][0], likely[1][0] = -1.0, -1.0
    own = TritonGrowth(tokens[0], likely[0], steps)
    best = grown(own, tokens, likely)
    assert best[1][0].tolist() == [0, 0, 0, 0], "all of a level are equal: the first row's"
    made, scores, parents = own._candidates
    depths = torch.tensor([1] * k + [2] * k * k + [3] * k * k + [4] * k * k)
    c = Candidates(made, scores, parents.long(), depths, steps)
    tree = own.tree(torch.full((6,), 5), nodes)
    for i in range(6):
        expected = naive_tree(c, i, 5, nodes)
        assert (tree.tokens[i].tolist(), tree.parents[i].tolist(), tree.depths[i].tolist()) == expected
    assert_valid(tree, steps)
    assert scores.isfinite().all()


def test_tree_growth_refuses_missing_levels_and_too_many_nodes() -> None:
    tokens, likely = proposals(1, 2, 3, torch.float32)
    own = TritonGrowth(tokens[0], likely[0], 3)
    with pytest.raises(ValueError, match="2 candidates were added of the 10 of 3 levels"):
        own.tree(tokens[0][:, 0], 3)
    grown(own, tokens, likely)
    with pytest.raises(ValueError, match="12 nodes of 10 candidates and a root"):
        own.tree(tokens[0][:, 0], 12)


def test_too_many_tree_candidates_fall_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, likely = proposals(3, 3, 3, torch.float64)
    made, asked = [], []

    def told(*given: Any) -> DraftTree:
        asked.append(triton_tree.MAX_CANDIDATES)
        return best_tree(*given)

    monkeypatch.setattr(triton_tree, "best_tree", told)
    for most in (21, 20):
        monkeypatch.setattr(triton_tree, "MAX_CANDIDATES", most)
        own = TritonGrowth(tokens[0], likely[0], 3)
        grown(own, tokens, likely)
        made.append(own.tree(torch.arange(3), 9))
    assert asked == [20]
    assert torch.equal(made[0].tokens, made[1].tokens) and torch.equal(made[0].ancestors, made[1].ancestors)


def test_triton_accept_matches_torch_for_chains_padding_and_empty_batches() -> None:
    check_accepted(accept, 4)


@pytest.mark.parametrize(("nodes", "steps", "vocab"), [(1, 0, 3), (2, 1, 2), (12, 5, 3), (30, 16, 3)])
def test_triton_accept_matches_torch_on_random_trees(nodes: int, steps: int, vocab: int) -> None:
    tree = random_tree(5, nodes, steps, vocab, nodes)
    chosen = torch.randint(vocab, (5, nodes), generator=torch.Generator().manual_seed(1))
    twin = tree_backend_of(TritonKernels()).accept(tree, chosen, torch.tensor([41]), steps)
    other = verify.accept(tree, chosen, torch.tensor([41]), steps)
    for name in ("path", "tokens", "accept_len", "bonus"):
        assert torch.equal(getattr(twin, name), getattr(other, name)), name


def test_triton_kernels_select_the_triton_tree_backend() -> None:
    backend = tree_backend_of(TritonKernels())
    assert backend.create_growth is TritonGrowth and backend.accept is accept
