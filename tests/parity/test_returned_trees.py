"""The trees that requests ask for: those of the reference, with the path of the tokens that came."""

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
from tests.late import LatePrograms, delay
from tests.pairwise import covering
from tests.parity.automata import EOS, automaton, walked
from tests.parity.harness import (
    SAMPLING,
    Run,
    config_of,
    grid_requests,
    plain_run,
    prompts,
    request,
    run,
    scarce,
    speculative,
    tiny_pair,
    truth,
)
from tests.parity.reference import draft_reference, target_reference
from tests.parity.watch import Expected, Watch


def asking(requests: Sequence[Request]) -> list[Request]:
    """All but the second ask for their trees."""
    return [replace(r, params=replace(r.params, return_tree=i != 1)) for i, r in enumerate(requests)]


def path_of(tree: StepTree, node: int) -> list[int]:
    """The tokens from below the root to a node."""
    return [] if node == 0 else [*path_of(tree, tree.parents[node]), tree.token_ids[node]]


def check_paths(asked: Sequence[Request], result: Run) -> int:
    """Hold every tree to its request's tokens; returns how many there were."""
    trees = 0
    for one in asked:
        before = [*one.prompt_token_ids]
        for output in result.outputs[one.request_id]:
            tree, tokens = output.tree, output.token_ids
            assert (tree is not None) == (one.params.return_tree and len(before) > len(one.prompt_token_ids))
            if tree is not None:
                trees += 1
                walk = tree.accepted
                assert tree.token_ids[0] == before[-1], "the root is the last token before the step"
                assert walk[0] == 0 and tree.parents[0] == 0
                assert [tree.parents[node] for node in walk[1:]] == list(walk[:-1])
                came = [*path_of(tree, walk[-1]), tree.bonus]
                assert list(tokens) == came[: len(tokens)]
                assert len(tokens) == len(came) or output.finish_reason is not None
                assert all(parent < node for node, parent in enumerate(tree.parents) if node)
                nodes = list(zip(tree.parents, tree.token_ids, strict=True))[1:]
                assert len(set(nodes)) == len(nodes), "no node twice"
            before += tokens
    return trees


@pytest.mark.parametrize(
    ("shape", "sampling", "late"), covering([[(0, 0), (1, 4), (3, 3)], list(SAMPLING), (False, True)])
)
def test_returned_tree_contains_the_output_path_and_tokens_are_unchanged(
    shape: tuple[int, int], sampling: str, late: bool
) -> None:
    (topk, num_steps), (target, draft) = shape, tiny_pair()
    config = config_of(target, draft, topk, num_steps) if topk else config_of(target)
    engine = speculative(config, "corrected", truth(sampling)) if topk else build_engine(config)
    if late and not isinstance(engine._parts.lockstep.programs, LatePrograms):
        delay(engine)
    asked = asking(grid_requests(sampling, 8))
    result = run(engine, asked)
    assert result.ended == plain_run(sampling).ended
    assert check_paths(asked, result) > 20
    sizes = {len(output.tree.parents) for r in result.outputs.values() for output in r if output.tree is not None}
    assert sizes == {config_nodes(engine)}


def config_nodes(engine: Engine) -> int:
    return engine._parts.resolved.shape.num_draft_tokens


@pytest.mark.parametrize(("topk", "num_steps", "sampling"), [(1, 4, "greedy"), (3, 3, "0.8")])
@pytest.mark.parametrize("late", [False, True])
def test_returned_tree_nodes_match_the_reference_draft(
    topk: int, num_steps: int, sampling: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE-2 expansion in a second implementation of the draft, by request and position."""
    target, draft = tiny_pair()
    known = dict(list(truth(sampling).items())[:3])
    watch = Watch(target_reference(target), draft_reference(draft, target), known)
    wanted: dict[tuple[int, ...], Expected] = {}
    true = Watch._expected

    def noting(self: Watch, engine: Engine, text: list[int], fused: object, at: int, *rest: object) -> Expected:
        found = true(self, engine, text, fused, at, *rest)  # type: ignore[arg-type]
        wanted[tuple(text[: at + 1])] = found
        return found

    monkeypatch.setattr(Watch, "_expected", noting)
    engine = build_engine(config_of(target, draft, topk, num_steps))
    if late and not isinstance(engine._parts.lockstep.programs, LatePrograms):
        delay(engine)
    watch.attach(engine)
    asked, seen = asking(grid_requests(sampling, 3)), 0
    result = run(engine, asked, watch)
    for one in asked:
        before = one.prompt_token_ids
        for output in result.outputs[one.request_id]:
            if output.tree is not None:
                reference = wanted[before]
                assert list(output.tree.token_ids) == reference.tokens
                assert list(output.tree.parents) == reference.parents
                assert output.tree.forced == 0
                seen += 1
            before += output.token_ids
    assert seen > 10


def test_returned_trees_have_the_depth_of_each_batch_tier() -> None:
    """Fewer levels with more requests, none with the most: each tree has the nodes of its own step."""
    config = config_of(*tiny_pair(), 1, 3, speculative_batch_tiers={2: 2, 4: 1, 6: 0})
    depths: set[int] = set()
    for asked in (asking(grid_requests("0.8", 8)), asking(grid_requests("0.8", 1))):
        result = run(build_engine(config), asked)
        assert result.ended == {one.request_id: plain_run("0.8").ended[one.request_id] for one in asked}
        check_paths(asked, result)
        trees = [output.tree for each in result.outputs.values() for output in each if output.tree is not None]
        depths |= {max(len(path_of(tree, node)) for node in range(len(tree.parents))) for tree in trees}
    assert depths == {0, 1, 2, 3}


def test_retracted_and_resumed_requests_get_valid_returned_trees() -> None:
    target, draft = tiny_pair()
    asked = asking(grid_requests("0.8", 8))
    result = run(build_engine(scarce(config_of(target, draft, 3, 3), asked, 6)), asked)
    assert result.retracted > 0 and result.ended == plain_run("0.8").ended
    sent = plain_run("0.8").tokens["r2"][:5]
    one = replace(asked[2], prompt_token_ids=asked[2].prompt_token_ids + tuple(sent), resumed_tokens=len(sent))
    resumed = run(build_engine(config_of(target, draft, 3, 3)), [one])
    assert [*sent, *resumed.tokens["r2"]] == plain_run("0.8").tokens["r2"]
    assert check_paths([one], resumed) > 2


def allowed(grammar: str, tokens: Sequence[int]) -> list[int]:
    """What may come after these tokens of a text of an automaton."""
    states, state = json.loads(grammar), 0
    for token in tokens:
        state = states[state][str(token)] if state >= 0 else state
    return [int(token) for token in states[state]] if state >= 0 else [EOS]


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (3, 3)])
def test_forced_nodes_are_the_only_tokens_allowed_by_the_grammar(topk: int, num_steps: int) -> None:
    """The nodes before are as many as are drafted; of the forced ones each is the only token that may come there."""
    lines = [{str(2 + i % 20): i + 1} if i % 10 else {"5": i + 1, "6": i + 1} for i in range(40)]
    grammars = [json.dumps([*lines, {str(EOS): -1}]), automaton(0), automaton(3)]
    asked = [
        request(f"{i}", prompts()[i], SAMPLING["0.8"], seed=8, max_tokens=24, grammar=grammar, return_tree=True)
        for i, grammar in enumerate(grammars)
    ]
    free = request("free", prompts()[3], SAMPLING["0.8"], seed=8, max_tokens=9, ignore_eos=True, return_tree=True)
    engine = walked(build_engine(config_of(*tiny_pair(), topk, num_steps)))
    result, drafted = run(engine, [*asked, free]), config_nodes(engine)
    plain = [replace(one, params=replace(one.params, return_tree=False)) for one in [*asked, free]]
    assert result.ended == run(walked(build_engine(config_of(*tiny_pair(), topk, num_steps))), plain).ended
    check_paths([*asked, free], result)
    forced = accepted = 0
    for one in asked:
        before: list[int] = []
        for output in result.outputs[one.request_id]:
            tree = output.tree
            if tree is not None:
                assert len(tree.parents) == drafted + tree.forced
                for node in range(drafted, len(tree.parents)):
                    above = path_of(tree, tree.parents[node])
                    assert allowed(str(one.params.grammar), [*before, *above]) == [tree.token_ids[node]]
                forced += tree.forced
                accepted += sum(node >= drafted for node in tree.accepted)
            before += output.token_ids
    assert forced > 12 and accepted > 6
    assert all(output.tree.forced == 0 for output in result.outputs["free"] if output.tree is not None)


def test_steps_without_return_tree_requests_output_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = config_of(*tiny_pair(), 3, 3), list[bool]()
    engine = build_engine(config)
    true = Committer.commit

    def noting(self: Committer, step: StepInFlight, *rest: Any) -> object:
        assert step.output is not None
        seen.append(step.output.trees is None)
        return true(self, step, *rest)

    monkeypatch.setattr(Committer, "commit", noting)
    run(engine, grid_requests("0.8", 3))
    assert all(seen) and len(seen) > 4
    run(engine, [replace(one, request_id=f"{one.request_id}/2") for one in asking(grid_requests("0.8", 3))])
    assert not all(seen)
    params = [one.params for one in grid_requests("0.8", 3)]
    assert SamplingMode.TREES not in mode_of(params)
    assert mode_of([*params, replace(params[0], return_tree=True)]) == mode_of(params) | SamplingMode.TREES
