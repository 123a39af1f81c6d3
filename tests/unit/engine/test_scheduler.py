"""Who runs in the next step: budget, order, admission, retraction; pages always suffice for what was scheduled."""

from random import Random

import pytest
import torch

from cluster.config import EngineConfig
from cluster.engine.finish import FinishCheck
from cluster.engine.scheduler import Schedule, Scheduler
from cluster.engine.sequence import Sequence
from cluster.kv.cache import KVCache
from cluster.request import Request, SamplingParams

WINDOW = 6


def made(pages: int, page_size: int = 4, rows: int = 4, budget: int = 16, radix: bool = False) -> Scheduler:
    cache = KVCache(pages, page_size, rows, 200, radix, torch.device("cpu"))
    return Scheduler(EngineConfig(model_path="", chunked_prefill_size=budget), cache, WINDOW)


def sequence(name: str, prompt: int, max_tokens: int = 20) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    ids = list(range(prompt))
    finish = FinishCheck(params, (), None, ids)
    return Sequence(Request(name, tuple(ids), params), 0, finish, ids, prompt, accepted=[0])


def names(plan: Schedule) -> tuple[list[str], list[tuple[str, int, int]]]:
    chunks = [(c.sequence.request.request_id, c.start, c.stop) for c in plan.chunks]
    return [s.request.request_id for s in plan.decodes], chunks


def advance(plan: Schedule, accept: int = 1) -> None:
    """What a step does to the sequences."""
    for one in plan.decodes:
        one.committed += accept
        one.tokens += [7] * accept
    for chunk in plan.chunks:
        chunk.sequence.committed = chunk.stop
        if chunk.final:
            chunk.sequence.tokens.append(7)
            chunk.sequence.prefilling = False


def test_prompts_share_the_row_budget_in_order_and_ride_with_decodes() -> None:
    scheduler = made(100)
    scheduler.waiting.extend([sequence("a", 10), sequence("b", 20), sequence("c", 3)])
    expected = [
        ([], [("a", 0, 10), ("b", 0, 6)]),
        (["a"], [("b", 6, 20), ("c", 0, 2)]),
        (["a", "b"], [("c", 2, 3)]),
        (["a", "b", "c"], []),
    ]
    for step in expected:
        plan = scheduler.schedule()
        assert names(plan) == step
        assert plan.prompt_rows <= 16
        advance(plan)


def test_without_a_limit_whole_prompts_run() -> None:
    scheduler = made(100, budget=-1)
    scheduler.waiting.extend([sequence("a", 100), sequence("b", 50)])
    assert names(scheduler.schedule()) == ([], [("a", 0, 100), ("b", 0, 50)])


def test_no_more_requests_than_rows() -> None:
    scheduler = made(100, rows=2)
    scheduler.waiting.extend(sequence(name, 2) for name in "abc")
    assert len(scheduler.schedule().chunks) == 2
    assert [s.request.request_id for s in scheduler.waiting] == ["c"]


def test_admission_waits_until_pages_suffice() -> None:
    scheduler = made(8, budget=-1)
    scheduler.waiting.extend([sequence("a", 16, 4), sequence("b", 8, 4)])
    first = scheduler.schedule()
    assert names(first) == ([], [("a", 0, 16)]), "b with its window would leave no page to grow"
    advance(first)
    assert names(scheduler.schedule()) == (["a"], [])
    scheduler.release(first.chunks[0].sequence)
    assert names(scheduler.schedule()) == ([], [("b", 0, 8)])


def test_the_last_admitted_goes_back_to_the_front_and_keeps_its_tokens() -> None:
    scheduler = made(12, budget=-1)
    scheduler.waiting.extend([sequence("a", 8), sequence("b", 8), sequence("c", 20)])
    plan = scheduler.schedule()
    assert names(plan)[1] == [("a", 0, 8), ("b", 0, 8)]
    retracted = 0
    for _ in range(12):
        advance(plan, accept=2)
        plan = scheduler.schedule()
        retracted += plan.retracted
        if plan.retracted:
            break
    assert retracted == 1
    assert names(plan) == (["a"], [])
    assert [s.request.request_id for s in scheduler.waiting] == ["b", "c"]
    back = scheduler.waiting[0]
    assert back.lease is None and back.prefilling and back.committed == 0
    assert len(back.tokens) > 9, "what it generated is its prompt now"


def test_queued_tokens_count_what_is_not_computed() -> None:
    scheduler = made(100)
    scheduler.waiting.extend([sequence("a", 20), sequence("b", 30)])
    assert scheduler.queued_tokens == 50
    advance(scheduler.schedule())
    assert scheduler.queued_tokens == 34
    advance(scheduler.schedule())
    assert scheduler.queued_tokens == 50 - 32


def test_releasing_a_waiting_request_forgets_it() -> None:
    scheduler = made(100)
    one = sequence("a", 20)
    scheduler.waiting.append(one)
    scheduler.release(one)
    assert not scheduler.waiting
    assert scheduler.schedule().chunks == []


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_always_ends(seed: int, radix: bool) -> None:
    """Few pages, many requests, random accept lengths and aborts: the oldest progresses, no page is lost."""
    random = Random(seed)
    scheduler = made(14, budget=9, radix=radix)
    cache, retracted = scheduler._cache, 0
    unfinished = [sequence(f"{number}", random.randint(1, 22), random.randint(1, 20)) for number in range(25)]
    scheduler.waiting.extend(unfinished)
    for _ in range(1500):
        if not unfinished:
            break
        plan = scheduler.schedule()
        retracted += plan.retracted
        cache.check()
        assert plan.prompt_rows <= 9
        for one in plan.decodes:
            assert one.lease is not None
            assert one.lease.pages * 4 >= one.committed + WINDOW
        for chunk in plan.chunks:
            assert chunk.sequence.lease is not None
            assert chunk.start < chunk.stop <= len(chunk.sequence.tokens) <= chunk.sequence.lease.pages * 4
        advance(plan, random.randint(1, 4))
        for one in list(scheduler.running):
            over = one.prompt_len + one.request.params.max_tokens - len(one.tokens) <= 0
            if not one.prefilling and (over or random.random() < 0.01):
                del one.tokens[one.prompt_len + one.request.params.max_tokens :]
                scheduler.release(one)
                unfinished.remove(one)
    assert not unfinished
    assert cache.used == 0
    assert retracted > 0
