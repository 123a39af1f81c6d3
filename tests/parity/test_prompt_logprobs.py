"""Log-probabilities of prompt tokens equal those of a dense forward of the target, however the prompt is computed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from cluster.engine import Engine, StepResult, build_engine
from cluster.engine.prefill import RemainingRows
from cluster.engine.schedule import Schedule
from cluster.request import Request, RequestParams, SequenceOutput, TokenLogprob
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
from tests.parity.reference import target_reference
from tests.parity.test_transformers import TARGETS, oracle
from tests.support.tiny_checkpoints import target_folder

TOLERANCE = 1e-9


@cache
def expected(folder: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """Return the log-probabilities `[P - 1, V]` after each token of a prompt but the last, from the dense reference."""
    return target_reference(folder).run(list(prompt)).logits[:-1].log_softmax(-1)


def prompt_logprobs_of(outputs: Sequence[SequenceOutput]) -> list[TokenLogprob]:
    """Return the prompt log-probabilities of a request. They must be in its first output and in no other."""
    assert not any(output.prompt_logprobs for output in outputs[1:])
    return list(outputs[0].prompt_logprobs)


def check(lines: Sequence[TokenLogprob], prompt: Sequence[int], top: int, rows: torch.Tensor) -> None:
    assert [line.token_id for line in lines] == list(prompt[1:])
    for line, row in zip(lines, rows, strict=True):
        assert line.logprob == pytest.approx(float(row[line.token_id]), abs=TOLERANCE)
        best, _ = row.topk(top)
        assert [p for _, p in line.top] == pytest.approx(best.tolist(), abs=TOLERANCE)
        assert all(p == pytest.approx(float(row[token]), abs=TOLERANCE) for token, p in line.top)
        assert line.rank == int((row >= row[line.token_id]).sum())
        if line.rank <= top:
            assert line.top[line.rank - 1] == (line.token_id, line.logprob), "the top list has another number"


def scoring_requests(sampling: str, count: int = 8, **changes: Any) -> list[Request]:
    """Return the requests of the grid. Two in three ask for prompt log-probabilities."""
    requests = []
    for i, request in enumerate(grid_requests(sampling, count)):
        options = {"prompt_logprobs": i % 4} if i % 3 != 1 else {}
        requests.append(replace(request, params=replace(request.params, **options, **changes)))
    return requests


def check_all(result: RunResult, requests: Sequence[Request], sampling: str) -> None:
    """Check that the tokens are those of plain decoding, and that the requests which ask for prompt log-probabilities,
    and no others, get those of the reference.
    """
    plain_result, folder = plain_run(sampling), tiny_pair()[0]
    for request in requests:
        name = request.request_id.split("/")[0]
        assert result.completions[request.request_id] == plain_result.completions[name]
        lines, top = prompt_logprobs_of(result.outputs[request.request_id]), request.params.prompt_logprobs
        if top is None:
            assert not lines
        else:
            check(lines, request.prompt_token_ids, top, expected(folder, request.prompt_token_ids))


def engine_of(topk: int, kind: str = "corrected", **settings: Any) -> Engine:
    target, draft = tiny_pair()
    if not topk:
        return build_engine(config_of(target, **settings))
    return speculative_engine(config_of(target, draft, topk, 3, **settings), kind, plain_texts("0.8"))


@pytest.mark.parametrize("chunk", [1, 5, 16, -1])
@pytest.mark.parametrize("topk", [0, 1, 3])
def test_prompt_logprobs_do_not_depend_on_chunk_size(topk: int, chunk: int) -> None:
    engine = engine_of(topk, chunked_prefill_size=chunk)
    requests = scoring_requests("0.8")
    check_all(run(engine, requests), requests, "0.8")


@pytest.mark.parametrize("topk", [0, 3])
def test_scored_prompt_rows_per_step_are_bounded(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, scored_rows = engine_of(topk, chunked_prefill_size=-1), []
    scheduler = engine._parts.scheduler
    original_remaining_rows, original_schedule = scheduler.prefill._remaining_rows, scheduler.schedule

    def limited_remaining_rows(*args: Any) -> RemainingRows:
        return replace(original_remaining_rows(*args), scored_rows=7)

    def counting_schedule(*args: int) -> Schedule:
        plan = original_schedule(*args)
        scored_rows.append(sum(chunk.scored for chunk in plan.chunks))
        return plan

    monkeypatch.setattr(scheduler.prefill, "_remaining_rows", limited_remaining_rows)
    monkeypatch.setattr(scheduler, "schedule", counting_schedule)
    requests = scoring_requests("greedy")
    check_all(run(engine, requests), requests, "greedy")
    assert max(scored_rows) == 7


@pytest.mark.parametrize("topk", [0, 1, 3])
def test_prompt_logprobs_are_recomputed_for_cached_prefixes(topk: int) -> None:
    """The same prompts run three times: twice together, then one by one. The numbers must be the same, whatever is in
    the cache.
    """
    engine = engine_of(topk, chunked_prefill_size=16)
    request_lists = [scoring_requests("0.8"), scoring_requests("0.8"), scoring_requests("0.8")]
    rounds = [
        [replace(request, request_id=f"{request.request_id}/{turn}") for request in requests]
        for turn, requests in enumerate(request_lists)
    ]
    first_result = run(engine, rounds[0])
    second_result = run(engine, rounds[1])
    single_results = [run(engine, [request]) for request in rounds[2]]
    check_all(first_result, rounds[0], "0.8")
    check_all(second_result, rounds[1], "0.8")
    for request, single_result in zip(rounds[2], single_results, strict=True):
        check_all(single_result, [request], "0.8")
        scored = request.params.prompt_logprobs is not None and len(request.prompt_token_ids) > 1
        assert not scored or all(output.cached_tokens == 0 for output in single_result.outputs[request.request_id])
    unscored_requests = [request for request in rounds[1] if request.params.prompt_logprobs is None]
    assert any(second_result.last[request.request_id].cached_tokens for request in unscored_requests), (
        "unscored prompts are not cached"
    )


@pytest.mark.parametrize("topk", [0, 1, 3])
@pytest.mark.parametrize("more", [1, 3])
def test_prompt_logprobs_survive_retraction(topk: int, more: int) -> None:
    requests = scoring_requests("0.8")
    engine = engine_of(topk, chunked_prefill_size=9)
    config = scarce_config(engine.config, requests, more)
    engine = speculative_engine(config, "corrected", plain_texts("0.8")) if topk else build_engine(config)
    result = run(engine, requests)
    assert result.retracted > 0
    check_all(result, requests, "0.8")


def test_retracted_prompt_continues_scoring_without_recomputing_all_rows() -> None:
    """After a retraction, rows that are scored already may come from the cache; only the other rows are computed."""
    engine = engine_of(0, chunked_prefill_size=10)
    request = replace(
        scoring_requests("greedy", 1)[0], params=replace(scoring_requests("greedy", 1)[0].params, prompt_logprobs=2)
    )
    retracted = prompt_rows = 0

    def retract(engine: Engine, step: StepResult) -> None:
        nonlocal retracted, prompt_rows
        prompt_rows += step.stats.prompt_rows
        sequence = next(iter(engine._sequences.values()), None)
        if sequence is not None and sequence.lease is not None and sequence.prefilling and retracted < 4:
            engine._parts.scheduler.decode.publish()
            engine._parts.scheduler.decode._retract(sequence)
            retracted += 1

    result = run(engine, [request], retract)
    assert retracted == 4
    check_all(result, [request], "greedy")
    recomputed_per_retraction = (
        engine.config.page_size + 10 * engine._parts.lockstep.max_in_flight
    )  # the rows of an unfinished page and of the steps under way
    assert len(request.prompt_token_ids) <= prompt_rows < len(request.prompt_token_ids) + 4 * recomputed_per_retraction


@pytest.mark.parametrize("topk", [0, 3])
def test_resumed_request_returns_logprobs_of_the_original_prompt_only(topk: int) -> None:
    engine, template = engine_of(topk), scoring_requests("0.8", 1)[0]
    template = replace(template, params=replace(template.params, prompt_logprobs=3))
    plain_tokens = plain_run("0.8").tokens["r0"]
    for sent_count in (1, 4):
        resumed_request = replace(
            template,
            request_id=f"r0/{sent_count}",
            prompt_token_ids=template.prompt_token_ids + tuple(plain_tokens[:sent_count]),
            resumed_tokens=sent_count,
        )
        result = run(engine, [resumed_request])
        assert result.tokens[resumed_request.request_id] == plain_tokens[sent_count:]
        lines = prompt_logprobs_of(result.outputs[resumed_request.request_id])
        check(lines, template.prompt_token_ids, 3, expected(tiny_pair()[0], template.prompt_token_ids))


@pytest.mark.parametrize("topk", [0, 1, 3])
def test_request_for_zero_tokens_ends_with_its_prompt_logprobs(topk: int) -> None:
    """A request with `max_tokens` 0 ends with its prompt. It needs no window, so its prompt may fill the context."""
    engine = engine_of(topk, context_length=66, chunked_prefill_size=16)
    params = RequestParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    scored_requests = [make_request(f"{i}", prompt, params) for i, prompt in enumerate(prompts())]
    params = replace(params, prompt_logprobs=None)
    unscored_requests = [make_request(f"{i}/silent", prompt, params) for i, prompt in enumerate(prompts())]
    result = run(engine, [*scored_requests, *unscored_requests])
    assert len(prompts()[0]) == 66
    for sent_request in (*scored_requests, *unscored_requests):
        last_output = result.last[sent_request.request_id]
        assert (result.tokens[sent_request.request_id], last_output.finish_reason) == ([], "length")
        assert len(result.outputs[sent_request.request_id]) == 1
    for sent_request in scored_requests:
        rows = expected(tiny_pair()[0], sent_request.prompt_token_ids)
        check(prompt_logprobs_of(result.outputs[sent_request.request_id]), sent_request.prompt_token_ids, 1, rows)


@pytest.mark.parametrize("name", TARGETS)
def test_prompt_logprobs_of_tiny_targets_match_transformers(name: str) -> None:
    """The tolerance is large because transformers keeps its rope angles in float32."""
    folder = target_folder(seed=3, **TARGETS[name])
    prompt = torch.randint(2, 64, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = build_engine(config_of(folder, chunked_prefill_size=32))
    result = run(engine, [make_request("0", prompt, SAMPLING["0.8"], max_tokens=1, prompt_logprobs=20)])
    with torch.inference_mode():
        rows = oracle(folder)(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
    lines = prompt_logprobs_of(result.outputs["0"])
    assert [line.token_id for line in lines] == prompt[1:]
    for line, row in zip(lines, rows, strict=True):
        assert line.logprob == pytest.approx(float(row[line.token_id]), abs=2e-3)
        assert all(p == pytest.approx(float(row[token]), abs=2e-3) for token, p in line.top)
        rank_bounds = (row > row[line.token_id] + 4e-3).sum() + 1, (row >= row[line.token_id] - 4e-3).sum()
        assert rank_bounds[0] <= line.rank <= rank_bounds[1]


@pytest.mark.parametrize("seed", range(2))
def test_aborts_do_not_change_prompt_logprobs_of_other_requests(seed: int) -> None:
    random, engine = Random(seed), engine_of(3, chunked_prefill_size=6)
    requests = scoring_requests("0.8")
    aborted_names = set(random.sample([request.request_id for request in requests], 3))
    abort_steps = {name: random.randint(0, 12) for name in aborted_names}

    def abort(engine: Engine, _: StepResult) -> None:
        for name in [name for name, step in abort_steps.items() if engine._loop.steps >= step]:
            engine.abort(name)

    result = run(engine, requests, abort)
    remaining_requests = [request for request in requests if request.request_id not in aborted_names]
    check_all(result, remaining_requests, "0.8")
