"""Adaptive trees are made by learned chances, and learn from each of their nodes what happened to it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine import build_engine
from cluster.spec.chances import NodeChances
from cluster.spec.result import PathFacts
from cluster.spec.step import Step
from cluster.spec.tree import NO_TOKEN, DraftTree
from cluster.spec.verify import Accepted
from tests.parity.harness import config_of, grid_requests, plain_run, run, tiny_pair
from tests.parity.trees import adaptive, engine_with_trees

TOPK, STEPS = 3, 3


class Recorder:
    """Records the trees and accepted paths of an engine's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[DraftTree, Accepted, list[float], list[bool]]] = []
        original = Step._learn

        def learn(step: Step, batch: Any, tree: DraftTree, accepted: Accepted, *others: Any) -> PathFacts:
            sampling, r = batch.sampling, batch.decodes
            idle = [not limit for limit in sampling.draft_limits[:r].tolist()]
            self.steps.append((tree, accepted, sampling.noise_scale[:r].tolist(), idle))
            return original(step, batch, tree, accepted, *others)

        monkeypatch.setattr(Step, "_learn", learn)


def siblings(tree: DraftTree, request: int, drafted: int) -> dict[int, list[int]]:
    """Return the children of each node, in order of their numbers, of the first `drafted` nodes."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents[request, :drafted].tolist()):
        if node:
            children.setdefault(parent, []).append(node)
    return children


@pytest.mark.parametrize("sampling", ["greedy", "0.8"])
def test_scores_are_sums_of_learned_chances_and_every_tried_node_is_counted(
    sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with_trees(
        lambda: build_engine(adaptive(config_of(*tiny_pair(), TOPK, STEPS, capture="off"))), [5, 9, 14] * 30
    )
    chances = engine.lockstep.step._chances
    assert isinstance(chances, NodeChances)
    recorder, tried, hits = Recorder(monkeypatch), 0, 0
    assert run(engine, grid_requests(sampling, 8)).completions == plain_run(sampling).completions
    for tree, accepted, noise_scale, idle in recorder.steps:
        if tree.proposed is None:
            continue
        for i in range(tree.tokens.shape[0]):
            path = accepted.path[i, : int(accepted.accept_len[i])].tolist()
            for parent, nodes in siblings(tree, i, tree.proposed.log_probabilities.shape[1]).items():
                ranks = tree.proposed.log_probabilities[i, nodes]
                assert ranks.equal(ranks.sort(descending=True).values), "siblings come in order of probability"
                is_likeliest = tree.proposed.is_likeliest[i, nodes].tolist()
                assert not any(is_likeliest[1:])
                if parent in path and not idle[i]:
                    verified = [node for node in nodes if tree.tokens[i, node] != NO_TOKEN]
                    tried += len(verified)
                    hits += sum(node in path for node in verified)
        assert len(set(noise_scale)) <= 1
    counted = chances.trials[int(sampling == "0.8")].sum(), chances.hits[int(sampling == "0.8")].sum()
    assert tried > 100 and counted[0] == pytest.approx(tried, rel=0.2) and counted[1] == pytest.approx(hits, rel=0.3)
    assert chances.trials[int(sampling != "0.8")].sum() == 0


def test_the_next_tree_goes_by_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only second choices were ever accepted, a chain of second choices is the best tree."""
    engine = engine_with_trees(lambda: build_engine(adaptive(config_of(*tiny_pair(), TOPK, STEPS, capture="off"))), [])
    chances = engine.lockstep.step._chances
    assert chances is not None

    def only_later(log_probabilities: Tensor, sampled: Tensor) -> Tensor:
        is_likeliest = torch.arange(log_probabilities.shape[-1]) == 0
        return torch.where(is_likeliest, -9.0, -0.01).to(log_probabilities.dtype).expand_as(log_probabilities)

    monkeypatch.setattr(chances, "log_chances", only_later)
    recorder = Recorder(monkeypatch)
    run(engine, grid_requests("greedy", 3))
    trees = [tree for tree, *_ in recorder.steps if tree.proposed is not None and tree.tokens.shape[0]]
    assert trees
    for tree in trees:
        assert tree.proposed is not None and tree.scores is not None
        later_share = (~tree.proposed.is_likeliest[:, 1:]).double().mean()
        assert later_share > 0.6, "without learned chances about half of the nodes are likeliest ones"
