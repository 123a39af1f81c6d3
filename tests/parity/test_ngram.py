"""N-gram speculation gives the tokens of plain decoding, and proposes what followed the last tokens before."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cluster.config import ConfigError, EngineConfig
from cluster.engine import Engine, build_engine
from cluster.request import LogitAdjustments
from cluster.spec.ngram import NgramDraft
from tests.parity.harness import (
    SAMPLING,
    config_of,
    grid_requests,
    make_request,
    plain_run,
    run,
    scarce_config,
    tiny_pair,
)
from tests.parity.trees import adaptive, engine_with_random_trees
from tests.support.pairwise import covering
from tests.unit.spec.test_token_history import expected_continuation


def ngram_config(**settings: Any) -> EngineConfig:
    return config_of(tiny_pair()[0], speculative_algorithm="NGRAM", **settings)


@pytest.mark.parametrize(
    ("sampling", "steps", "memory", "chunk", "trees", "page_size"),
    covering([tuple(SAMPLING), (1, 4, 9), ("ample", "scarce", "cached"), (7, -1), ("fixed", "adaptive"), (1, 4)]),
)
def test_ngram_tokens_equal_plain_decoding(
    sampling: str, steps: int, memory: str, chunk: int, trees: str, page_size: int
) -> None:
    requests = grid_requests(sampling, 8)
    config = ngram_config(speculative_num_steps=steps, chunked_prefill_size=chunk, page_size=page_size)
    if memory == "scarce":
        config = scarce_config(config, requests)
    if trees == "adaptive":
        engine = engine_with_random_trees(lambda: build_engine(adaptive(config)), seed=2)
    else:
        engine = build_engine(config)
    result = run(engine, requests)
    expected = plain_run(sampling).completions
    assert result.completions == expected
    assert bool(result.retracted) == (memory == "scarce")
    if memory != "scarce":  # otherwise the row of a retracted request ends in the middle of its text
        check_histories(engine, requests, result.tokens)
    if memory == "cached":
        again = [replace(request, request_id=f"{request.request_id}/2") for request in requests]
        second_result = run(engine, again)
        assert {name.split("/")[0]: end for name, end in second_result.completions.items()} == expected
        assert sum(output.cached_tokens for output in second_result.last.values()) > 0


def check_histories(engine: Engine, requests: list[Any], tokens: dict[str, list[int]]) -> None:
    """Check that the table holds the texts of the requests that used its rows last. The last step of a request may
    commit tokens after its end.
    """
    draft = engine.lockstep.step._draft
    assert isinstance(draft, NgramDraft)
    texts = [[*request.prompt_token_ids, *tokens[request.request_id]] for request in requests]
    rows = [row for row in draft.history.tokens[:-1].tolist() if any(row)]
    assert len(rows) > 1
    matching = sum(any(row[: len(text)] == text for text in texts) for row in rows)
    assert matching == len(rows), "a row holds the text of no request"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_each_tree_holds_what_followed_the_last_tokens(prefix_cache: bool) -> None:
    engine = build_engine(ngram_config(speculative_num_steps=4, disable_radix_cache=not prefix_cache))
    requests = [replace(r, params=replace(r.params, return_tree=True)) for r in grid_requests("0.8", 6)]
    for repeat in range(2):  # the second time, prompts come from the prefix cache
        named = [replace(request, request_id=f"{request.request_id}/{repeat}") for request in requests]
        result, compared = run(engine, named), 0
        for request in named:
            text = list(request.prompt_token_ids)
            for output in result.outputs[request.request_id]:
                if output.tree is not None:
                    nodes = list(output.tree.token_ids)
                    assert nodes == [text[-1], *expected_continuation(text, len(nodes) - 1)[0]]
                    compared += 1
                text += output.token_ids
        assert compared > 30
    assert set(result.accept_lens) >= {1, 2}


def test_ngram_keeps_tokens_with_penalties_and_bias() -> None:
    random = Random(3)
    prompt = [random.randrange(2, 24) for _ in range(30)] * 2
    adjusted = replace(SAMPLING["0.8"], adjustments=LogitAdjustments(0.4, 0.3, 1.2, ((3, 1.0),), min_tokens=9))
    requests = [make_request(f"{i}", prompt[i:], adjusted, seed=i, max_tokens=40) for i in range(3)]
    plain = run(build_engine(config_of(tiny_pair()[0])), requests)
    assert run(build_engine(ngram_config()), requests).completions == plain.completions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_draft_model_path": "x"}, "NGRAM looks up tokens of the request and has no draft"),
        ({"speculative_eagle_topk": 2}, "speculative_eagle_topk must be 1"),
        ({"speculative_token_map": "x.json"}, "speculative_token_map needs speculative_draft_model_path"),
        ({"speculative_num_draft_tokens": 3, "speculative_num_steps": 4}, "must be speculative_num_steps"),
    ],
)
def test_settings_that_do_not_fit_ngram_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(EngineConfig.from_kwargs(ngram_config().model_dump(exclude_unset=True) | settings))


def test_ngram_is_set_as_in_vllm() -> None:
    config = EngineConfig.from_kwargs(
        {"model": tiny_pair()[0], "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    )
    assert (config.speculative_algorithm, config.speculative_num_steps) == ("NGRAM", 3)
