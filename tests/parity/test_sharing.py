"""Requests with a common prompt prefix that run at the same time. The prefix is computed once, and each request has the
tokens, KV cells and trees that it has without sharing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from cluster.config import EngineConfig
from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.parity.drafts import Texts, correct
from tests.parity.harness import (
    SAMPLING,
    VOCAB,
    RunResult,
    config_of,
    make_request,
    run,
    run_one_by_one,
    scarce_config,
    texts_of,
    tiny_pair,
)
from tests.parity.reference import draft_reference, target_reference
from tests.parity.test_draft_runners import multi_layer_config as multilayer
from tests.parity.watch import ReferenceChecker
from tests.support.pairwise import covering

LONG = 160


@cache
def random_prompt(seed: int, length: int = LONG) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(2, VOCAB) for _ in range(length))


def sampled_requests(prompt: tuple[int, ...], count: int = 8) -> list[Request]:
    """Return `count` requests for one prompt, each with another seed."""
    common = {"max_tokens": 14, "ignore_eos": True}
    return [make_request(f"s{i}", prompt, SAMPLING["0.8"], seed=50 + i, **common) for i in range(count)]


def diverging_requests(page_size: int) -> list[Request]:
    """Return requests whose prompts begin with the same tokens. They diverge within a page, at its end, just after it,
    and where a chunk ends. The prompt of `whole` is the common text itself.
    """
    base_prompt = random_prompt(1, 48)
    split_points = [20, 4 * page_size, 4 * page_size - 1, 4 * page_size + 1, 21, 47, 48, 17]
    requests = []
    for i, split in enumerate(split_points):
        split = min(split, 47)
        ids = (*base_prompt[:split], (base_prompt[split] + 1) % VOCAB, *random_prompt(10 + i, 9))
        requests.append(make_request(f"f{i}", ids, SAMPLING["greedy" if i % 2 else "0.8"], seed=i, max_tokens=10 + i))
    return [*requests, make_request("whole", base_prompt, SAMPLING["0.8"], seed=99, max_tokens=12, ignore_eos=True)]


@cache
def plain_results(kind: str, page_size: int) -> RunResult:
    """The oracle: plain decoding of the requests, one by one, without any sharing."""
    requests = diverging_requests(page_size) if kind == "family" else sampled_requests(random_prompt(0))
    return run_one_by_one(build_engine(config_of(tiny_pair()[0], disable_radix_cache=True)), requests)


def checked_engine(config: EngineConfig, known_texts: Texts, rate: float = 0.7) -> tuple[Engine, ReferenceChecker]:
    target, draft = tiny_pair()
    engine, checker = (
        build_engine(config),
        ReferenceChecker(target_reference(target), draft_reference(draft, target), known_texts),
    )
    checker.attach(engine)
    correct(engine, known_texts, rate)
    return engine, checker


def prompt_row_recorder(row_counts: list[int], next_callback: Callable[[Engine, StepResult], None] | None = None):  # type: ignore[no-untyped-def]
    """Return a callback for after each step. It records the number of prompt rows, then calls `next_callback`."""

    def after(engine: Engine, step: StepResult) -> None:
        row_counts.append(step.stats.prompt_rows)
        if next_callback is not None:
            next_callback(engine, step)

    return after


@pytest.mark.parametrize(("page_size", "chunk"), [(16, -1), (16, 64), (1, 64), (4, 33), (64, -1)])
def test_eight_samples_of_a_prompt_compute_the_prompt_once(page_size: int, chunk: int) -> None:
    requests, plain_result = sampled_requests(random_prompt(0)), plain_results("samples", 16)
    engine = build_engine(config_of(*tiny_pair(), 3, 3, page_size=page_size, chunked_prefill_size=chunk))
    row_counts: list[int] = []
    result = run(engine, requests, prompt_row_recorder(row_counts))
    assert result.completions == plain_result.completions
    assert sum(row_counts) <= (200 if page_size < 64 else LONG + 7 * 32)
    cached_counts = [result.last[request.request_id].cached_tokens for request in requests]
    assert sum(row_counts) + sum(cached_counts) == 8 * LONG, "computed and cached rows do not add up"


def test_shared_prompt_ending_within_a_page_is_computed_once() -> None:
    requests = [
        replace(request, prompt_token_ids=random_prompt(0)[:155]) for request in sampled_requests(random_prompt(0))
    ]
    row_counts: list[int] = []
    run(build_engine(config_of(*tiny_pair(), 3, 3, page_size=16)), requests, prompt_row_recorder(row_counts))
    assert sum(row_counts) == 155 + 7


@pytest.mark.parametrize(
    ("page_size", "memory", "submit_at_once"), covering([(1, 4, 16), ("ample", "scarce"), (True, False)])
)
def test_prompts_with_common_prefixes_match_unshared_runs(page_size: int, memory: str, submit_at_once: bool) -> None:
    """The requests are submitted at once, or one per step while earlier ones still run."""
    requests, plain_result = diverging_requests(page_size), plain_results("family", page_size)
    config = config_of(*tiny_pair(), 3, 3, page_size=page_size, chunked_prefill_size=19)
    config = scarce_config(config, requests, 24 // page_size) if memory == "scarce" else config
    engine, checker = checked_engine(config, texts_of(requests, plain_result))
    waiting_requests = [] if submit_at_once else requests[:-1]

    def check_and_submit(engine: Engine, step: StepResult) -> None:
        checker(engine, step)
        if waiting_requests:
            engine.submit(waiting_requests.pop())

    result = run(
        engine,
        requests if submit_at_once else requests[-1:],
        check_and_submit,
        later_requests=[] if submit_at_once else requests[:-1],
    )
    assert result.completions == plain_result.completions
    assert not checker.errors, checker.errors[0]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompts_with_different_cache_salts_share_no_prefix(page_size: int) -> None:
    """The requests are submitted at once: a request must not wait for the prompt of another salt. Then they are
    submitted again, when all prompts are cached.
    """
    requests, plain_result = sampled_requests(random_prompt(0), 6), plain_results("samples", 16)
    requests = [replace(request, cache_salt=index % 3) for index, request in enumerate(requests)]
    row_counts: list[int] = []
    engine = build_engine(config_of(*tiny_pair(), 3, 3, page_size=page_size))
    result = run(engine, requests, prompt_row_recorder(row_counts))
    assert result.completions == {
        name: completion for name, completion in plain_result.completions.items() if name in result.completions
    }
    cached_counts = [result.last[request.request_id].cached_tokens for request in requests]
    assert cached_counts[:3] == [0, 0, 0], "the first request of a salt found a prefix of another salt"
    assert min(cached_counts[3:]) >= LONG - page_size, (
        "the second request of a salt did not find the prefix of the first"
    )
    assert sum(row_counts) + sum(cached_counts) == 6 * LONG
    second_requests = [replace(request, cache_salt=salt) for request, salt in zip(requests, (0, 2, 3), strict=False)]
    second_result = run(engine, second_requests)
    assert [
        second_result.last[request.request_id].cached_tokens >= LONG - page_size for request in second_requests
    ] == [True, True, False]
    assert second_result.last[second_requests[2].request_id].cached_tokens == 0


@pytest.mark.parametrize("dialect", ["mimo", "step"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_multi_layer_draft_state_is_shared_with_cached_prefixes(dialect: str, page_size: int) -> None:
    """With and without sharing, the accept lengths are equal. If the shared draft state was wrong, trees would differ,
    and so would the accept lengths.
    """
    requests = sampled_requests(random_prompt(0)[:45], 4)
    runs = []
    for disabled in (False, True):
        config = multilayer(dialect, 1, page_size=page_size, disable_radix_cache=disabled)
        row_counts: list[int] = []
        result = run(build_engine(config), requests, prompt_row_recorder(row_counts))
        runs.append((result.completions, {n: o.speculation and o.speculation.accepted for n, o in result.last.items()}))
        assert sum(row_counts) == (4 * 45 if disabled else 45 + 3)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("abort_step", [1, 2, 4, 5])
def test_abort_of_the_first_sharing_request_keeps_its_computed_prefix(abort_step: int) -> None:
    requests, plain_result = sampled_requests(random_prompt(0)), plain_results("samples", 16)
    engine = build_engine(config_of(*tiny_pair(), 3, 3, page_size=16, chunked_prefill_size=48))
    row_counts: list[int] = []

    def abort_first(engine: Engine, _: StepResult) -> None:
        if len(row_counts) == abort_step:
            engine.abort("s0")

    result = run(engine, requests, prompt_row_recorder(row_counts, abort_first))
    assert {n: e for n, e in result.completions.items() if n != "s0"} == {
        n: e for n, e in plain_result.completions.items() if n != "s0"
    }
    assert sum(row_counts) <= 200 + 48, "the rows that the aborted request had computed were computed again"
