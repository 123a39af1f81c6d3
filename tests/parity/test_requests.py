"""What a request asks for - ends, seeds, resuming, log-probabilities, counts - does not depend on speculation."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

from cluster.engine import Engine, build_engine
from cluster.request import Request
from tests.parity.harness import (
    GREEDY,
    SAMPLING,
    VOCAB,
    Run,
    config_of,
    grid_requests,
    plain_run,
    prompts,
    request,
    run,
    speculative,
    tiny_pair,
    truth,
)
from tests.tiny import letters_folder

KINDS = ["model", "corrected", "oracle"]


def engine_of(topk: int, num_steps: int, kind: str, sampling: str, rate: float = 0.9, **settings: object) -> Engine:
    config = config_of(*tiny_pair(), topk, num_steps, **settings)
    return speculative(config, kind, truth(sampling), rate)


def plain_engine(**settings: object) -> Engine:
    return build_engine(config_of(tiny_pair()[0], **settings))


@pytest.mark.parametrize(("topk", "num_steps", "sampling"), [(1, 5, "greedy"), (4, 3, "filtered"), (8, 5, "greedy")])
def test_stop_token_and_max_tokens_cut_accepted_runs_at_any_token(topk: int, num_steps: int, sampling: str) -> None:
    """Each distinct token of a text as stop token id and as EOS, and every max_tokens."""
    base = [r for r in grid_requests(sampling, 8) if r.params.ignore_eos][:2]
    text = plain_run(sampling).tokens
    asked: list[Request] = []
    for one in base:
        for token in sorted(set(text[one.request_id])):
            params = replace(one.params, stop_token_ids=(token, 23))
            asked.append(replace(one, request_id=f"{one.request_id}/stop{token}", params=params))
        for count in range(1, 13):
            params = replace(one.params, max_tokens=count)
            asked.append(replace(one, request_id=f"{one.request_id}/max{count}", params=params))
    fast = run(engine_of(topk, num_steps, "oracle", sampling), asked)
    for one in asked:
        whole = text[one.request_id.split("/")[0]]
        ends = [i for i, t in enumerate(whole) if t in one.params.stop_token_ids]
        kept, reason, by = fast.ended[one.request_id]
        if ends:
            assert (kept, reason, by) == (whole[: ends[0] + 1], "stop", whole[ends[0]])
        else:
            assert (kept, reason, by) == (whole[: one.params.max_tokens], "length", None)
    assert max(fast.accept_lens) == num_steps + 1, "runs were long enough to be cut"


@pytest.mark.parametrize(("kind", "sampling"), zip(KINDS, SAMPLING, strict=True))
def test_stop_strings_cut_outputs_as_in_plain_decoding(kind: str, sampling: str) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    base = grid_requests(sampling, 8)[0]
    text = "".join(letters[t] for t in plain_run(sampling).tokens["r0"])
    stops = [(text[i : i + n],) for i in range(0, len(text) - 3, 2) for n in (1, 2, 3)] + [("zzz", text[5:8]), ("zz",)]
    asked = [
        replace(base, request_id=f"r0/{i}", params=replace(base.params, stop=stop)) for i, stop in enumerate(stops)
    ]
    fast = run(engine_of(4, 3, kind, sampling, tokenizer_path=letters_folder()), asked)
    slow = run(plain_engine(tokenizer_path=letters_folder()), asked)
    assert fast.ended == slow.ended
    for one in asked:
        kept, reason, by = fast.ended[one.request_id]
        written = "".join(letters[t] for t in kept)
        if reason == "stop":
            assert by in one.params.stop and str(by) in written and str(by) not in written[:-1]
        else:
            assert written == text and not any(stop in written for stop in one.params.stop)
    assert Counter(reason for _, reason, _ in fast.ended.values())["stop"] >= len(asked) - 1


@pytest.mark.parametrize(("kind", "sampling"), zip(KINDS, SAMPLING, strict=True))
def test_resumed_request_continues_exactly_after_any_prefix(kind: str, sampling: str) -> None:
    """Whatever part a client already has, the rest follows, under the same seed, to the same end."""
    base = grid_requests(sampling, 3)[2]
    text = plain_run(sampling).tokens["r2"]
    asked = [
        replace(base, request_id=f"r2/{n}", prompt_token_ids=base.prompt_token_ids + tuple(text[:n]), resumed_tokens=n)
        for n in range(len(text) + 1)
    ]
    fast = run(engine_of(4, 3, kind, sampling), asked)
    for n, one in enumerate(asked):
        assert fast.tokens[one.request_id] == text[n:]
        assert fast.last[one.request_id].finish_reason == plain_run(sampling).last["r2"].finish_reason


def test_stop_string_across_the_resume_boundary_is_found() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    base = grid_requests("greedy", 1)[0]
    text = plain_run("greedy").tokens["r0"]
    stop = "".join(letters[t] for t in text[3:7])
    params = replace(base.params, stop=(stop,))
    for n in range(9):
        ids = base.prompt_token_ids + tuple(text[:n])
        one = Request(f"r0/{n}", ids, params, resumed_tokens=n)
        fast = run(engine_of(4, 3, "corrected", "greedy", tokenizer_path=letters_folder()), [one])
        assert fast.ended[f"r0/{n}"] == (text[n:7], "stop", stop)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_same_tokens_in_any_batch(kind: str) -> None:
    base = grid_requests("0.8", 8)
    random = Random(5)
    engine = engine_of(4, 3, kind, "0.8", chunked_prefill_size=16)
    for turn in range(3):
        company = random.sample(base, random.randint(1, 8))
        mixed = [replace(one, request_id=f"{one.request_id}/{turn}") for one in company]
        mixed += [request(f"r0/greedy{turn}", prompts()[0], GREEDY, max_tokens=9, ignore_eos=True)]
        fast = run(engine, mixed)
        for one in company:
            assert fast.tokens[f"{one.request_id}/{turn}"] == plain_run("0.8").tokens[one.request_id]
        assert fast.tokens[f"r0/greedy{turn}"] == plain_run("greedy").tokens["r0"][:9]


def test_every_seed_bit_matters_and_missing_seeds_come_from_random_seed() -> None:
    def texts(
        seeds: Sequence[int | None], random_seed: int, make: Callable[..., Engine] = plain_engine
    ) -> list[list[int]]:
        asked = [
            request(f"{i}", prompts()[2], SAMPLING["0.8"], seed=seed, max_tokens=24, ignore_eos=True)
            for i, seed in enumerate(seeds)
        ]
        return list(run(make(random_seed=random_seed), asked).tokens.values())

    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -1, -2, -(2**31), -(2**63)]
    assert len({tuple(t) for t in texts(seeds, 0)}) == len(seeds), "every bit of a seed counts"
    assert texts(seeds, 0) == texts(seeds, 1)
    trees = partial(engine_of, 4, 3, "model", "0.8")
    assert texts(seeds, 0, trees) == texts(seeds, 0), "of either sign, with trees as without"
    assert texts([None] * 4, 0) == texts([None] * 4, 0) != texts([None] * 4, 1)
    assert len({tuple(t) for t in texts([None] * 4, 0)}) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [2048, 160])
def test_aborts_leave_other_requests_unchanged(kind: str, tokens: int) -> None:
    random = Random(9)
    engine = engine_of(4, 3, kind, "0.8", chunked_prefill_size=20, max_total_tokens=tokens)
    for turn in range(2):
        base = [replace(one, request_id=f"{one.request_id}/{turn}") for one in grid_requests("0.8", 8)]
        doomed = {one.request_id: random.randint(0, 14) for one in random.sample(base, 4)}
        steps = 0

        def abort(engine: Engine, _: object, doomed: dict[str, int] = doomed) -> None:
            nonlocal steps
            steps += 1
            for name in [name for name, step in doomed.items() if step <= steps]:
                engine.abort(name)
                engine.check_pages()

        fast = run(engine, base, abort)
        for one in base:
            whole = plain_run("0.8").tokens[one.request_id.split("/")[0]]
            got = fast.tokens[one.request_id]
            assert got == whole[: len(got)]
            assert one.request_id in doomed or got == whole


@pytest.mark.parametrize(
    ("kind", "topk", "num_steps", "sampling"),
    [("model", 4, 3, "greedy"), ("corrected", 1, 3, "0.8"), ("oracle", 4, 3, "filtered"), ("oracle", 1, 3, "greedy")],
)
def test_speculative_logprobs_match_plain_decoding(kind: str, topk: int, num_steps: int, sampling: str) -> None:
    asked = [
        replace(one, params=replace(one.params, logprobs=i % 4 * 2 if i != 2 else None))
        for i, one in enumerate(grid_requests(sampling, 6))
    ]
    fast = run(engine_of(topk, num_steps, kind, sampling, chunked_prefill_size=32), asked)
    slow = run(plain_engine(disable_radix_cache=True), asked)
    for one in asked:
        got, wanted = (
            [line for output in result.outputs[one.request_id] for line in output.logprobs] for result in (fast, slow)
        )
        if one.params.logprobs is None:
            assert not got and not wanted
            continue
        assert [line.token_id for line in got] == fast.tokens[one.request_id] == slow.tokens[one.request_id]
        for mine, plain in zip(got, wanted, strict=True):
            assert mine.logprob == pytest.approx(plain.logprob, abs=1e-9)
            assert len(mine.top) == one.params.logprobs
            assert [token for token, _ in mine.top] == [token for token, _ in plain.top]
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in plain.top], abs=1e-9)
            if mine.top:
                best = max(p for _, p in mine.top)
                assert best == mine.top[0][1] >= mine.logprob - 1e-12
                assert sampling != "greedy" or mine.top[0][0] == mine.token_id


def test_logprobs_ignore_temperature_and_filters() -> None:
    """Over the whole vocabulary they are a distribution, whatever the temperature and the filters."""
    for sampling, params in SAMPLING.items():
        one = request("r0", prompts()[0], params, seed=3000, max_tokens=6, ignore_eos=True, logprobs=20)
        cold = replace(one, request_id="r0/cold", params=replace(one.params, temperature=0.0))
        result = run(engine_of(4, 3, "corrected", sampling), [one, cold])
        first, other = (result.outputs[name][0].logprobs[0] for name in ("r0", "r0/cold"))
        assert [token for token, _ in first.top] == [token for token, _ in other.top]
        chances = [p for _, p in first.top]
        assert chances == pytest.approx([p for _, p in other.top], abs=1e-9), "it does not depend on how one chooses"
        mass = sum(torch.tensor([p for _, p in first.top]).exp().tolist())
        assert 0.9 < mass <= 1 + 1e-9
        assert len(first.top) == 20 < VOCAB


def totals(result: Run, name: str) -> tuple[int, int]:
    """Tokens of a request, and those that trees committed (the first comes from the prompt)."""
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
    seen: set[int] = set()
    for rate in (0.1, 0.6, 0.95):
        engine = engine_of(topk, num_steps, "oracle", "0.8", rate=rate)
        seen |= set(run(engine, grid_requests("0.8", 8)).accept_lens)
    assert seen == set(range(1, num_steps + 2))


def test_step_without_requests_returns_no_outputs_and_changes_nothing() -> None:
    """A rank without requests is b = 0 of the same code path (law 2)."""
    for engine in (plain_engine(), engine_of(1, 3, "model", "greedy"), engine_of(4, 3, "model", "greedy")):
        for _ in range(2):
            assert engine.step().outputs == ()
            engine.check_pages()
        assert run(engine, grid_requests("greedy", 3)).ended == {
            name: ended for name, ended in plain_run("greedy").ended.items() if name in ("r0", "r1", "r2")
        }
        assert engine.step().outputs == ()


NEAR_TIE = {"float32": 64, "bfloat16": 8, "float16": 8}
"""By how many roundings of the larger log-probability two tokens may differ where texts part."""
PARTED = {"float32": 0.05, "bfloat16": 0.5, "float16": 0.2}
"""How many of the texts may part at all."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lower_precision_outputs_differ_from_plain_decoding_only_at_near_ties(dtype: str) -> None:
    """Greedy texts: where one first parts, both tokens are equally likely up to a few roundings of the dtype."""
    asked = [replace(one, params=replace(one.params, logprobs=20)) for one in grid_requests("greedy", 8)]
    slow = run(plain_engine(dtype=dtype), asked)
    parted = compared = 0
    for topk, num_steps in ((1, 3), (4, 3)):
        fast = run(build_engine(config_of(*tiny_pair(), topk, num_steps, dtype=dtype)), asked)
        assert fast.accept_length > 1
        for one in asked:
            got, wanted = fast.tokens[one.request_id], slow.tokens[one.request_id]
            compared += 1
            at = next((i for i, (x, y) in enumerate(zip(got, wanted, strict=False)) if x != y), None)
            if at is None:
                assert got == wanted
                continue
            parted += 1
            line = [line for output in slow.outputs[one.request_id] for line in output.logprobs][at]
            gap = line.logprob - dict(line.top)[got[at]]
            rounding = torch.finfo(getattr(torch, dtype)).eps * max(1.0, abs(line.logprob))
            assert gap <= NEAR_TIE[dtype] * rounding, (one.request_id, at, gap, rounding)
    assert parted <= PARTED[dtype] * compared
