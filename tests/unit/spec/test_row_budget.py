"""Requests share the target's rows: the likeliest nodes of all requests are verified, and each request's are a tree."""

import pytest
import torch
from torch import Tensor

from cluster.engine.backends import tree_backend_of
from cluster.kernels.c_kernels import CKernels
from cluster.spec.c_row_budget import CSelectNodes
from cluster.spec.row_budget import LIMIT_PENALTY, SelectNodes, TargetRows, limit_drafts, select_nodes
from cluster.spec.tree import NO_TOKEN, Candidates, DraftTree, best_tree, chain, chain_scores
from cluster.spec.verify import accept
from tests.unit.kernels.library import c_library
from tests.unit.spec.test_tree import candidates_of

UNLIMITED = 99


@pytest.fixture(params=["torch", "c"])
def select(request: pytest.FixtureRequest) -> SelectNodes:
    """Each implementation."""
    return select_nodes if request.param == "torch" else CSelectNodes(c_library())


def trees(topk: int, steps: int, requests: int, nodes: int) -> tuple[Candidates, DraftTree]:
    """Return random candidates, and trees of their best nodes."""
    torch.manual_seed(topk)
    shape = requests, steps, topk, 2 * topk
    candidates = candidates_of(topk, steps, torch.randn(shape).log_softmax(-1).topk(topk, -1).values)
    return candidates, best_tree(candidates, torch.arange(requests), nodes)


def by_hand(tree: DraftTree, limits: list[int], count: int) -> list[int]:
    """Return the numbers of the nodes to verify, by Python's sort."""
    assert tree.scores is not None
    scores, depths, size = tree.scores.tolist(), tree.depths.tolist(), tree.tokens.shape[1]
    nodes = [(i, j) for i in range(len(limits)) for j in range(size)]
    nodes.sort(key=lambda n: (n[1] != 0, depths[n[0]][n[1]] > limits[n[0]], -scores[n[0]][n[1]]))
    return sorted(i * size + j for i, j in nodes[:count])


@pytest.mark.parametrize("mean_nodes", [1, 2, 3, 5])
def test_roots_come_first_then_the_best_nodes_within_the_limits(mean_nodes: int, select: SelectNodes) -> None:
    _, tree = trees(2, 3, 6, 5)
    assert tree.scores is not None
    limits = [UNLIMITED, 1, 0, UNLIMITED, 0, 2]
    selection = select(tree.scores, tree.depths, torch.tensor(limits), 6 * mean_nodes)
    assert selection.nodes.tolist() == by_hand(tree, limits, 6 * mean_nodes)
    assert selection.ranks.view(-1).lt(mean_nodes).nonzero()[:, 0].equal(selection.nodes)
    assert selection.requests.equal(selection.nodes // 5)
    assert selection.rows.view(-1)[selection.nodes].equal(torch.arange(6 * mean_nodes))
    selected = torch.zeros(30, dtype=torch.bool)
    selected[selection.nodes] = True
    assert selected.view(6, 5).gather(1, tree.parents)[selected.view(6, 5)].all(), "a node without its parent"


def test_nodes_beyond_limits_get_rows_only_if_no_other_node_needs_them(select: SelectNodes) -> None:
    tree = chain(torch.zeros(3, 3, dtype=torch.int64), chain_scores(torch.full((3, 2), -29.0)))
    assert tree.scores is not None and tree.scores.min() > -LIMIT_PENALTY
    limits = torch.tensor([UNLIMITED, 0, UNLIMITED])
    assert select(tree.scores, tree.depths, limits, 7).nodes.tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert select(tree.scores, tree.depths, limits, 9).nodes.tolist() == list(range(9))
    limited = limit_drafts(chain(torch.arange(1, 10).view(3, 3)), torch.tensor([UNLIMITED, 0, 1]))
    assert limited.tokens.tolist() == [[1, 2, 3], [4, NO_TOKEN, NO_TOKEN], [7, 8, NO_TOKEN]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("requests", "nodes"), [(1, 2), (3, 1), (7, 6), (64, 16)])
def test_c_selects_what_torch_selects(requests: int, nodes: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(nodes)
    # Few different scores, so that many are equal; they need not fall along paths here.
    scores = torch.randint(-5, 0, (requests, nodes), generator=generator).to(dtype)
    depths = torch.randint(1, 5, (requests, nodes), generator=generator)
    limits = torch.randint(5, (requests,), generator=generator)
    for count in {requests, requests * nodes, requests * ((nodes + 1) // 2)}:
        ours = CSelectNodes(c_library())(scores, depths, limits, count)
        expected = select_nodes(scores, depths, limits, count)
        for name in ("nodes", "requests", "rows", "ranks"):
            assert getattr(ours, name).equal(getattr(expected, name)), name


def test_select_of_each_backend() -> None:
    assert isinstance(tree_backend_of(CKernels(c_library())).select_nodes, CSelectNodes)


@pytest.mark.parametrize(("topk", "steps"), [(2, 3), (4, 4)])
def test_nodes_of_rank_below_n_are_the_tree_of_n_nodes(topk: int, steps: int) -> None:
    """So one step also shows what smaller tiers would have given."""
    candidates, largest = trees(topk, steps, 5, 11)
    assert largest.scores is not None
    for nodes in range(2, 11):
        smaller = best_tree(candidates, torch.arange(5), nodes)
        for i in range(5):
            scores, depths = largest.scores[i : i + 1], largest.depths[i : i + 1]
            ranks = select_nodes(scores, depths, torch.tensor([UNLIMITED]), 11).ranks[0]
            assert ranks.sort().values.equal(torch.arange(11)) and ranks[0] == 0
            assert largest.tokens[i][ranks < nodes].tolist() == smaller.tokens[i].tolist()
            assert largest.depths[i][ranks < nodes].tolist() == smaller.depths[i].tolist()


def selected_rows(tree: DraftTree, mean_nodes: int) -> TargetRows:
    assert tree.scores is not None
    requests, nodes = tree.tokens.shape
    limits = torch.full((requests,), UNLIMITED)
    return TargetRows(requests, nodes, select_nodes(tree.scores, tree.depths, limits, requests * mean_nodes))


def test_values_of_rows_and_of_nodes_belong_together() -> None:
    _, tree = trees(2, 3, 4, 6)
    rows = selected_rows(tree, 3)
    assert rows.count == 12 and rows.requests is not None
    assert rows.requests.equal(rows.take(torch.arange(4)[:, None].expand(4, 6)))
    verified = rows.without_others(tree)
    is_verified = verified.tokens != NO_TOKEN
    assert rows.take(verified.tokens).equal(rows.take(tree.tokens)) and int(is_verified.sum()) == 12
    assert torch.where(is_verified, rows.spread(rows.take(tree.tokens)) - tree.tokens, 0).eq(0).all()
    assert verified.node_counts()[:, 0].equal(is_verified.sum(1) - 1)
    numbers = rows.spread(torch.arange(12))
    for request, node in is_verified.nonzero().tolist():
        path = torch.zeros(4, 1, dtype=torch.int64)
        path[request, 0] = node
        assert rows.of(path)[request, 0] == numbers[request, node]


def test_all_nodes_are_rows_if_none_were_selected() -> None:
    _, tree = trees(2, 3, 4, 6)
    rows, path = TargetRows(4, 6), torch.tensor([[0, 2], [0, 5], [0, 0], [0, 1]])
    assert rows.count == 24 and rows.requests is None and rows.without_others(tree) is tree
    assert rows.take(tree.tokens).equal(tree.tokens.view(-1)) and rows.spread(tree.tokens.view(-1)).equal(tree.tokens)
    assert rows.of(path).tolist() == [[0, 2], [6, 11], [12, 12], [18, 19]]


def choices_along(tree: DraftTree, length: int) -> Tensor:
    """Return choices of the target `[R, N]` that follow the first child `length` times, then nothing."""
    choices = torch.full_like(tree.tokens, 999)
    for i, (tokens, parents, depths) in enumerate(
        zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True)
    ):
        for node in range(len(tokens) - 1, 0, -1):
            if depths[node] <= length:
                choices[i, parents[node]] = tokens[node]
    return choices


def test_a_node_that_is_not_verified_is_never_accepted() -> None:
    tokens = torch.arange(12).view(2, 6)
    tree = chain(tokens, chain_scores(torch.tensor([[-0.1] * 5, [-3.0] * 5])))
    rows = selected_rows(tree, 4)
    verified = rows.without_others(tree)
    accepted = accept(verified, choices_along(tree, 5), torch.zeros(0, dtype=torch.int64), 5)
    # 8 rows: 2 roots, the 5 nodes of the first chain, and one node of the second chain.
    assert accepted.accept_len.tolist() == [6, 2]
