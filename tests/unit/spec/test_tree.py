"""Tree selection against EAGLE-2's selection for one request at a time, and checks of a valid tree's shape."""

import pytest
import torch
from torch import Tensor

from cluster.spec.tree import Candidates, DraftTree, TorchGrowth, best_tree, chain, clamp_log_probabilities


def candidates_of(topk: int, steps: int, log_probs: Tensor) -> Candidates:
    """Return the candidates that a draft with log-probabilities `log_probs` `[R, S, K, K]` of all levels would propose.

    Tokens count up from 100. Level 0 uses its first row. The rows of a level are the K best candidates of the level
    before.
    """
    r = log_probs.shape[0]
    tokens = torch.arange(100, 100 + topk + (steps - 1) * topk * topk).expand(r, -1)
    levels = tokens[:, topk:].split(topk * topk, 1)
    grown = TorchGrowth(tokens[:, :topk], log_probs[:, 0, 0], steps)
    for level in range(1, steps):
        if level > 1:
            grown.best()
        grown.add(levels[level - 1].view(r, topk, topk), log_probs[:, level])
    return Candidates.of(grown._levels)


def naive_tree(c: Candidates, request: int, bonus: int, nodes: int) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, parents and depths of the best nodes of one request. The earlier candidate wins a tie."""
    scores = c.scores[request].tolist()
    best = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: nodes - 1])
    number = {-1: 0} | {candidate: i for i, candidate in enumerate(best, start=1)}
    parents = [number[int(c.parents[request, candidate])] for candidate in best]
    tokens = [int(c.tokens[request, candidate]) for candidate in best]
    return [bonus, *tokens], [0, *parents], [0, *(int(c.depths[candidate]) for candidate in best)]


def assert_valid(tree: DraftTree, steps: int) -> None:
    """Check that the root is first, parents precede children, a child is one deeper than its parent, and the mask of a
    node has exactly its ancestors and itself.
    """
    n = tree.tokens.shape[1]
    masks, nodes = tree.ancestors.tolist(), range(n)
    for mask, parents, depths in zip(masks, tree.parents.tolist(), tree.depths.tolist(), strict=True):
        assert parents[0] == depths[0] == 0
        for j in range(1, n):
            assert parents[j] < j
            assert depths[j] == depths[parents[j]] + 1 <= steps
            ancestors, node = {j, 0}, j
            while node:
                node = parents[node]
                ancestors.add(node)
            assert {k for k in nodes if mask[j][k]} == ancestors


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_batched_tree_growth_equals_growth_of_each_request(topk: int) -> None:
    steps, requests = 4, 5
    log_probs = torch.randn(requests, steps, topk, topk, dtype=torch.float64).sub(3).clamp(max=0)
    c, costs = candidates_of(topk, steps, log_probs), clamp_log_probabilities(log_probs).tolist()
    for i in range(requests):
        scores, parents, depths = list(costs[i][0][0]), [-1] * topk, [1] * topk
        rows = list(range(topk))
        for level in range(1, steps):
            first = len(scores)
            for row_index, row in enumerate(rows):
                scores += [scores[row] + cost for cost in costs[i][level][row_index]]
                parents += [row] * topk
                depths += [level + 1] * topk
            rows = sorted(range(first, len(scores)), key=lambda n: -scores[n])[:topk]
        assert c.scores[i].tolist() == scores
        assert (c.parents[i].tolist(), c.depths.tolist()) == (parents, depths)


def test_growth_best_returns_next_tokens_and_their_parent_rows() -> None:
    grown = TorchGrowth(torch.tensor([[7, 8]]), torch.tensor([[-1.0, -2.0]]), 3)
    grown.add(torch.tensor([[[11, 12], [13, 14]]]), torch.tensor([[[-5.0, -1.0], [-0.5, -9.0]]]))
    tokens, rows = grown.best()
    assert (tokens.tolist(), rows.tolist()) == ([[12, 13]], [[0, 1]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("topk", "steps"), [(2, 1), (2, 3), (3, 2), (4, 4), (8, 2), (8, 1)])
def test_best_tree_equals_naive_selection(topk: int, steps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(topk * 10 + steps)
    log_probs = torch.randn(8, steps, topk, max(topk, 2) * 2, dtype=dtype).mul(3).log_softmax(-1).topk(topk, -1).values
    c = candidates_of(topk, steps, log_probs)
    max_nodes = c.tokens.shape[1] + 1
    for nodes in {2, 3, max_nodes // 2, max_nodes - 1, max_nodes}:
        if nodes < 2:
            continue
        tree = best_tree(c, torch.arange(8), nodes)
        assert_valid(tree, steps)
        for i in range(8):
            expected = naive_tree(c, i, i, nodes)
            assert (tree.tokens[i].tolist(), tree.parents[i].tolist(), tree.depths[i].tolist()) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("topk", "steps"), [(2, 16), (3, 3), (4, 5), (8, 3)])
@pytest.mark.parametrize("kind", ["ties", "one certain token", "all impossible", "nan", "mixed"])
def test_best_tree_is_valid_for_ties_infinities_and_nan_scores(
    topk: int, steps: int, dtype: torch.dtype, kind: str
) -> None:
    """Ties between parent and child, impossible tokens and NaN never select a node without its parent."""
    torch.manual_seed(0)
    log_probs = torch.zeros(6, steps, topk, topk)
    if kind == "one certain token":
        log_probs[..., 1:] = float("-inf")
    elif kind == "all impossible":
        log_probs[:] = float("-inf")
    elif kind == "nan":
        log_probs[:] = float("nan")
    elif kind == "mixed":
        values = torch.tensor([0.0, -1e-4, -0.5, -29.99, -31.0, float("-inf"), float("nan")])
        log_probs = values[torch.randint(7, log_probs.shape)]
    c = candidates_of(topk, steps, log_probs.to(dtype))
    max_nodes = c.tokens.shape[1] + 1
    for nodes in {2, steps + 1, min(max_nodes, 4 * steps), min(max_nodes, 60) - 1}:
        assert_valid(best_tree(c, torch.zeros(6, dtype=torch.int64), nodes), steps)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_chain_equals_the_tree_of_topk_1(steps: int) -> None:
    c = candidates_of(1, steps, torch.randn(3, steps, 1, 1).sub(2).clamp(max=0))
    bonus = torch.tensor([4, 5, 6])
    grown, chain_tree = best_tree(c, bonus, steps + 1), chain(torch.cat([bonus[:, None], c.tokens], 1))
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(grown, name), getattr(chain_tree, name)), name
    assert_valid(chain_tree, steps)


def test_chain_of_one_token_is_a_root_only_tree() -> None:
    tree = chain(torch.tensor([[4], [5]]))
    assert tree.parents.tolist() == tree.depths.tolist() == [[0], [0]]
    assert tree.ancestors.all()


def test_best_tree_handles_zero_requests() -> None:
    c = candidates_of(2, 3, torch.zeros(0, 3, 2, 2))
    tree = best_tree(c, torch.zeros(0, dtype=torch.int64), 5)
    assert tree.tokens.shape == (0, 5)
    assert tree.ancestors.shape == (0, 5, 5)
