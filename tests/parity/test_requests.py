"""Stop conditions, seeds, resumed requests, log-probabilities and counts do not depend on speculation."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from cluster.engine import Engine, build_engine
from cluster.request import Request
from tests.parity.harness import (
    GREEDY,
    SAMPLING,
    VOCAB,
    RunResult,
    config_of,
    grid_requests,
    make_request,
    plain_run,
    plain_texts,
    prompts,
    run,
    speculative_engine,
    tiny_pair,
)
from tests.support.tiny_checkpoints import letters_folder
from tests.unit.models.checkpoints import copy_of

KINDS = ["model", "corrected", "oracle"]


def engine_of(topk: int, num_steps: int, kind: str, sampling: str, rate: float = 0.9, **settings: object) -> Engine:
    config = config_of(*tiny_pair(), topk, num_steps, **settings)
    return speculative_engine(config, kind, plain_texts(sampling), rate)


def plain_engine(**settings: object) -> Engine:
    return build_engine(config_of(tiny_pair()[0], **settings))


@pytest.mark.parametrize(("topk", "num_steps", "sampling"), [(1, 5, "greedy"), (4, 3, "filtered"), (8, 5, "greedy")])
def test_stop_token_and_max_tokens_cut_accepted_runs_at_any_token(topk: int, num_steps: int, sampling: str) -> None:
    """Run a text with each of its distinct tokens as stop token, and with each `max_tokens` from 1 to 12."""
    templates = [r for r in grid_requests(sampling, 8) if r.params.ignore_eos][:2]
    plain_tokens = plain_run(sampling).tokens
    requests: list[Request] = []
    for request in templates:
        for token in sorted(set(plain_tokens[request.request_id])):
            params = replace(request.params, stop_token_ids=(token, 23))
            requests.append(replace(request, request_id=f"{request.request_id}/stop{token}", params=params))
        for count in range(1, 13):
            params = replace(request.params, max_tokens=count)
            requests.append(replace(request, request_id=f"{request.request_id}/max{count}", params=params))
    result = run(engine_of(topk, num_steps, "oracle", sampling), requests)
    for request in requests:
        full_tokens = plain_tokens[request.request_id.split("/")[0]]
        stop_positions = [i for i, t in enumerate(full_tokens) if t in request.params.stop_token_ids]
        tokens, reason, stop_reason = result.completions[request.request_id]
        if stop_positions:
            assert (tokens, reason, stop_reason) == (
                full_tokens[: stop_positions[0] + 1],
                "stop",
                full_tokens[stop_positions[0]],
            )
        else:
            assert (tokens, reason, stop_reason) == (full_tokens[: request.params.max_tokens], "length", None)
    assert max(result.accept_lens) == num_steps + 1, "no accepted path had the full length"


@pytest.mark.parametrize(("topk", "num_steps", "sampling"), [(1, 5, "greedy"), (4, 3, "filtered")])
@pytest.mark.parametrize("position", [3, 4, 5])
def test_eos_token_of_the_target_cuts_accepted_runs(
    topk: int, num_steps: int, sampling: str, position: int, tmp_path: Path
) -> None:
    """The config names a token of the first text as EOS. The target's generation config names token 1."""
    target, draft = tiny_pair()
    plain_tokens = plain_run(sampling).tokens
    eos_token = plain_tokens["r0"][position]
    config = config_of(copy_of(target, tmp_path / "target", eos_token_id=eos_token), draft, topk, num_steps)
    templates = [request for request in grid_requests(sampling, 8) if request.params.ignore_eos]
    requests = [replace(request, params=replace(request.params, ignore_eos=False)) for request in templates]
    result = run(speculative_engine(config, "oracle", plain_texts(sampling), 0.9), requests)
    for name, (tokens, reason, stop_reason) in result.completions.items():
        full_tokens = plain_tokens[name]
        end = next((i for i, token in enumerate(full_tokens) if token in (eos_token, 1)), None)
        if end is None:
            assert (tokens, reason, stop_reason) == (full_tokens, "length", None)
        else:
            assert (tokens, reason, stop_reason) == (full_tokens[: end + 1], "stop", full_tokens[end])
    assert result.completions["r0"][2] == eos_token
    assert max(result.accept_lens) == num_steps + 1, "no accepted path had the full length"


@pytest.mark.parametrize(("kind", "sampling"), zip(KINDS, SAMPLING, strict=True))
def test_stop_strings_cut_outputs_as_in_plain_decoding(kind: str, sampling: str) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    template = grid_requests(sampling, 8)[0]
    text = "".join(letters[t] for t in plain_run(sampling).tokens["r0"])
    stops = [(text[i : i + n],) for i in range(0, len(text) - 3, 2) for n in (1, 2, 3)] + [("zzz", text[5:8]), ("zz",)]
    requests = [
        replace(template, request_id=f"r0/{i}", params=replace(template.params, stop=stop))
        for i, stop in enumerate(stops)
    ]
    speculative_result = run(engine_of(4, 3, kind, sampling, tokenizer_path=letters_folder()), requests)
    plain_result = run(plain_engine(tokenizer_path=letters_folder()), requests)
    assert speculative_result.completions == plain_result.completions
    for request in requests:
        tokens, reason, stop_reason = speculative_result.completions[request.request_id]
        output_text = "".join(letters[t] for t in tokens)
        if reason == "stop":
            assert (
                stop_reason in request.params.stop
                and str(stop_reason) in output_text
                and str(stop_reason) not in output_text[:-1]
            )
        else:
            assert output_text == text and not any(stop in output_text for stop in request.params.stop)
    assert Counter(reason for _, reason, _ in speculative_result.completions.values())["stop"] >= len(requests) - 1


@pytest.mark.parametrize(("kind", "sampling"), zip(KINDS, SAMPLING, strict=True))
def test_resumed_request_continues_exactly_after_any_prefix(kind: str, sampling: str) -> None:
    """The client may have any number of output tokens. The same seed gives it the rest, with the same finish reason."""
    template = grid_requests(sampling, 3)[2]
    plain_tokens = plain_run(sampling).tokens["r2"]
    requests = [
        replace(
            template,
            request_id=f"r2/{n}",
            prompt_token_ids=template.prompt_token_ids + tuple(plain_tokens[:n]),
            resumed_tokens=n,
        )
        for n in range(len(plain_tokens) + 1)
    ]
    result = run(engine_of(4, 3, kind, sampling), requests)
    for n, request in enumerate(requests):
        assert result.tokens[request.request_id] == plain_tokens[n:]
        assert result.last[request.request_id].finish_reason == plain_run(sampling).last["r2"].finish_reason


def test_stop_string_across_the_resume_boundary_is_found() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    template = grid_requests("greedy", 1)[0]
    plain_tokens = plain_run("greedy").tokens["r0"]
    stop = "".join(letters[t] for t in plain_tokens[3:7])
    params = replace(template.params, stop=(stop,))
    for n in range(9):
        ids = template.prompt_token_ids + tuple(plain_tokens[:n])
        request = Request(f"r0/{n}", ids, params, resumed_tokens=n)
        result = run(engine_of(4, 3, "corrected", "greedy", tokenizer_path=letters_folder()), [request])
        assert result.completions[f"r0/{n}"] == (plain_tokens[n:7], "stop", stop)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_same_tokens_in_any_batch(kind: str) -> None:
    templates = grid_requests("0.8", 8)
    random = Random(5)
    engine = engine_of(4, 3, kind, "0.8", chunked_prefill_size=16)
    for turn in range(3):
        batch_templates = random.sample(templates, random.randint(1, 8))
        batch = [replace(template, request_id=f"{template.request_id}/{turn}") for template in batch_templates]
        batch += [make_request(f"r0/greedy{turn}", prompts()[0], GREEDY, max_tokens=9, ignore_eos=True)]
        result = run(engine, batch)
        for template in batch_templates:
            assert result.tokens[f"{template.request_id}/{turn}"] == plain_run("0.8").tokens[template.request_id]
        assert result.tokens[f"r0/greedy{turn}"] == plain_run("greedy").tokens["r0"][:9]


def test_every_seed_bit_matters_and_missing_seeds_come_from_random_seed() -> None:
    def sample_tokens(
        seeds: Sequence[int | None], random_seed: int, make_engine: Callable[..., Engine] = plain_engine
    ) -> list[list[int]]:
        requests = [
            make_request(f"{i}", prompts()[2], SAMPLING["0.8"], seed=seed, max_tokens=24, ignore_eos=True)
            for i, seed in enumerate(seeds)
        ]
        return list(run(make_engine(random_seed=random_seed), requests).tokens.values())

    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -1, -2, -(2**31), -(2**63)]
    assert len({tuple(tokens) for tokens in sample_tokens(seeds, 0)}) == len(seeds), "two seeds gave the same tokens"
    assert sample_tokens(seeds, 0) == sample_tokens(seeds, 1)
    speculative_engine_of = partial(engine_of, 4, 3, "model", "0.8")
    assert sample_tokens(seeds, 0, speculative_engine_of) == sample_tokens(seeds, 0), (
        "a seed gives other tokens with trees"
    )
    assert sample_tokens([None] * 4, 0) == sample_tokens([None] * 4, 0) != sample_tokens([None] * 4, 1)
    assert len({tuple(tokens) for tokens in sample_tokens([None] * 4, 0)}) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [2048, 160])
def test_aborts_leave_other_requests_unchanged(kind: str, tokens: int) -> None:
    random = Random(9)
    engine = engine_of(4, 3, kind, "0.8", chunked_prefill_size=20, max_total_tokens=tokens)
    for turn in range(2):
        requests = [replace(request, request_id=f"{request.request_id}/{turn}") for request in grid_requests("0.8", 8)]
        abort_steps = {request.request_id: random.randint(0, 14) for request in random.sample(requests, 4)}
        steps = 0

        def abort(engine: Engine, _: object, abort_steps: dict[str, int] = abort_steps) -> None:
            nonlocal steps
            steps += 1
            for name in [name for name, step in abort_steps.items() if step <= steps]:
                engine.abort(name)
                engine.check_pages()

        result = run(engine, requests, abort)
        for request in requests:
            full_tokens = plain_run("0.8").tokens[request.request_id.split("/")[0]]
            got = result.tokens[request.request_id]
            assert got == full_tokens[: len(got)]
            assert request.request_id in abort_steps or got == full_tokens


@pytest.mark.parametrize(
    ("kind", "topk", "num_steps", "sampling"),
    [("model", 4, 3, "greedy"), ("corrected", 1, 3, "0.8"), ("oracle", 4, 3, "filtered"), ("oracle", 1, 3, "greedy")],
)
def test_speculative_logprobs_match_plain_decoding(kind: str, topk: int, num_steps: int, sampling: str) -> None:
    requests = [
        replace(request, params=replace(request.params, logprobs=i % 4 * 2 if i != 2 else None))
        for i, request in enumerate(grid_requests(sampling, 6))
    ]
    speculative_result = run(engine_of(topk, num_steps, kind, sampling, chunked_prefill_size=32), requests)
    plain_result = run(plain_engine(disable_radix_cache=True), requests)
    for request in requests:
        got, expected = (
            [line for output in result.outputs[request.request_id] for line in output.logprobs]
            for result in (speculative_result, plain_result)
        )
        if request.params.logprobs is None:
            assert not got and not expected
            continue
        assert (
            [line.token_id for line in got]
            == speculative_result.tokens[request.request_id]
            == plain_result.tokens[request.request_id]
        )
        for speculative_logprob, plain_logprob in zip(got, expected, strict=True):
            assert speculative_logprob.logprob == pytest.approx(plain_logprob.logprob, abs=1e-9)
            assert len(speculative_logprob.top) == request.params.logprobs
            assert [token for token, _ in speculative_logprob.top] == [token for token, _ in plain_logprob.top]
            assert [p for _, p in speculative_logprob.top] == pytest.approx([p for _, p in plain_logprob.top], abs=1e-9)
            if speculative_logprob.top:
                best = max(p for _, p in speculative_logprob.top)
                assert best == speculative_logprob.top[0][1] >= speculative_logprob.logprob - 1e-12
                assert sampling != "greedy" or speculative_logprob.top[0][0] == speculative_logprob.token_id


def test_logprobs_ignore_temperature_and_filters() -> None:
    """Log-probabilities are those of the whole vocabulary at temperature 1: neither the request's temperature nor its
    filters change them.
    """
    for sampling, params in SAMPLING.items():
        sampled_request = make_request(
            "r0", prompts()[0], params, seed=3000, max_tokens=6, ignore_eos=True, logprobs=20
        )
        greedy_request = replace(
            sampled_request, request_id="r0/cold", params=replace(sampled_request.params, temperature=0.0)
        )
        result = run(engine_of(4, 3, "corrected", sampling), [sampled_request, greedy_request])
        sampled_logprob, greedy_logprob = (result.outputs[name][0].logprobs[0] for name in ("r0", "r0/cold"))
        assert [token for token, _ in sampled_logprob.top] == [token for token, _ in greedy_logprob.top]
        top_logprobs = [p for _, p in sampled_logprob.top]
        assert top_logprobs == pytest.approx([p for _, p in greedy_logprob.top], abs=1e-9), (
            "the temperature changes them"
        )
        total_probability = sum(torch.tensor([p for _, p in sampled_logprob.top]).exp().tolist())
        assert 0.9 < total_probability <= 1 + 1e-9
        assert len(sampled_logprob.top) == 20 < VOCAB


def totals(result: RunResult, name: str) -> tuple[int, int]:
    """Return the number of tokens of a request, and the number of those that trees committed: all but the first, which
    comes from the prompt.
    """
    return len(result.tokens[name]), len(result.tokens[name]) - 1


@pytest.mark.parametrize(("kind", "topk", "num_steps"), [("model", 2, 2), ("corrected", 4, 3), ("oracle", 1, 5)])
def test_speculation_counts_of_a_request_add_up(kind: str, topk: int, num_steps: int) -> None:
    engine = engine_of(topk, num_steps, kind, "0.8")
    result = run(engine, grid_requests("0.8", 8))
    nodes = engine._parts.resolved.shape.num_draft_tokens - 1
    for name, output in result.last.items():
        counts, (tokens, from_trees) = output.speculation, totals(result, name)
        if counts is None:
            assert tokens == 1
            continue
        assert sum(counts.accepted) == counts.steps
        assert sum((j + 1) * n for j, n in enumerate(counts.accepted)) == from_trees
        assert counts.drafted == counts.steps * nodes
        assert counts.accept_length == pytest.approx(from_trees / counts.steps)
        assert len(counts.accepted) <= num_steps + 1
    assert all(output.speculation is None for output in run(plain_engine(), grid_requests("0.8", 3)).last.values())


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_every_accept_length_up_to_num_steps_occurs(topk: int, num_steps: int) -> None:
    accept_lens: set[int] = set()
    for rate in (0.1, 0.6, 0.95):
        engine = engine_of(topk, num_steps, "oracle", "0.8", rate=rate)
        accept_lens |= set(run(engine, grid_requests("0.8", 8)).accept_lens)
    assert accept_lens == set(range(1, num_steps + 2))


def test_step_without_requests_returns_no_outputs_and_changes_nothing() -> None:
    """A rank without requests runs the same code path, with a batch of 0 requests (law 2)."""
    for engine in (plain_engine(), engine_of(1, 3, "model", "greedy"), engine_of(4, 3, "model", "greedy")):
        for _ in range(2):
            assert engine.step().outputs == ()
            engine.check_pages()
        assert run(engine, grid_requests("greedy", 3)).completions == {
            name: completion
            for name, completion in plain_run("greedy").completions.items()
            if name in ("r0", "r1", "r2")
        }
        assert engine.step().outputs == ()


NEAR_TIE = {"float32": 64, "bfloat16": 8, "float16": 8}
"""Where two texts first differ, the log-probabilities of their tokens may differ by at most this many roundings."""
MAX_DIVERGED_FRACTION = {"float32": 0.05, "bfloat16": 0.5, "float16": 0.2}
"""The largest fraction of texts that may differ at all."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lower_precision_outputs_differ_from_plain_decoding_only_at_near_ties(dtype: str) -> None:
    """Where a greedy text first differs, both tokens are equally likely up to a few roundings of the dtype."""
    requests = [replace(request, params=replace(request.params, logprobs=20)) for request in grid_requests("greedy", 8)]
    plain_result = run(plain_engine(dtype=dtype), requests)
    diverged_count = compared_count = 0
    for topk, num_steps in ((1, 3), (4, 3)):
        speculative_result = run(build_engine(config_of(*tiny_pair(), topk, num_steps, dtype=dtype)), requests)
        assert speculative_result.accept_length > 1
        for request in requests:
            got, expected = speculative_result.tokens[request.request_id], plain_result.tokens[request.request_id]
            compared_count += 1
            index = next((i for i, (x, y) in enumerate(zip(got, expected, strict=False)) if x != y), None)
            if index is None:
                assert got == expected
                continue
            diverged_count += 1
            token_logprob = [
                token_logprob
                for output in plain_result.outputs[request.request_id]
                for token_logprob in output.logprobs
            ][index]
            gap = token_logprob.logprob - dict(token_logprob.top)[got[index]]
            rounding = torch.finfo(getattr(torch, dtype)).eps * max(1.0, abs(token_logprob.logprob))
            assert gap <= NEAR_TIE[dtype] * rounding, (request.request_id, index, gap, rounding)
    assert diverged_count <= MAX_DIVERGED_FRACTION[dtype] * compared_count
