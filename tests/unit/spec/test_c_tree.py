"""C grows the same trees as torch."""

import pytest
import torch

from cluster.capture.tape import Tape
from cluster.engine.backends import tree_backend_of
from cluster.kernels.c_kernels import CKernels
from cluster.spec.c_tree import CGrowth, growth_of
from cluster.spec.tree import TorchGrowth
from tests.unit.kernels.library import c_library
from tests.unit.spec.growth_contract import (
    TREES,
    check_refusals,
    check_replaced_floor,
    check_same_trees,
    check_ties_and_nan,
    grow_levels,
    proposals,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "steps", "nodes"), TREES)
def test_c_tree_growth_matches_reference(k: int, steps: int, nodes: int, dtype: torch.dtype) -> None:
    check_same_trees(growth_of(c_library()), k, steps, nodes, dtype, with_candidates=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tree_growth_breaks_ties_by_order_and_ranks_nan_last(dtype: torch.dtype) -> None:
    def candidates_of(growth: CGrowth) -> list[torch.Tensor]:
        return [growth._candidates[name] for name in ("tokens", "scores", "parents")]

    check_ties_and_nan(growth_of(c_library()), dtype, candidates_of)


def test_tree_growth_refuses_missing_levels_and_too_many_nodes() -> None:
    check_refusals(growth_of(c_library()))


def test_tree_growth_uses_a_replaced_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    check_replaced_floor(growth_of(c_library()), monkeypatch)


def test_replayed_growth_reads_the_new_proposals() -> None:
    """A program is recorded with one set of proposals and replayed with another, written to the same memory."""
    (tokens, scores), (new_tokens, new_scores) = (proposals(2, k, 3, torch.float32) for k in (3, 3))
    new_tokens, new_scores = [t.flip(0) for t in new_tokens], [s.flip(-1) for s in new_scores]
    create = growth_of(c_library())

    def program() -> list[torch.Tensor]:
        growth = create(tokens[0], scores[0], 3)
        bests = grow_levels(growth, tokens, scores)
        tree = growth.tree(tokens[0][:, 0], 9)
        return [*bests, tree.tokens, tree.parents, tree.ancestors]

    tape = Tape(program)
    for old, new in zip((*tokens, *scores), (*new_tokens, *new_scores), strict=True):
        old.copy_(new)
    tape.replay()
    expected = TorchGrowth(tokens[0], scores[0], 3)
    bests = grow_levels(expected, tokens, scores)
    tree = expected.tree(tokens[0][:, 0], 9)
    for actual, wanted in zip(tape.output, [*bests, tree.tokens, tree.parents, tree.ancestors], strict=True):
        assert torch.equal(actual, wanted)


def test_c_kernels_select_the_c_tree_backend() -> None:
    growth = tree_backend_of(CKernels(c_library())).create_growth
    assert isinstance(growth(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), 1), CGrowth)
