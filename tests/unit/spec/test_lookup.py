"""Looked-up text is one more branch of a drafted tree, and shares the nodes that the draft proposed too."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cluster.spec import tree as tree_module
from cluster.spec.c_lookup import CAddLookedUp, CLookupChances
from cluster.spec.c_verify import CAccept
from cluster.spec.lookup import MEMORY, PRIOR, AddLookedUp, LookupChances, add_looked_up, count_agreeing
from cluster.spec.row_budget import TargetRows, select_nodes
from cluster.spec.token_history import LONGEST_MATCH, Continuations
from cluster.spec.tree import DraftTree, ancestors_of, best_tree, chain, chain_scores
from cluster.spec.verify import Accept, Accepted, accept
from tests.unit.kernels.library import c_library
from tests.unit.spec.test_tree import candidates_of

CPU = torch.device("cpu")
REQUESTS, COUNT, VOCAB = 40, 5, 3
UNLIMITED = 99


@pytest.fixture(params=["torch", "c"])
def add(request: pytest.FixtureRequest) -> AddLookedUp:
    """Each implementation of `add_looked_up`."""
    return add_looked_up if request.param == "torch" else CAddLookedUp(c_library())


@pytest.fixture(params=["torch", "c"])
def chances(request: pytest.FixtureRequest) -> LookupChances:
    """Each implementation of `LookupChances`."""
    return LookupChances(CPU) if request.param == "torch" else CLookupChances(c_library(), CPU)


def drafted_trees(topk: int, steps: int, nodes: int) -> DraftTree:
    """Return trees over a vocabulary so small that looked-up texts share nodes with them."""
    torch.manual_seed(topk)
    if topk == 1:
        return chain(torch.randint(VOCAB, (REQUESTS, nodes)), chain_scores(torch.rand(REQUESTS, nodes - 1).mul(-2)))
    shape = REQUESTS, steps, topk, VOCAB
    candidates = candidates_of(topk, steps, torch.randn(shape).log_softmax(-1).topk(topk, -1).values)
    # Siblings have different tokens, as proposals of a draft have.
    tokens = torch.arange(candidates.tokens.shape[1]).sub(topk if topk == 2 else 0).remainder(topk)
    shift = torch.randint(VOCAB, (REQUESTS, 1))
    candidates.tokens.copy_((tokens + shift) % VOCAB)
    return best_tree(candidates, torch.randint(VOCAB, (REQUESTS,)), nodes)


def continuations() -> tuple[Continuations, Tensor]:
    """Return looked-up tokens, of which some requests have none, and their chances."""
    torch.manual_seed(1)
    matched = torch.randint(3, (REQUESTS,))
    found = Continuations(torch.randint(VOCAB, (REQUESTS, COUNT)), matched)
    return found, torch.rand(REQUESTS, COUNT).log()


def paths_of(tree: DraftTree, request: int) -> dict[int, tuple[int, ...]]:
    """Return the tokens after the root of each node that is not padding."""
    tokens, parents = tree.tokens[request].tolist(), tree.parents[request].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] != node:
            paths[node] = (*paths[parents[node]], tokens[node])
    return paths


TREES = [(1, 3, 4), (2, 3, 6), (3, 2, 8)]


@pytest.mark.parametrize(("topk", "steps", "nodes"), TREES)
def test_a_joined_tree_has_both_texts_once(topk: int, steps: int, nodes: int, add: AddLookedUp) -> None:
    drafted, (found, log_chances) = drafted_trees(topk, steps, nodes), continuations()
    joined, shared_counts = add(drafted, found, log_chances), set()
    assert joined.padded and joined.tokens.shape == (REQUESTS, nodes + COUNT)
    for i in range(REQUESTS):
        paths, before = paths_of(joined, i), paths_of(drafted, i)
        text = found.tokens[i].tolist() if found.matched[i] else []
        wanted = {*before.values(), *(tuple(text[:length]) for length in range(len(text) + 1))}
        assert set(paths.values()) == wanted and len(paths) == len(wanted), "a path is missing, or there twice"
        assert {node: path for node, path in paths.items() if node < nodes} == before
        assert [int(joined.depths[i, node]) for node in paths] == [len(path) for path in paths.values()]
        shared_counts.add(len(text) + len(before) - len(paths))
    real = joined.ancestors[..., 0]
    assert joined.ancestors[real].equal(ancestors_of(joined.parents, COUNT)[real])
    padding = ~real
    assert not joined.tokens[padding].any() and (joined.scores is not None and joined.scores[padding].isneginf().all())
    own = torch.arange(nodes + COUNT).expand(REQUESTS, -1)
    assert joined.parents[padding].equal(own[padding]) and joined.ancestors[padding].sum(1).eq(1).all()
    assert len(shared_counts) >= 3, "the cases share too few nodes"


@pytest.mark.parametrize(("topk", "steps", "nodes"), TREES)
def test_scores_are_the_better_ones_and_fall_along_every_path(
    topk: int, steps: int, nodes: int, add: AddLookedUp
) -> None:
    drafted, (found, log_chances) = drafted_trees(topk, steps, nodes), continuations()
    joined, looked_up = add(drafted, found, log_chances), chain_scores(log_chances)
    assert joined.scores is not None and drafted.scores is not None
    for i in range(REQUESTS):
        text = tuple(found.tokens[i].tolist()) if found.matched[i] else None
        for node, path in paths_of(joined, i).items():
            options = [float(drafted.scores[i, node])] if node < nodes else []
            if path and text is not None and text[: len(path)] == path:
                options.append(float(looked_up[i, len(path)]))
            assert float(joined.scores[i, node]) == max(options)
            if node:
                assert joined.scores[i, node] < joined.scores[i, int(joined.parents[i, node])]


@pytest.mark.parametrize("implementation", ["torch", "c"])
@pytest.mark.parametrize(("topk", "steps", "nodes"), TREES)
def test_joined_trees_are_selected_and_accepted_like_other_trees(
    topk: int, steps: int, nodes: int, implementation: str
) -> None:
    """The expected path is found by walking the tree from the root."""
    find: Accept = accept if implementation == "torch" else CAccept(c_library())
    joined = add_looked_up(drafted_trees(topk, steps, nodes), *continuations())
    assert joined.scores is not None
    limits = torch.full((REQUESTS,), UNLIMITED)
    for mean_nodes in (2, 4, nodes + COUNT):
        selection = select_nodes(joined.scores, joined.depths, limits, REQUESTS * mean_nodes)
        rows = TargetRows(REQUESTS, nodes + COUNT, selection if mean_nodes < nodes + COUNT else None)
        tree = rows.without_others(joined)
        target = torch.randint(VOCAB, tree.tokens.shape)
        accepted = find(tree, target, target[:0, 0], COUNT)
        for i in range(REQUESTS):
            path, children = [0], paths_of(tree, i)
            while True:
                wanted = int(target[i, path[-1]])
                nexts = [
                    c for c in children if c and int(tree.parents[i, c]) == path[-1] and tree.tokens[i, c] == wanted
                ]
                if not nexts:
                    break
                path += nexts
            assert accepted.path[i].tolist() == path + [0] * (COUNT + 1 - len(path))
            assert int(accepted.accept_len[i]) == len(path)


def test_agreeing_tokens_are_counted_up_to_the_last_committed_one() -> None:
    committed = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    found = Continuations(
        torch.tensor([[4, 5, 6, 7, 8], [4, 5, 6, 7, 8], [9, 5, 6, 7, 8], [4, 5, 6, 7, 8]]), torch.tensor([2, 2, 2, 0])
    )
    accepted = Accepted(committed, committed, torch.tensor([2, 4, 4, 4]), torch.tensor([0]))
    assert count_agreeing(found, accepted).tolist() == [2, 4, 0, 0]


def test_chances_of_looked_up_tokens_are_learned_by_the_length_of_the_match(chances: LookupChances) -> None:
    matched = torch.tensor([2])
    first = chances.log_chances(matched, 3).exp()[0].tolist()
    assert first == pytest.approx([2 / 3, 3 / 4, 4 / 5]), "a right token makes the match longer"
    longest = chances.log_chances(torch.tensor([LONGEST_MATCH]), 3).exp()
    assert longest.unique().numel() == 1, "longer matches count like the longest"
    one, any_limit = torch.tensor([1]), torch.tensor([UNLIMITED])
    for _ in range(100):  # the first token is always right, the second never
        chances.count(matched, one, torch.tensor([3]), any_limit)
    kept = (1 - (1 - 1 / MEMORY) ** 100) * MEMORY
    assert chances.trials.tolist() == pytest.approx([0, 0, kept, kept, *[0] * (LONGEST_MATCH - 3)], rel=1e-4)
    learned = chances.log_chances(matched, 3).exp()[0].tolist()
    assert learned == pytest.approx([(kept + PRIOR * 2 / 3) / (kept + PRIOR), PRIOR * 3 / 4 / (kept + PRIOR), 4 / 5])
    chances.forget()
    assert chances.log_chances(matched, 3).exp()[0].tolist() == pytest.approx(first)


def test_unknown_tokens_idle_requests_and_requests_without_a_match_do_not_count(chances: LookupChances) -> None:
    two = torch.tensor([2])
    chances.count(two, torch.tensor([1]), torch.tensor([1]), torch.tensor([UNLIMITED]))
    assert (chances.trials.sum(), chances.hits.sum()) == (1, 1), "nothing is known after the last committed token"
    chances.count(two, torch.tensor([0]), torch.tensor([3]), torch.tensor([0]))
    chances.count(torch.tensor([0]), torch.tensor([0]), torch.tensor([3]), torch.tensor([UNLIMITED]))
    assert chances.trials.sum() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("with_scores", [True, False])
@pytest.mark.parametrize(("topk", "steps", "nodes"), TREES)
def test_c_adds_looked_up_tokens_like_torch(topk: int, steps: int, nodes: int, with_scores: bool) -> None:
    drafted, (found, log_chances) = drafted_trees(topk, steps, nodes), continuations()
    drafted = drafted if with_scores else replace(drafted, scores=None)
    log_chances[0, 1], log_chances[1, 0] = float("nan"), float("-inf")
    expected, actual = (each(drafted, found, log_chances) for each in (add_looked_up, CAddLookedUp(c_library())))
    for name in ("tokens", "parents", "depths", "ancestors", *["scores"] * with_scores):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert actual.padded and (actual.scores is None) == (not with_scores)


def test_c_adds_looked_up_tokens_with_a_replaced_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "FLOOR", -300.0)
    drafted, (found, log_chances) = drafted_trees(2, 3, 6), continuations()
    log_chances = log_chances - 70.0
    expected, actual = (each(drafted, found, log_chances) for each in (add_looked_up, CAddLookedUp(c_library())))
    assert expected.scores is not None and actual.scores is not None and torch.equal(actual.scores, expected.scores)
    assert expected.scores[expected.scores.isfinite()].min() < -70.0


def test_c_learns_the_same_chances_of_looked_up_tokens_as_torch() -> None:
    torch.manual_seed(0)
    both = LookupChances(CPU), CLookupChances(c_library(), CPU)
    for _ in range(20):
        matched, accept_len = torch.randint(LONGEST_MATCH + 1, (9,)), torch.randint(1, 7, (9,))
        agreeing, limits = torch.minimum(torch.randint(7, (9,)), accept_len), torch.randint(3, (9, 2))[:, 1]
        for each in both:
            each.count(matched, agreeing, accept_len, limits)
        assert torch.equal(both[0].trials, both[1].trials) and torch.equal(both[0].hits, both[1].hits)
        expected, actual = (each.log_chances(matched, 8) for each in both)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
