"""Trees returned to requests with `return_tree`: they equal the reference's trees and contain the output's path."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.batch import SamplingMode
from cluster.engine import Engine, build_engine
from cluster.engine.committer import Committer
from cluster.engine.lockstep import StepInFlight
from cluster.engine.schedule import mode_of
from cluster.request import Request, StepTree
from tests.parity.automata import EOS, automaton, with_automata
from tests.parity.harness import (
    SAMPLING,
    RunResult,
    config_of,
    grid_requests,
    make_request,
    plain_run,
    plain_texts,
    prompts,
    run,
    scarce_config,
    speculative_engine,
    tiny_pair,
)
from tests.parity.reference import draft_reference, target_reference
from tests.parity.watch import Expected, ReferenceChecker
from tests.support.late_device import LatePrograms, delay
from tests.support.pairwise import covering


def with_return_tree(requests: Sequence[Request]) -> list[Request]:
    """Set `return_tree` in all requests but the second."""
    return [replace(r, params=replace(r.params, return_tree=i != 1)) for i, r in enumerate(requests)]


def path_of(tree: StepTree, node: int) -> list[int]:
    """Return the tokens on the path from the root to a node, without the root's token."""
    return [] if node == 0 else [*path_of(tree, tree.parents[node]), tree.token_ids[node]]


def check_paths(requests: Sequence[Request], result: RunResult) -> int:
    """Check every returned tree against the tokens of its request; return the number of trees."""
    trees = 0
    for request in requests:
        known_tokens = [*request.prompt_token_ids]
        for output in result.outputs[request.request_id]:
            tree, tokens = output.tree, output.token_ids
            assert (tree is not None) == (
                request.params.return_tree and len(known_tokens) > len(request.prompt_token_ids)
            )
            if tree is not None:
                trees += 1
                accepted_path = tree.accepted
                assert tree.token_ids[0] == known_tokens[-1], "the root is not the last token before the step"
                assert accepted_path[0] == 0 and tree.parents[0] == 0
                assert [tree.parents[node] for node in accepted_path[1:]] == list(accepted_path[:-1])
                path_tokens = [*path_of(tree, accepted_path[-1]), tree.bonus]
                assert list(tokens) == path_tokens[: len(tokens)]
                assert len(tokens) == len(path_tokens) or output.finish_reason is not None
                assert all(parent < node for node, parent in enumerate(tree.parents) if node)
                nodes = list(zip(tree.parents, tree.token_ids, strict=True))[1:]
                assert len(set(nodes)) == len(nodes), "a node occurs twice"
            known_tokens += tokens
    return trees


@pytest.mark.parametrize(
    ("shape", "sampling", "late"), covering([[(0, 0), (1, 4), (3, 3)], list(SAMPLING), (False, True)])
)
def test_returned_tree_contains_the_output_path_and_tokens_are_unchanged(
    shape: tuple[int, int], sampling: str, late: bool
) -> None:
    (topk, num_steps), (target, draft) = shape, tiny_pair()
    config = config_of(target, draft, topk, num_steps) if topk else config_of(target)
    engine = speculative_engine(config, "corrected", plain_texts(sampling)) if topk else build_engine(config)
    if late and not isinstance(engine._parts.lockstep.programs, LatePrograms):
        delay(engine)
    requests = with_return_tree(grid_requests(sampling, 8))
    result = run(engine, requests)
    assert result.completions == plain_run(sampling).completions
    assert check_paths(requests, result) > 20
    sizes = {len(output.tree.parents) for r in result.outputs.values() for output in r if output.tree is not None}
    assert sizes == {draft_tree_size(engine)}


def draft_tree_size(engine: Engine) -> int:
    return engine._parts.resolved.shape.num_draft_tokens


@pytest.mark.parametrize(("topk", "num_steps", "sampling"), [(1, 4, "greedy"), (3, 3, "0.8")])
@pytest.mark.parametrize("late", [False, True])
def test_returned_tree_nodes_match_the_reference_draft(
    topk: int, num_steps: int, sampling: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected trees come from an EAGLE-2 expansion with the reference draft; their key is the text so far."""
    target, draft = tiny_pair()
    known_texts = dict(list(plain_texts(sampling).items())[:3])
    checker = ReferenceChecker(target_reference(target), draft_reference(draft, target), known_texts)
    expected_trees: dict[tuple[int, ...], Expected] = {}
    original_expected = ReferenceChecker._expected

    def recording_expected(
        self: ReferenceChecker, engine: Engine, text: list[int], fused: object, committed: int, *rest: object
    ) -> Expected:
        expected_tree = original_expected(self, engine, text, fused, committed, *rest)  # type: ignore[arg-type]
        expected_trees[tuple(text[: committed + 1])] = expected_tree
        return expected_tree

    monkeypatch.setattr(ReferenceChecker, "_expected", recording_expected)
    engine = build_engine(config_of(target, draft, topk, num_steps))
    if late and not isinstance(engine._parts.lockstep.programs, LatePrograms):
        delay(engine)
    checker.attach(engine)
    requests, tree_count = with_return_tree(grid_requests(sampling, 3)), 0
    result = run(engine, requests, checker)
    for request in requests:
        known_tokens = request.prompt_token_ids
        for output in result.outputs[request.request_id]:
            if output.tree is not None:
                expected = expected_trees[known_tokens]
                assert list(output.tree.token_ids) == expected.tokens
                assert list(output.tree.parents) == expected.parents
                assert output.tree.forced == 0
                tree_count += 1
            known_tokens += output.token_ids
    assert tree_count > 10


def test_returned_trees_have_the_depth_of_each_batch_tier() -> None:
    """The more requests a step has, the fewer levels its trees have, down to none. Each tree has the levels of its own
    step.
    """
    config = config_of(*tiny_pair(), 1, 3, speculative_batch_tiers={2: 2, 4: 1, 6: 0})
    depths: set[int] = set()
    for requests in (with_return_tree(grid_requests("0.8", 8)), with_return_tree(grid_requests("0.8", 1))):
        result = run(build_engine(config), requests)
        assert result.completions == {
            request.request_id: plain_run("0.8").completions[request.request_id] for request in requests
        }
        check_paths(requests, result)
        trees = [output.tree for outputs in result.outputs.values() for output in outputs if output.tree is not None]
        depths |= {max(len(path_of(tree, node)) for node in range(len(tree.parents))) for tree in trees}
    assert depths == {0, 1, 2, 3}


def test_retracted_and_resumed_requests_get_valid_returned_trees() -> None:
    target, draft = tiny_pair()
    requests = with_return_tree(grid_requests("0.8", 8))
    result = run(build_engine(scarce_config(config_of(target, draft, 3, 3), requests, 6)), requests)
    assert result.retracted > 0 and result.completions == plain_run("0.8").completions
    sent_tokens = plain_run("0.8").tokens["r2"][:5]
    resumed_request = replace(
        requests[2], prompt_token_ids=requests[2].prompt_token_ids + tuple(sent_tokens), resumed_tokens=len(sent_tokens)
    )
    resumed = run(build_engine(config_of(target, draft, 3, 3)), [resumed_request])
    assert [*sent_tokens, *resumed.tokens["r2"]] == plain_run("0.8").tokens["r2"]
    assert check_paths([resumed_request], resumed) > 2


def allowed_tokens(grammar: str, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that an automaton allows after these tokens."""
    states, state = json.loads(grammar), 0
    for token in tokens:
        state = states[state][str(token)] if state >= 0 else state
    return [int(token) for token in states[state]] if state >= 0 else [EOS]


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (3, 3)])
def test_forced_nodes_are_the_only_tokens_allowed_by_the_grammar(topk: int, num_steps: int) -> None:
    """A tree has its drafted nodes first, then the forced nodes. The token of each forced node must be the only one
    that the grammar allows there.
    """
    transitions = [{str(2 + i % 20): i + 1} if i % 10 else {"5": i + 1, "6": i + 1} for i in range(40)]
    grammars = [json.dumps([*transitions, {str(EOS): -1}]), automaton(0), automaton(3)]
    constrained_requests = [
        make_request(f"{i}", prompts()[i], SAMPLING["0.8"], seed=8, max_tokens=24, grammar=grammar, return_tree=True)
        for i, grammar in enumerate(grammars)
    ]
    free_request = make_request(
        "free", prompts()[3], SAMPLING["0.8"], seed=8, max_tokens=9, ignore_eos=True, return_tree=True
    )
    engine = with_automata(build_engine(config_of(*tiny_pair(), topk, num_steps)))
    result, drafted_nodes = run(engine, [*constrained_requests, free_request]), draft_tree_size(engine)
    requests_without_trees = [
        replace(sent_request, params=replace(sent_request.params, return_tree=False))
        for sent_request in [*constrained_requests, free_request]
    ]
    assert (
        result.completions
        == run(
            with_automata(build_engine(config_of(*tiny_pair(), topk, num_steps))), requests_without_trees
        ).completions
    )
    check_paths([*constrained_requests, free_request], result)
    forced = accepted = 0
    for sent_request in constrained_requests:
        output_tokens: list[int] = []
        for output in result.outputs[sent_request.request_id]:
            tree = output.tree
            if tree is not None:
                assert len(tree.parents) == drafted_nodes + tree.forced
                for node in range(drafted_nodes, len(tree.parents)):
                    path_tokens = path_of(tree, tree.parents[node])
                    assert allowed_tokens(str(sent_request.params.grammar), [*output_tokens, *path_tokens]) == [
                        tree.token_ids[node]
                    ]
                forced += tree.forced
                accepted += sum(node >= drafted_nodes for node in tree.accepted)
            output_tokens += output.token_ids
    assert forced > 12 and accepted > 6
    assert all(output.tree.forced == 0 for output in result.outputs["free"] if output.tree is not None)


def test_steps_without_return_tree_requests_output_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    config, steps_without_trees = config_of(*tiny_pair(), 3, 3), list[bool]()
    engine = build_engine(config)
    original_commit = Committer.commit

    def recording_commit(self: Committer, step: StepInFlight, *rest: Any) -> object:
        assert step.output is not None
        steps_without_trees.append(step.output.trees is None)
        return original_commit(self, step, *rest)

    monkeypatch.setattr(Committer, "commit", recording_commit)
    run(engine, grid_requests("0.8", 3))
    assert all(steps_without_trees) and len(steps_without_trees) > 4
    run(
        engine,
        [
            replace(request, request_id=f"{request.request_id}/2")
            for request in with_return_tree(grid_requests("0.8", 3))
        ],
    )
    assert not all(steps_without_trees)
    params = [request.params for request in grid_requests("0.8", 3)]
    assert SamplingMode.TREES not in mode_of(params)
    assert mode_of([*params, replace(params[0], return_tree=True)]) == mode_of(params) | SamplingMode.TREES
