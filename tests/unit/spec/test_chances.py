"""The chances of nodes are learned from accepted paths, by class, by place among siblings and by probability."""

import math

import pytest
import torch
from torch import Tensor

from cluster.spec.c_chances import CNodeChances
from cluster.spec.chances import LEAST, MEMORY, POINTS, PRIOR, NodeChances
from cluster.spec.tree import NO_TOKEN, DraftTree, Proposed, ancestors_of
from cluster.spec.verify import Accepted
from tests.unit.kernels.library import c_library

CPU = torch.device("cpu")
GREEDY, SAMPLED = torch.tensor([False]), torch.tensor([True])
ANY = 99


@pytest.fixture(params=["torch", "c"])
def new_chances(request: pytest.FixtureRequest) -> NodeChances:
    """Each implementation."""
    return NodeChances(CPU) if request.param == "torch" else CNodeChances(c_library(), CPU)


def point(p: float) -> int:
    return round(math.sqrt(p) * (POINTS - 1))


def chance(chances: NodeChances, p: float, likeliest: bool = True, sampled: Tensor = GREEDY) -> float:
    """Return the chance of a node whose probability is `p`."""
    log_probabilities = torch.full((1, 2), math.log(p))
    return math.exp(float(chances.log_chances(log_probabilities, sampled)[0, int(not likeliest)]))


def tree_of(
    parents: list[int], probabilities: list[float], likeliest: list[bool], masked: tuple[int, ...] = ()
) -> DraftTree:
    parent_tensor = torch.tensor([parents])
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = torch.arange(len(parents))[None].clone()
    tokens[0, list(masked)] = NO_TOKEN
    proposed = Proposed(torch.tensor([probabilities]).log(), torch.tensor([likeliest]))
    return DraftTree(
        tokens,
        parent_tensor,
        torch.tensor([depths]),
        ancestors_of(parent_tensor, 4),
        masked=bool(masked),
        proposed=proposed,
    )


def accepted_path(*path: int, size: int = 5) -> Accepted:
    nodes = torch.tensor([[*path, *[0] * (size - len(path))]])
    return Accepted(nodes, nodes, torch.tensor([len(path)]), torch.tensor([0]))


def test_first_chances_follow_from_the_probabilities_of_the_draft(new_chances: NodeChances) -> None:
    chances = new_chances
    for k in range(1, POINTS):
        p = (k / (POINTS - 1)) ** 2
        assert chance(chances, p) == pytest.approx(math.sqrt(p), rel=1e-3)
        for others in ({"likeliest": False}, {"sampled": SAMPLED}):
            assert chance(chances, p, **others) == pytest.approx(p, rel=1e-3)
    assert 0.45 < chance(chances, 0.5, likeliest=False) < 0.55, "between two points"
    odd_values = torch.tensor([[float("nan"), -1e9, float("-inf"), 0.0, 1e-6]])
    logs = chances.log_chances(odd_values, SAMPLED)
    assert logs.isfinite().all() and logs[0, :3].exp().max() <= 2 * LEAST and logs[0, 3:].exp().min() > 0.99


def test_children_of_the_path_are_counted_and_nothing_else(new_chances: NodeChances) -> None:
    #      0
    #    1   2        path 0, 1, 4: node 3 is tried in vain, 5 and 6 have a parent that was not accepted or do not count
    #   3 4  5
    #     6
    tree = tree_of(
        [0, 0, 0, 1, 1, 2, 4],
        [1, 0.25, 0.0625, 0.25, 0.0625, 0.25, 0.5625],
        [True, True, False, True, False, True, True],
    )
    chances = new_chances
    chances.count(tree, accepted_path(0, 1, 4), GREEDY, torch.tensor([ANY]))
    kept = 1 - 1 / MEMORY
    assert kept < 1
    first, later = chances.trials[0]
    assert first.nonzero()[:, 0].tolist() == [point(0.25), point(0.5625)]
    assert first[point(0.25)] == 2 and first[point(0.5625)] == 1  # nodes 1 and 3; node 6, tried after node 4
    assert later.nonzero()[:, 0].tolist() == [point(0.0625)] and later[point(0.0625)] == 2  # nodes 2 and 4
    assert chances.hits[0, 0, point(0.25)] == 1 and chances.hits[0, 1, point(0.0625)] == 1
    assert chances.hits.sum() == 2 and chances.trials.sum() == 5
    assert chances.trials[1].eq(0).all(), "the other class"


@pytest.mark.parametrize("what", ["idle", "masked", "not proposed"])
def test_idle_requests_and_masked_nodes_do_not_count(what: str, new_chances: NodeChances) -> None:
    tree = tree_of([0, 0, 1], [1, 0.25, 0.25], [True] * 3, masked=(2,) if what == "masked" else ())
    if what == "not proposed":
        tree = DraftTree(tree.tokens, tree.parents, tree.depths, tree.ancestors)
    chances = new_chances
    chances.count(tree, accepted_path(0, 1), GREEDY, torch.tensor([0 if what == "idle" else ANY]))
    assert int(chances.trials.sum()) == {"idle": 0, "masked": 1, "not proposed": 0}[what]


def test_chances_approach_what_is_accepted(new_chances: NodeChances) -> None:
    chances = new_chances
    tree = tree_of([0, 0, 0], [1, 0.25, 0.25], [True, True, False])
    for i in range(1000):
        path = (0, 1) if i % 10 < 7 else (0, 2) if i % 10 < 8 else (0,)
        chances.count(tree, accepted_path(*path), SAMPLED, torch.tensor([ANY]))
    assert chance(chances, 0.25, sampled=SAMPLED) == pytest.approx(0.7, abs=0.02)
    assert chance(chances, 0.25, likeliest=False, sampled=SAMPLED) == pytest.approx(0.1, abs=0.02)
    assert chance(chances, 0.25) == pytest.approx(0.5, abs=1e-3), "greedy requests have curves of their own"
    chances.forget()
    assert chance(chances, 0.25, sampled=SAMPLED) == pytest.approx(0.25, abs=1e-3)
    assert chances.trials.max() < MEMORY and PRIOR > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_c_learns_and_returns_the_same_chances_as_torch(dtype: torch.dtype) -> None:
    """Trees of several requests: greedy and sampled, idle, with masked and looked-up nodes, and with odd numbers."""
    torch.manual_seed(0)
    both, requests, nodes, topk = (NodeChances(CPU), CNodeChances(c_library(), CPU)), 6, 9, 3
    for _ in range(20):
        parents = torch.stack([torch.tensor([0, *(int(torch.randint(i, ())) for i in range(1, nodes))])] * requests)
        tokens = torch.randint(5, (requests, nodes)) - 1
        log_probabilities = torch.randn(requests, nodes - 2, dtype=dtype).mul(3).abs().neg()
        log_probabilities[0, 3:6] = torch.tensor([float("nan"), float("-inf"), 0.5])
        proposed = Proposed(log_probabilities, torch.rand(requests, nodes - 2) < 0.4)
        tree = DraftTree(tokens, parents, parents, ancestors_of(parents, nodes), proposed=proposed)
        path = torch.randint(nodes, (requests, 4)).mul(torch.rand(requests, 4) < 0.7)
        path[:, 0] = 0
        sampled, limits = torch.rand(requests) < 0.5, torch.randint(3, (requests, 2))[:, 1]
        for chances in both:
            chances.count(tree, Accepted(path, path, path[:, 0], path[:, 0]), sampled, limits)
        assert torch.equal(both[0].trials, both[1].trials) and torch.equal(both[0].hits, both[1].hits)
        proposals = torch.randn(requests, 2, topk, dtype=dtype).mul(4).sub(2)
        proposals[1, 0] = torch.tensor([float("nan"), float("-inf"), 1e-9])
        for asked in (proposals, proposals[:, 0], proposals.transpose(1, 2)):
            expected, actual = (chances.log_chances(asked, sampled) for chances in both)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
