"""The requests that run in the next step: row budget, order, admission, retraction, and pages for all that run."""

from random import Random

import pytest
import torch

from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.config.tree_shape import TreeShape
from cluster.engine.finish import FinishCheck
from cluster.engine.request_state import RequestState
from cluster.engine.schedule import Schedule
from cluster.engine.scheduler import Scheduler
from cluster.kv.cache import KVCache
from cluster.kv.page_table import PageTable
from cluster.request import Request, RequestParams

WINDOW = 6


def make_scheduler(pages: int, page_size: int = 4, rows: int = 4, budget: int = 16, radix: bool = False) -> Scheduler:
    cache = KVCache(pages, PageTable(rows, 200, page_size, torch.device("cpu")), radix)
    return Scheduler(
        ResolvedSettings.from_settings(EngineConfig(model_path="", chunked_prefill_size=budget)), cache, WINDOW
    )


def sequence(name: str, prompt: int, max_tokens: int = 20) -> RequestState:
    return sequence_of(name, list(range(prompt)), max_tokens)


def sequence_of(name: str, ids: list[int], max_tokens: int = 20, salt: int = 0) -> RequestState:
    params = RequestParams(max_tokens=max_tokens, seed=0)
    finish = FinishCheck(params, (), 64, None, ids)
    return RequestState(Request(name, tuple(ids), params, cache_salt=salt), finish, ids, len(ids), accepted=[0])


def summary_of(plan: Schedule) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Return the ids of the decoding requests, and (id, start, stop) of each prompt chunk."""
    chunks = [(c.sequence.request.request_id, c.start, c.stop) for c in plan.chunks]
    return [s.request.request_id for s, _ in plan.decodes], chunks


def advance(plan: Schedule, accept: int = 1) -> None:
    """Change the requests as the step `plan` would. Each decoding request gets `accept` tokens."""
    shape = TreeShape(num_steps=accept - 1, topk=1, num_draft_tokens=accept)
    plan.begin(shape)
    for state, _ in plan.decodes:
        state.commit_tree(accept, shape)
        state.tokens += [7] * accept
    for chunk in plan.chunks:
        chunk.sequence.commit_prompt(chunk.stop, chunk.final)
        if chunk.final:
            chunk.sequence.tokens.append(7)


def test_prompts_share_the_row_budget_in_order_and_run_with_decodes() -> None:
    scheduler = make_scheduler(100)
    scheduler.waiting.extend([sequence("a", 10), sequence("b", 20), sequence("c", 3)])
    expected = [
        ([], [("a", 0, 10), ("b", 0, 6)]),
        (["a"], [("b", 6, 20), ("c", 0, 2)]),
        (["a", "b"], [("c", 2, 3)]),
        (["a", "b", "c"], []),
    ]
    for step in expected:
        plan = scheduler.schedule()
        assert summary_of(plan) == step
        assert plan.prompt_rows <= 16
        advance(plan)


def test_prompts_run_unchunked_without_a_row_budget() -> None:
    scheduler = make_scheduler(100, budget=-1)
    scheduler.waiting.extend([sequence("a", 100), sequence("b", 50)])
    assert summary_of(scheduler.schedule()) == ([], [("a", 0, 100), ("b", 0, 50)])


def test_scheduler_admits_no_more_requests_than_page_table_rows() -> None:
    scheduler = make_scheduler(100, rows=2)
    scheduler.waiting.extend(sequence(name, 2) for name in "abc")
    assert len(scheduler.schedule().chunks) == 2
    assert [s.request.request_id for s in scheduler.waiting] == ["c"]


def test_admission_waits_until_pages_suffice() -> None:
    scheduler = make_scheduler(8, budget=-1)
    scheduler.waiting.extend([sequence("a", 16, 4), sequence("b", 8, 4)])
    first = scheduler.schedule()
    assert summary_of(first) == ([], [("a", 0, 16)]), "b and its window would leave a no page to grow"
    advance(first)
    assert summary_of(scheduler.schedule()) == (["a"], [])
    scheduler.release(first.chunks[0].sequence)
    assert summary_of(scheduler.schedule()) == ([], [("b", 0, 8)])


def test_last_admitted_request_is_retracted_to_the_queue_front_with_its_tokens() -> None:
    scheduler = make_scheduler(12, budget=-1)
    scheduler.waiting.extend([sequence("a", 8), sequence("b", 8), sequence("c", 20)])
    plan = scheduler.schedule()
    assert summary_of(plan)[1] == [("a", 0, 8), ("b", 0, 8)]
    retracted = 0
    for _ in range(12):
        advance(plan, accept=2)
        plan = scheduler.schedule()
        retracted += plan.retracted_count
        if plan.retracted_count:
            break
    assert retracted == 1
    assert summary_of(plan) == (["a"], [])
    assert [s.request.request_id for s in scheduler.waiting] == ["b", "c"]
    retracted_state = scheduler.waiting[0]
    assert retracted_state.lease is None and retracted_state.prefilling and retracted_state.committed == 0
    assert len(retracted_state.tokens) > 9, "its generated tokens are part of its prompt now"


def test_queued_tokens_count_uncomputed_prompt_tokens() -> None:
    scheduler = make_scheduler(100)
    scheduler.waiting.extend([sequence("a", 20), sequence("b", 30)])
    assert scheduler.queued_tokens == 50
    advance(scheduler.schedule())
    assert scheduler.queued_tokens == 34
    advance(scheduler.schedule())
    assert scheduler.queued_tokens == 50 - 32


def test_releasing_a_waiting_request_removes_it_from_the_queue() -> None:
    scheduler = make_scheduler(100)
    state = sequence("a", 20)
    scheduler.waiting.append(state)
    scheduler.release(state)
    assert not scheduler.waiting
    assert scheduler.schedule().chunks == []


def test_prompt_waits_for_a_running_request_that_computes_its_prefix() -> None:
    scheduler = make_scheduler(100, rows=8, budget=64, radix=True)
    scheduler.waiting.extend(sequence(name, 40) for name in "abc")
    plan = scheduler.schedule()
    assert summary_of(plan) == ([], [("a", 0, 40)])
    advance(plan)
    plan = scheduler.schedule()
    scheduler._cache.check()
    assert summary_of(plan) == (["a"], [("b", 39, 40), ("c", 39, 40)]), "cached: nine pages, three cells of the tenth"
    assert [s.cached_tokens for s in scheduler.running] == [0, 39, 39]
    assert [copy.tokens for copy in plan.copies] == [3, 3]


def test_prompts_with_different_cache_salts_share_no_prefix() -> None:
    scheduler = make_scheduler(100, rows=8, budget=200, radix=True)
    scheduler.waiting.extend(
        sequence_of(name, list(range(40)), salt=salt) for name, salt in (("a", 0), ("b", 5), ("c", 5))
    )
    plan = scheduler.schedule()
    assert summary_of(plan) == ([], [("a", 0, 40), ("b", 0, 40)]), "c waits for b; b does not wait for a"
    advance(plan)
    scheduler.waiting.append(sequence_of("d", list(range(40)), salt=6))
    plan = scheduler.schedule()
    assert summary_of(plan)[1] == [("c", 39, 40), ("d", 0, 40)]
    assert [s.cached_tokens for s in scheduler.running] == [0, 0, 39, 0]
    scheduler._cache.check()


def test_prompt_waits_until_all_chunks_of_its_shared_prefix_are_computed() -> None:
    scheduler = make_scheduler(100, rows=8, radix=True)
    scheduler.waiting.extend(sequence(name, 50) for name in "abc")
    steps = []
    for _ in range(4):
        plan = scheduler.schedule()
        steps.append(summary_of(plan)[1])
        advance(plan)
    chunks_of_a = [[("a", 0, 16)], [("a", 16, 32)], [("a", 32, 48)]]
    assert steps == [*chunks_of_a, [("a", 48, 50), ("b", 48, 50), ("c", 48, 50)]]


def with_shared_prefix(name: str, *own_ids: int) -> RequestState:
    """Return a request whose prompt is a common prefix of 33 tokens (8 pages and one token), then `own_ids`."""
    return sequence_of(name, [*range(33), *own_ids])


def test_request_waiting_for_a_prefix_keeps_its_place_and_blocks_no_other() -> None:
    scheduler = make_scheduler(100, rows=3, budget=40, radix=True)
    other_states = [sequence_of(name, [50 + i] * 20) for i, name in enumerate("xyz")]
    scheduler.waiting.extend([with_shared_prefix("a", 90), with_shared_prefix("b", 91), *other_states])
    plan = scheduler.schedule()
    assert summary_of(plan) == ([], [("a", 0, 34), ("x", 0, 6)])
    assert [s.request.request_id for s in scheduler.waiting] == ["b", "y", "z"]
    advance(plan)
    plan = scheduler.schedule()
    assert summary_of(plan) == (["a"], [("x", 6, 20), ("b", 32, 34)]), "the third page-table row is reserved for b"
    assert [s.request.request_id for s in scheduler.waiting] == ["y", "z"]


@pytest.mark.parametrize(("prompt_tokens", "admitted"), [(12, True), (28, False)])
def test_pages_are_reserved_for_a_request_waiting_for_a_prefix(prompt_tokens: int, admitted: bool) -> None:
    """With its window b needs 13 pages, at least 4 of which a computes. a needs 10 pages. So 5 of 24 pages are left."""
    scheduler = make_scheduler(24, rows=4, budget=100, radix=True)
    scheduler.waiting.extend(
        [with_shared_prefix("a", 90), with_shared_prefix("b", *range(60, 70)), sequence_of("x", [9] * prompt_tokens, 6)]
    )
    plan = scheduler.schedule()
    assert [c.sequence.request.request_id for c in plan.chunks] == (["a", "x"] if admitted else ["a"])
    advance(plan)
    assert summary_of(scheduler.schedule())[1][0][0] == "b"


@pytest.mark.parametrize("end", ["abort", "retract"])
def test_request_waiting_for_a_prefix_runs_after_the_other_request_leaves(end: str) -> None:
    scheduler = make_scheduler(100, radix=True)
    scheduler.waiting.extend([with_shared_prefix("a", 90), with_shared_prefix("b", 91)])
    plan = scheduler.schedule()
    assert summary_of(plan) == ([], [("a", 0, 16)])
    advance(plan)
    first = scheduler.running[0]
    if end == "abort":
        scheduler.release(first)
        assert summary_of(scheduler.schedule()) == ([], [("b", 16, 32)]), "the 16 computed tokens are cached"
    else:
        scheduler.decode._retract(first)
        plan = scheduler.schedule()
        assert summary_of(plan) == ([], [("a", 16, 32)]), "the retracted request is first again"
        advance(plan)
        assert summary_of(scheduler.schedule()) == ([], [("a", 32, 34), ("b", 32, 34)])


def test_prompt_does_not_wait_for_a_short_shared_prefix() -> None:
    scheduler = make_scheduler(100, budget=100, radix=True)
    scheduler.waiting.extend([sequence_of("a", [*range(15), 90]), sequence_of("b", [*range(15), 91])])
    assert summary_of(scheduler.schedule())[1] == [("a", 0, 16), ("b", 0, 16)]


def test_prompts_do_not_wait_without_the_radix_cache() -> None:
    scheduler = make_scheduler(100, budget=100, radix=False)
    scheduler.waiting.extend(sequence(name, 40) for name in "ab")
    assert summary_of(scheduler.schedule())[1] == [("a", 0, 40), ("b", 0, 40)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_admission_counts_a_shared_prefix_once(page_size: int) -> None:
    """Eight requests share a prefix of 161 tokens, and the cache holds 320. From the second step on, all eight run."""
    scheduler = make_scheduler(320 // page_size, page_size=page_size, rows=8, budget=4096, radix=True)
    prefix = [*range(161)]
    scheduler.waiting.extend(sequence_of(f"{i}", [*prefix, 200 + i], 6) for i in range(8))
    plan = scheduler.schedule()
    assert (len(plan.chunks), plan.prompt_rows) == (1, 162)
    advance(plan)
    plan = scheduler.schedule()
    assert (len(plan.decodes), len(plan.chunks)) == (1, 7)
    assert plan.prompt_rows <= 14
    for _ in range(4):
        advance(plan)
        plan = scheduler.schedule()
        scheduler._cache.check()
        assert (len(plan.decodes), plan.retracted_count) == (8, 0)


def test_admission_does_not_count_matched_prefix_pages_as_evictable() -> None:
    """The prefix is in the radix tree and no request uses it. Once b locks its pages, they cannot be evicted for c."""
    scheduler = make_scheduler(10, budget=100, radix=True)
    scheduler.waiting.append(sequence("a", 33, 2))
    plan = scheduler.schedule()
    advance(plan)
    scheduler.release(plan.chunks[0].sequence)
    assert (scheduler._cache.free_pages, scheduler._cache.evictable_pages) == (2, 8)
    scheduler.waiting.extend([with_shared_prefix("b", 90), with_shared_prefix("c", 91)])
    assert summary_of(scheduler.schedule())[1] == [("b", 32, 34)], "with its window b takes the last two pages"
    scheduler._cache.check()


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_admission_does_not_cause_retraction(page_size: int, seed: int) -> None:
    """However many tokens a step commits, all running requests have the pages for the step after it."""
    random = Random(seed)
    config = EngineConfig(
        model_path="",
        chunked_prefill_size=30,
        page_size=page_size,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="x",
        speculative_eagle_topk=1,
        speculative_num_steps=5,
    )
    cache = KVCache(120 // page_size, PageTable(6, 200, page_size, torch.device("cpu")), bool(seed % 2))
    scheduler, admissions, retracted = Scheduler(ResolvedSettings.from_settings(config), cache, WINDOW), 0, 0
    for number in range(60):
        scheduler.waiting.append(sequence(f"{number}", random.randint(1, 40), random.randint(1, 40)))
    plan = scheduler.schedule()
    for _ in range(1000):
        admitted = bool(plan.admitted)
        admissions += admitted
        advance(plan, 6)
        for state in list(scheduler.running):
            if not state.prefilling and state.remaining_tokens <= 0:
                scheduler.release(state)
        if not scheduler.running and not scheduler.waiting:
            break
        plan = scheduler.schedule()
        cache.check()
        assert not (admitted and plan.retracted_count)
        retracted += plan.retracted_count
    assert not scheduler.waiting and not scheduler.running
    assert admissions > 10 and retracted > 0


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_always_finishes_without_lost_pages(seed: int, radix: bool) -> None:
    """Few pages, many requests, random accept lengths and aborts: the oldest request progresses, no page is lost."""
    random = Random(seed)
    scheduler = make_scheduler(14, budget=9, radix=radix)
    cache, retracted = scheduler._cache, 0
    unfinished = [sequence(f"{number}", random.randint(1, 22), random.randint(1, 20)) for number in range(25)]
    scheduler.waiting.extend(unfinished)
    for _ in range(1500):
        if not unfinished:
            break
        plan = scheduler.schedule()
        retracted += plan.retracted_count
        cache.check()
        assert plan.prompt_rows <= 9
        for state, lease in plan.decodes:
            assert lease.page_count * 4 >= state.committed + WINDOW
        for chunk in plan.chunks:
            assert chunk.sequence.lease is not None
            assert chunk.start < chunk.stop <= len(chunk.sequence.tokens) <= chunk.sequence.lease.page_count * 4
        advance(plan, random.randint(1, 4))
        for state in list(scheduler.running):
            reached_max_tokens = state.prompt_len + state.request.params.max_tokens - len(state.tokens) <= 0
            if not state.prefilling and (reached_max_tokens or random.random() < 0.01):
                del state.tokens[state.prompt_len + state.request.params.max_tokens :]
                scheduler.release(state)
                unfinished.remove(state)
    assert not unfinished
    assert cache.used_pages == 0
    assert retracted > 0
