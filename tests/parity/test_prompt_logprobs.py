"""Log-probabilities of a prompt's tokens are those of the target's own forward, however the prompt is computed."""

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
from tests.parity.reference import target_reference
from tests.parity.test_transformers import TARGETS, oracle
from tests.tiny import target_folder

NEAR = 1e-9


@cache
def expected(folder: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """`[P - 1, V]` log-probabilities after all tokens of a prompt but the last, by the dense second implementation."""
    return target_reference(folder).run(list(prompt)).logits[:-1].log_softmax(-1)


def told(outputs: Sequence[SequenceOutput]) -> list[TokenLogprob]:
    """What came of the prompt: with the first output, and never again."""
    assert not any(output.prompt_logprobs for output in outputs[1:])
    return list(outputs[0].prompt_logprobs)


def check(lines: Sequence[TokenLogprob], prompt: Sequence[int], top: int, rows: torch.Tensor) -> None:
    assert [line.token_id for line in lines] == list(prompt[1:])
    for line, row in zip(lines, rows, strict=True):
        assert line.logprob == pytest.approx(float(row[line.token_id]), abs=NEAR)
        best, _ = row.topk(top)
        assert [p for _, p in line.top] == pytest.approx(best.tolist(), abs=NEAR)
        assert all(p == pytest.approx(float(row[token]), abs=NEAR) for token, p in line.top)
        assert line.rank == int((row >= row[line.token_id]).sum())
        if line.rank <= top:
            assert line.top[line.rank - 1] == (line.token_id, line.logprob), "the very same number"


def asked(sampling: str, count: int = 8, **changes: Any) -> list[Request]:
    """The requests of the grid, of which two in three ask for log-probabilities of their prompts."""
    made = []
    for i, one in enumerate(grid_requests(sampling, count)):
        wanted = {"prompt_logprobs": i % 4} if i % 3 != 1 else {}
        made.append(replace(one, params=replace(one.params, **wanted, **changes)))
    return made


def check_all(result: Run, requests: Sequence[Request], sampling: str) -> None:
    """The same tokens as without, and for those who asked what the target says of their prompts."""
    plain, folder = plain_run(sampling), tiny_pair()[0]
    for one in requests:
        name = one.request_id.split("/")[0]
        assert result.ended[one.request_id] == plain.ended[name]
        lines, top = told(result.outputs[one.request_id]), one.params.prompt_logprobs
        if top is None:
            assert not lines
        else:
            check(lines, one.prompt_token_ids, top, expected(folder, one.prompt_token_ids))


def engine_of(topk: int, kind: str = "corrected", **settings: Any) -> Engine:
    target, draft = tiny_pair()
    if not topk:
        return build_engine(config_of(target, **settings))
    return speculative(config_of(target, draft, topk, 3, **settings), kind, truth("0.8"))


@pytest.mark.parametrize("chunk", [1, 5, 16, -1])
@pytest.mark.parametrize("topk", [0, 1, 3])
def test_prompt_logprobs_do_not_depend_on_chunk_size(topk: int, chunk: int) -> None:
    engine = engine_of(topk, chunked_prefill_size=chunk)
    requests = asked("0.8")
    check_all(run(engine, requests), requests, "0.8")


@pytest.mark.parametrize("topk", [0, 3])
def test_scored_prompt_rows_per_step_are_bounded(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, most = engine_of(topk, chunked_prefill_size=-1), []
    scheduler = engine._parts.scheduler
    room, schedule = scheduler.prefill._remaining_rows, scheduler.schedule

    def narrow(*given: Any) -> RemainingRows:
        return replace(room(*given), scored_rows=7)

    def counted(*given: int) -> Schedule:
        plan = schedule(*given)
        most.append(sum(chunk.scored for chunk in plan.chunks))
        return plan

    monkeypatch.setattr(scheduler.prefill, "_remaining_rows", narrow)
    monkeypatch.setattr(scheduler, "schedule", counted)
    requests = asked("greedy")
    check_all(run(engine, requests), requests, "greedy")
    assert max(most) == 7


@pytest.mark.parametrize("topk", [0, 1, 3])
def test_prompt_logprobs_are_recomputed_for_cached_prefixes(topk: int) -> None:
    """The same prompts three times, in one go and one by one: the same numbers, whatever the cache holds by then."""
    engine = engine_of(topk, chunked_prefill_size=16)
    given = [asked("0.8"), asked("0.8"), asked("0.8")]
    rounds = [[replace(one, request_id=f"{one.request_id}/{n}") for one in each] for n, each in enumerate(given)]
    first = run(engine, rounds[0])
    again = run(engine, rounds[1])
    single = [run(engine, [one]) for one in rounds[2]]
    check_all(first, rounds[0], "0.8")
    check_all(again, rounds[1], "0.8")
    for one, alone in zip(rounds[2], single, strict=True):
        check_all(alone, [one], "0.8")
        scored = one.params.prompt_logprobs is not None and len(one.prompt_token_ids) > 1
        assert not scored or all(output.cached_tokens == 0 for output in alone.outputs[one.request_id])
    plain = [one for one in rounds[1] if one.params.prompt_logprobs is None]
    assert any(again.last[one.request_id].cached_tokens for one in plain), "the others still find their prefixes"


@pytest.mark.parametrize("topk", [0, 1, 3])
@pytest.mark.parametrize("more", [1, 3])
def test_prompt_logprobs_survive_retraction(topk: int, more: int) -> None:
    requests = asked("0.8")
    engine = engine_of(topk, chunked_prefill_size=9)
    config = scarce(engine.config, requests, more)
    engine = speculative(config, "corrected", truth("0.8")) if topk else build_engine(config)
    result = run(engine, requests)
    assert result.retracted > 0
    check_all(result, requests, "0.8")


def test_retracted_prompt_continues_scoring_without_recomputing_all_rows() -> None:
    """Rows whose scores are known already may come from the cache; the others are computed."""
    engine = engine_of(0, chunked_prefill_size=10)
    one = replace(asked("greedy", 1)[0], params=replace(asked("greedy", 1)[0].params, prompt_logprobs=2))
    retracted = rows = 0

    def after(engine: Engine, step: StepResult) -> None:
        nonlocal retracted, rows
        rows += step.stats.prompt_rows
        sequence = next(iter(engine._sequences.values()), None)
        if sequence is not None and sequence.lease is not None and sequence.prefilling and retracted < 4:
            engine._parts.scheduler.decode.publish()
            engine._parts.scheduler.decode._retract(sequence)
            retracted += 1

    result = run(engine, [one], after)
    assert retracted == 4
    check_all(result, [one], "greedy")
    again = (
        engine.config.page_size + 10 * engine._parts.lockstep.max_in_flight
    )  # less than a page, and what was under way
    assert len(one.prompt_token_ids) <= rows < len(one.prompt_token_ids) + 4 * again


@pytest.mark.parametrize("topk", [0, 3])
def test_resumed_request_returns_logprobs_of_the_original_prompt_only(topk: int) -> None:
    engine, base = engine_of(topk), asked("0.8", 1)[0]
    base = replace(base, params=replace(base.params, prompt_logprobs=3))
    text = plain_run("0.8").tokens["r0"]
    for sent in (1, 4):
        one = replace(
            base,
            request_id=f"r0/{sent}",
            prompt_token_ids=base.prompt_token_ids + tuple(text[:sent]),
            resumed_tokens=sent,
        )
        result = run(engine, [one])
        assert result.tokens[one.request_id] == text[sent:]
        lines = told(result.outputs[one.request_id])
        check(lines, base.prompt_token_ids, 3, expected(tiny_pair()[0], base.prompt_token_ids))


@pytest.mark.parametrize("topk", [0, 1, 3])
def test_request_for_zero_tokens_ends_with_its_prompt_logprobs(topk: int) -> None:
    """A request for 0 tokens ends with its prompt, also where that fills the context, and asks for no window."""
    engine = engine_of(topk, context_length=66, chunked_prefill_size=16)
    params = RequestParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    longest = [request(f"{i}", prompt, params) for i, prompt in enumerate(prompts())]
    params = replace(params, prompt_logprobs=None)
    silent = [request(f"{i}/silent", prompt, params) for i, prompt in enumerate(prompts())]
    result = run(engine, [*longest, *silent])
    assert len(prompts()[0]) == 66
    for one in (*longest, *silent):
        last = result.last[one.request_id]
        assert (result.tokens[one.request_id], last.finish_reason) == ([], "length")
        assert len(result.outputs[one.request_id]) == 1
    for one in longest:
        rows = expected(tiny_pair()[0], one.prompt_token_ids)
        check(told(result.outputs[one.request_id]), one.prompt_token_ids, 1, rows)


@pytest.mark.parametrize("name", TARGETS)
def test_prompt_logprobs_of_tiny_targets_match_transformers(name: str) -> None:
    """transformers keeps its rope angles in float32, hence the tolerance."""
    folder = target_folder(seed=3, **TARGETS[name])
    prompt = torch.randint(2, 64, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = build_engine(config_of(folder, chunked_prefill_size=32))
    result = run(engine, [request("0", prompt, SAMPLING["0.8"], max_tokens=1, prompt_logprobs=20)])
    with torch.inference_mode():
        rows = oracle(folder)(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
    lines = told(result.outputs["0"])
    assert [line.token_id for line in lines] == prompt[1:]
    for line, row in zip(lines, rows, strict=True):
        assert line.logprob == pytest.approx(float(row[line.token_id]), abs=2e-3)
        assert all(p == pytest.approx(float(row[token]), abs=2e-3) for token, p in line.top)
        near = (row > row[line.token_id] + 4e-3).sum() + 1, (row >= row[line.token_id] - 4e-3).sum()
        assert near[0] <= line.rank <= near[1]


@pytest.mark.parametrize("seed", range(2))
def test_aborts_do_not_change_prompt_logprobs_of_other_requests(seed: int) -> None:
    random, engine = Random(seed), engine_of(3, chunked_prefill_size=6)
    requests = asked("0.8")
    gone = set(random.sample([one.request_id for one in requests], 3))
    at = {name: random.randint(0, 12) for name in gone}

    def abort(engine: Engine, _: StepResult) -> None:
        for name in [name for name, step in at.items() if engine._loop.steps >= step]:
            engine.abort(name)

    result = run(engine, requests, abort)
    kept = [one for one in requests if one.request_id not in gone]
    check_all(result, kept, "0.8")
