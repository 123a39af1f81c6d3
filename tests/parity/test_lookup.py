"""Looked-up text in a draft's tree changes no token, and each tree holds what followed the last tokens before."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cluster.config import ConfigError, EngineConfig
from cluster.engine import Engine, build_engine
from cluster.request import LogitAdjustments, Request, StepTree
from tests.parity.harness import (
    SAMPLING,
    VOCAB,
    config_of,
    grid_requests,
    make_request,
    plain_run,
    run,
    scarce_config,
    tiny_pair,
)
from tests.parity.trees import adaptive, engine_with_trees
from tests.support.late_device import LatePrograms, delay
from tests.support.pairwise import covering
from tests.support.slow_cases import every_nth_fast
from tests.unit.spec.test_token_history import expected_continuation

STEPS = 3


def lookup_config(topk: int = 1, tokens: int = 5, **settings: Any) -> EngineConfig:
    return adaptive(config_of(*tiny_pair(), topk, STEPS, speculative_lookup_tokens=tokens, **settings))


def lookup_engine(config: EngineConfig, numbers: tuple[int, ...]) -> Engine:
    """Return an engine whose steps take the tiers with looked-up tokens that have these `numbers`, in turns, and then
    no tree. Where requests do not share rows, there is one such tier, otherwise there are three.
    """
    resolved = build_engine(config)._parts.resolved
    count = len(resolved.tiers) - 1 - resolved.last_drafted_tier
    tiers = [resolved.last_drafted_tier + 1 + number % count for number in numbers]
    return engine_with_trees(lambda: build_engine(config), [*tiers, 0] * 400)


@pytest.mark.parametrize(
    ("topk", "tokens", "sampling", "memory", "kernels", "page_size", "overlap"),
    every_nth_fast(
        2,
        covering(
            [
                (1, 2, 4),
                (3, 5, 9),
                tuple(SAMPLING),
                ("ample", "scarce", "cached"),
                ("torch", "c"),
                (1, 4),
                (False, True),
            ]
        ),
    ),
)
def test_tokens_equal_plain_decoding(
    topk: int, tokens: int, sampling: str, memory: str, kernels: str, page_size: int, overlap: bool
) -> None:
    requests = grid_requests(sampling, 8)
    config = lookup_config(topk, tokens, page_size=page_size, attention_backend=kernels)
    if memory == "scarce":
        config = scarce_config(config, requests)
    engine = lookup_engine(config, (0, 1, 2, 1, 0, 2))
    if overlap and not isinstance(engine._parts.lockstep.programs, LatePrograms):
        delay(engine)
    result = run(engine, requests)
    expected = plain_run(sampling).completions
    assert result.completions == expected
    if memory != "scarce":
        assert not result.retracted
    elif not isinstance(engine._parts.lockstep.programs, LatePrograms):
        # With steps in flight, fewer requests run at once, and the pages may be enough for them.
        assert result.retracted
    if memory == "cached":
        again = [replace(request, request_id=f"{request.request_id}/2") for request in requests]
        second_result = run(engine, again)
        assert {name.split("/")[0]: end for name, end in second_result.completions.items()} == expected
    engine.check_pages()


def paths_of(tree: StepTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree.token_ids)):
        paths.append((*paths[tree.parents[node]], tree.token_ids[node]))
    return set(paths)


@pytest.mark.parametrize("topk", [1, 2])
def test_each_tree_holds_what_followed_the_last_tokens(topk: int) -> None:
    """The second round of requests uses table rows that held other texts before, and prompts from the prefix cache.

    The steps verify all nodes: a returned tree has only nodes that were verified.
    """
    engine = lookup_engine(lookup_config(topk, tokens=4), (2,) * 6)
    requests = [replace(r, params=replace(r.params, return_tree=True)) for r in grid_requests("0.8", 6)]
    compared = 0
    for repeat in range(2):
        named = [replace(request, request_id=f"{request.request_id}/{repeat}") for request in requests]
        result = run(engine, named)
        for request in named:
            text = list(request.prompt_token_ids)
            for output in result.outputs[request.request_id]:
                found, matched = expected_continuation(text, 4)
                if output.tree is not None and matched and output.tree.token_ids[1:]:
                    assert {tuple(found[:length]) for length in range(5)} <= paths_of(output.tree)
                    compared += 1
                text += output.token_ids
    assert compared > 10


def copying_requests(count: int, **adjustments: Any) -> list[Request]:
    """Return requests whose target repeats one token, because this token has a large bias. So the looked-up tokens are
    right, and they are more than the draft proposes.
    """
    random, requests = Random(5), []
    for i in range(count):
        prompt = [random.randrange(2, VOCAB) for _ in range(9)]
        adjusted = LogitAdjustments(bias=((prompt[-1], 20.0),), **adjustments)
        params = replace(SAMPLING["greedy"], adjustments=adjusted)
        requests.append(make_request(f"{i}", prompt, params, seed=i, max_tokens=40, ignore_eos=True))
    return requests


def test_accepted_tokens_that_the_draft_missed_are_counted() -> None:
    requests = copying_requests(4)
    plain = run(build_engine(config_of(tiny_pair()[0])), requests)
    engine = lookup_engine(lookup_config(), (2,) * 6)
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    accepted = looked_up = 0
    while engine.has_work:
        step = engine.step()
        accepted += sum(step.stats.accepted_by_depth)
        looked_up += step.stats.looked_up_tokens
        for output in step.outputs:
            tokens[output.request_id] += output.token_ids
    assert tokens == plain.tokens
    assert accepted > looked_up > 20, "the cases hold too few repeated texts"


def test_host_that_is_a_step_ahead_expects_all_looked_up_tokens() -> None:
    """A step may commit more tokens than the draft has levels. The host begins the next step before it has read these
    tokens, and gives each request pages for the longest context that is possible.
    """
    requests = copying_requests(4)
    plain = run(build_engine(config_of(tiny_pair()[0])), requests)
    engine = lookup_engine(lookup_config(page_size=1), (2,) * 6)
    result = run(engine if isinstance(engine._parts.lockstep.programs, LatePrograms) else delay(engine), requests)
    assert result.completions == plain.completions
    assert max(len(output.token_ids) for output in result.outputs["0"]) > STEPS + 1


def test_penalties_apply_along_looked_up_text() -> None:
    requests = copying_requests(3, presence_penalty=0.4, repetition_penalty=1.1, min_tokens=9)
    plain = run(build_engine(config_of(tiny_pair()[0])), requests)
    assert run(lookup_engine(lookup_config(2), (2, 1)), requests).completions == plain.completions


def test_no_more_tokens_are_accepted_than_a_request_allows() -> None:
    requests = [
        replace(request, params=replace(request.params, max_draft_tokens=limit))
        for request, limit in zip(copying_requests(4), (0, 1, 2, None), strict=True)
    ]
    plain = run(build_engine(config_of(tiny_pair()[0])), requests)
    result = run(lookup_engine(lookup_config(), (2,) * 6), requests)
    assert result.completions == plain.completions
    longest = [max(len(output.token_ids) for output in result.outputs[request.request_id]) for request in requests]
    assert longest[:3] == [1, 2, 3] and longest[3] > 3


def test_steps_with_a_grammar_have_no_looked_up_tokens() -> None:
    """Their trees have nodes for tokens that the grammar forces instead."""
    resolved = build_engine(lookup_config())._parts.resolved
    assert resolved.tiers[resolved.last_drafted_tier].lookup_tokens == 0
    assert resolved.tiers[resolved.last_drafted_tier + 1].lookup_tokens == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_mode": "fixed"}, "speculative_lookup_tokens needs trees that each step chooses"),
        ({"speculative_draft_model_path": None}, "speculative_lookup_tokens needs speculative_draft_model_path"),
        ({"speculative_lookup_tokens": 17}, "speculative_lookup_tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    fields = lookup_config().model_dump(exclude_unset=True) | settings
    if settings.get("speculative_draft_model_path", "") is None:
        fields = {name: value for name, value in fields.items() if name.startswith(("model", "speculative_lookup"))}
    with pytest.raises(ConfigError, match=message):
        build_engine(EngineConfig.from_kwargs(fields))


def test_looked_up_tokens_are_on_with_adaptive_trees_only_where_requests_can_share_rows() -> None:
    target, draft = tiny_pair()
    config = EngineConfig(model_path=target, speculative_draft_model_path=draft)
    assert build_engine(config).info().speculative_lookup_tokens == 8
    assert build_engine(config.model_copy(update={"speculative_mode": "fixed"})).info().speculative_lookup_tokens == 0
    off = config.model_copy(update={"speculative_lookup_tokens": 0})
    assert build_engine(off).info().speculative_lookup_tokens == 0
