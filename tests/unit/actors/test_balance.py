"""The balancer: the ranks that each policy prefers, pinned ranks, cached prefixes against load, and load counts."""

import random
from dataclasses import dataclass, replace

import pytest

from cluster.actors.balance import POLICIES, WORK_UNIT, Balancer, RankLoad
from cluster.actors.open_requests import OpenRequest
from cluster.actors.prefix_estimates import PrefixIndex, page_hashes_of
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.kv.radix import RadixTree
from cluster.request import Request, RequestParams

PAGE = 4
AMPLE_PAGES = 1 << 24  # more pages than the requests of these tests can fill


def request(name: str, tokens: int = 8, first: int = 0, max_tokens: int = 64, **fields: object) -> OpenRequest:
    """Return a request whose prompt is `tokens` ascending token ids from `first` on."""
    ids = tuple(range(first, first + tokens))
    return OpenRequest(Request(name, ids, RequestParams(max_tokens=max_tokens), **fields))  # type: ignore[arg-type]


def give_tokens(balancer: Balancer, name: str, tokens: int, steps: int) -> None:
    """Give an open request `tokens` tokens, and report this to the balancer."""
    balancer._open[name].sent_tokens += [0] * tokens
    balancer.on_tokens(name, tokens, steps)


def run_to_end(balancer: Balancer, name: str, tokens: int = 4, steps: int = 2) -> None:
    """Report all events of a queued request to the balancer, from its first token to its end."""
    balancer.on_first_output(name)
    give_tokens(balancer, name, 1, 0)
    give_tokens(balancer, name, tokens, steps)
    balancer.on_ended(name)


def test_round_robin_policy_ignores_load() -> None:
    balancer = Balancer("round_robin", 3, PAGE)
    assert [balancer.choose(request(f"r{i}", 8 + 500 * (i % 3 == 0)), 8.0) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_total_requests_policy_picks_rank_with_fewest_requests() -> None:
    balancer = Balancer("total_requests", 3, PAGE)
    assert [balancer.choose(request(f"r{i}", 4000 if i == 0 else 8), 8.0) for i in range(4)] == [0, 1, 2, 0]
    balancer.on_ended("r1")
    assert balancer.choose(request("next"), 8.0) == 1


def test_total_tokens_policy_picks_rank_with_fewest_tokens_then_requests() -> None:
    balancer = Balancer("total_tokens", 2, PAGE)
    assert balancer.choose(request("long", 100), 8.0) == 0
    assert [balancer.choose(request(f"short{i}", 20), 8.0) for i in range(5)] == [1] * 5
    # Both ranks hold 100 tokens: the rank with one request is chosen.
    assert balancer.choose(request("tie", 20), 8.0) == 0
    give_tokens(balancer, "short0", 30, 10)
    assert balancer.choose(request("grown", 20), 8.0) == 0


def test_balancer_refuses_an_unknown_policy_by_name() -> None:
    with pytest.raises(ValueError, match=r"routing_policy: must be one of expected_load, .*got 'random'"):
        Balancer("random", 2, PAGE)


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_rank_overrides_every_policy(policy: str) -> None:
    balancer = Balancer(policy, 3, PAGE)
    assert {balancer.choose(request(f"r{i}", routed_dp_rank=2), 8.0) for i in range(20)} == {2}
    assert balancer.choose(request("free"), 8.0) == 0


@pytest.mark.parametrize("rank", [-1, 3, 10**20])
def test_pin_to_a_nonexistent_rank_is_refused_and_leaves_loads_unchanged(rank: int) -> None:
    balancer = Balancer("expected_load", 3, PAGE)
    balancer.choose(request("a"), 8.0)
    loads_before = [balancer.load(index) for index in range(3)]
    for name in ("a", "b"):  # "a" is open already; the refusal must not drop it
        with pytest.raises(ValueError, match=rf"^routed_dp_rank: must lie in \[0, 2\], got {rank}$"):
            balancer.choose(request(name, routed_dp_rank=rank), 8.0)
    assert [balancer.load(index) for index in range(3)] == loads_before


def test_balancer_ignores_cached_prefix_for_prompt_logprobs_requests() -> None:
    """Prompt logprobs need every prompt row computed, so a rank that has the prefix cached is no faster."""
    balancer = Balancer("expected_load", 2, PAGE, index_pages=AMPLE_PAGES)
    opened = request("first", 400)
    first_request = opened.request
    assert balancer.choose(opened, 2.0) == 0
    run_to_end(balancer, "first")
    for name, prompt_logprobs, expected_rank in (("plain", None, 0), ("scored", 1, 1)):
        assert balancer.choose(request(f"{name} beside", 300, 9000, routed_dp_rank=0), 2.0) == 0
        repeated_request = replace(
            first_request, request_id=name, params=replace(first_request.params, prompt_logprobs=prompt_logprobs)
        )
        assert balancer.choose(OpenRequest(repeated_request), 2.0) == expected_rank
        run_to_end(balancer, f"{name} beside")
        run_to_end(balancer, name)


def test_balancer_avoids_a_rank_with_an_uncomputed_long_prompt() -> None:
    balancer = Balancer("expected_load", 2, PAGE)
    assert balancer.choose(request("long", 3000, max_tokens=2), 2.0) == 0
    assert balancer.choose(request("a", 40, 5000, max_tokens=2), 2.0) == 1
    assert balancer.choose(request("b", 40, 6000, max_tokens=2), 2.0) == 1
    balancer.on_first_output("long")
    assert balancer.choose(request("c", 40, 7000, max_tokens=2), 2.0) == 0


def test_expected_load_prefers_one_long_stream_over_many_short_streams() -> None:
    """64 requests of 8 steps are as much work as one request of 512 steps. But the 64 requests make the next steps
    longer, and the one request does not.
    """
    balancer = Balancer("expected_load", 2, PAGE, step_rows=8)
    for i in range(64):
        name = f"short{i}"
        balancer.choose(request(name, 8, 100 * i, max_tokens=9, routed_dp_rank=0), 9.0)
        balancer.on_first_output(name)
    balancer.choose(request("long", 8, 9999, max_tokens=512, routed_dp_rank=1), 512.0)
    balancer.on_first_output("long")
    assert balancer.choose(request("next", 8, 8888, max_tokens=9), 9.0) == 1


def test_low_accept_length_counts_as_more_load() -> None:
    balancer = Balancer("expected_load", 2, PAGE, step_rows=8)
    for rank, name in enumerate(("slow", "fast")):
        balancer.choose(request(name, 8, 100 * rank, max_tokens=400, routed_dp_rank=rank), 200.0)
        balancer.on_first_output(name)
    for _ in range(8):
        give_tokens(balancer, "slow", 1, 1)
        give_tokens(balancer, "fast", 4, 1)
    slow, fast = (sum(balancer.load(rank).work) for rank in range(2))
    assert slow > 2 * fast
    assert balancer.choose(request("next", 8, 500, max_tokens=400), 200.0) == 1


def test_new_request_is_expected_to_have_the_accept_length_of_the_gang() -> None:
    untrained, trained = Balancer("expected_load", 2, PAGE), Balancer("expected_load", 2, PAGE)
    trained.choose(request("earlier", 8, 500, max_tokens=300), 300.0)
    give_tokens(trained, "earlier", 3, 1)
    trained.on_ended("earlier")
    for balancer in (untrained, trained):
        balancer.choose(request("a", 8, max_tokens=300, routed_dp_rank=0), 300.0)
    assert sum(untrained.load(0).work) == pytest.approx(3 * sum(trained.load(0).work), rel=0.01)


def test_request_beyond_its_length_estimate_still_counts_as_work() -> None:
    balancer = Balancer("expected_load", 1, PAGE)
    balancer.choose(request("a", 8, max_tokens=1000), 10.0)
    for _ in range(100):
        give_tokens(balancer, "a", 1, 1)
    assert sum(balancer.load(0).work) >= 50 * WORK_UNIT  # half of the 100 tokens it generated
    for _ in range(896):
        give_tokens(balancer, "a", 1, 1)
    assert sum(balancer.load(0).work) < 20 * WORK_UNIT  # max_tokens is near


def test_cached_prefix_attracts_requests_until_load_outweighs_the_prefix() -> None:
    balancer = Balancer("expected_load", 2, PAGE)
    ids = tuple(range(400))
    assert balancer.choose(OpenRequest(Request("first", ids)), 8.0) == 0
    assert balancer.choose(OpenRequest(Request("during", ids)), 8.0) == 1  # nothing is cached before a request ends
    balancer.on_ended("during")  # the request never started: its rank computed nothing
    run_to_end(balancer, "first")
    assert balancer.load(0).pages == 99
    chosen_ranks = [balancer.choose(OpenRequest(Request(f"again{i}", (*ids, 1000 + i, 1))), 8.0) for i in range(200)]
    assert chosen_ranks[:20] == [0] * 20
    assert 0 < chosen_ranks.count(1) < 100  # rank 0 is preferred but not overloaded: rank 1 gets a part


def test_idle_gang_spreads_prompts_over_the_caches_of_all_ranks() -> None:
    balancer = Balancer("expected_load", 2, PAGE)
    for i in range(10):
        balancer.choose(request(f"r{i}", 41, 1000 * i), 8.0)
        run_to_end(balancer, f"r{i}")
    assert [balancer.load(rank).pages for rank in range(2)] == [50, 50]


def test_cached_prefix_attracts_only_requests_with_the_same_cache_salt() -> None:
    balancer = Balancer("expected_load", 2, PAGE)
    ids, generated_ids = tuple(range(40)), (7, 8, 9, 10)
    balancer.choose(OpenRequest(Request("first", ids, routed_dp_rank=1, cache_salt=5)), 8.0)
    balancer.on_first_output("first")
    balancer.on_ended("first", generated_ids)
    next_turn_ids = (*ids, *generated_ids, 1)
    assert balancer.choose(OpenRequest(Request("other salt", next_turn_ids, cache_salt=6)), 8.0) == 0
    assert balancer.load(0).queued_tokens == 45
    assert balancer.choose(OpenRequest(Request("no salt", next_turn_ids, routed_dp_rank=1)), 8.0) == 1
    assert balancer.load(1).queued_tokens == 45
    balancer.on_ended("other salt")
    balancer.on_ended("no salt")
    assert balancer.choose(OpenRequest(Request("same salt", next_turn_ids, cache_salt=5)), 8.0) == 1
    assert balancer.load(1).queued_tokens == 45 - 40, "the generated tokens must be cached too"


def test_balancer_drops_index_pages_that_the_rank_did_not_have_cached() -> None:
    balancer = Balancer("expected_load", 1, PAGE)
    balancer.choose(request("a", 41), 8.0)
    run_to_end(balancer, "a")
    balancer.choose(request("b", 41), 8.0)
    assert (balancer.load(0).pages, balancer.load(0).queued_tokens) == (10, 1)
    balancer.on_first_output("b", cached_tokens=12)
    assert balancer.load(0).pages == 3
    balancer.on_first_output("b", cached_tokens=0)  # only the first call counts
    assert balancer.load(0).pages == 3


def test_restart_clears_prefix_indexes_and_requeues_open_requests() -> None:
    balancer = Balancer("expected_load", 2, PAGE)
    balancer.choose(request("old", 41, routed_dp_rank=0), 8.0)
    run_to_end(balancer, "old")
    resumed_request = request("a", 41, routed_dp_rank=0)
    balancer.choose(resumed_request, 8.0)
    balancer.on_first_output("a")
    give_tokens(balancer, "a", 5, 2)
    balancer.on_restart(AMPLE_PAGES)
    assert [balancer.load(rank).pages for rank in range(2)] == [0, 0]
    assert balancer.load(0).queued_tokens == 41
    resumed_request.request = replace(resumed_request.request, routed_dp_rank=1)
    resumed_request.sent_tokens[:] = range(41, 46)
    resumed_request.submission()
    assert balancer.choose(resumed_request, 8.0) == 1
    assert balancer.load(0) == RankLoad()
    assert (balancer.load(1).requests, balancer.load(1).tokens, balancer.load(1).queued_tokens) == (1, 46, 46)
    balancer.on_first_output("a")
    give_tokens(balancer, "a", 10, 3)
    balancer.on_ended("a", tuple(range(41, 41 + 15)))  # the 15 include the 5 from before the restart
    assert balancer.load(1).pages == (41 + 15 - 1) // PAGE
    balancer.choose(request("again", 57), 8.0)
    assert balancer.load(1).queued_tokens == 57 - 13 * PAGE


def test_balancer_ignores_events_of_requests_that_are_not_open() -> None:
    balancer = Balancer("expected_load", 2, PAGE)
    for name in ("never", "gone"):
        if name == "gone":
            balancer.choose(request(name), 8.0)
            balancer.on_ended(name)
        balancer.on_first_output(name)
        balancer.on_tokens(name, 3, 1)
        balancer.on_ended(name)
        balancer.on_ended(name, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert [balancer.load(rank) for rank in range(2)] == [RankLoad(), RankLoad()]


@dataclass
class RequestRecord:
    """The test's own record of one open request. `tokens` counts prompt and generated tokens, `queued_tokens` prompt
    tokens not yet computed.
    """

    rank: int
    tokens: int
    queued_tokens: int
    token_ids: tuple[int, ...]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_balancer_loads_match_a_recount_over_random_event_histories(policy: str, seed: int) -> None:
    """The test counts the loads itself, from a dictionary of records and a set of cached prefixes per rank. All loads
    are zero when all requests have ended.
    """
    draw = random.Random(seed)
    balancer = Balancer(policy, 3, PAGE, step_rows=8)
    records: dict[str, RequestRecord] = {}
    cached_prefixes: list[set[tuple[int, ...]]] = [set(), set(), set()]

    def prefixes(ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [ids[: end + 1] for end in range(PAGE, len(ids), PAGE)]

    def choose(name: str, ids: tuple[int, ...]) -> None:
        pinned_rank = draw.choice([None, None, None, 0, 1, 2])
        rank = balancer.choose(OpenRequest(Request(name, ids, routed_dp_rank=pinned_rank)), draw.uniform(0, 50))
        assert pinned_rank in (None, rank)
        cached_tokens = 0
        for prefix in prefixes(ids):
            if prefix not in cached_prefixes[rank]:
                break
            cached_tokens += PAGE
        records[name] = RequestRecord(rank, len(ids), len(ids) - cached_tokens, ids)

    for event_number in range(600):
        event = draw.choices(("new", "start", "go", "end", "again", "restart"), (30, 20, 60, 18, 2, 0.5))[0]
        name = draw.choice(list(records)) if records else ""
        if event == "new":
            stem = tuple(range(100 * draw.randrange(3), 100 * draw.randrange(3) + draw.randrange(1, 40)))
            choose(f"r{event_number}", (*stem, *draw.choices(range(5), k=draw.randrange(1, 12))))
        elif event == "restart":
            balancer.on_restart(AMPLE_PAGES)
            for record in records.values():
                record.queued_tokens = len(record.token_ids)
            cached_prefixes = [set(), set(), set()]
        elif not records:
            continue
        elif event == "start":
            balancer.on_first_output(name)
            records[name].queued_tokens = 0
        elif event == "go":
            count = draw.randrange(1, 6)
            give_tokens(balancer, name, count, draw.randrange(2))
            records[name].tokens += count
            records[name].queued_tokens = 0
        elif event == "again":
            ids = (*records[name].token_ids, 7, 7, 7)
            if not records[name].queued_tokens:
                cached_prefixes[records[name].rank] |= set(prefixes(records[name].token_ids))
            choose(name, ids)
        else:
            balancer.on_ended(name)
            record = records.pop(name)
            if not record.queued_tokens:
                cached_prefixes[record.rank] |= set(prefixes(record.token_ids))
        for rank in range(3):
            records_of_rank = [record for record in records.values() if record.rank == rank]
            load = balancer.load(rank)
            assert load.requests == len(records_of_rank)
            assert load.tokens == sum(record.tokens for record in records_of_rank)
            assert load.queued_tokens == sum(record.queued_tokens for record in records_of_rank)
            assert load.pages == len(cached_prefixes[rank])
            assert (sum(load.work) > 0) == bool(records_of_rank)
    assert len(records) > 3
    for name in list(records):
        balancer.on_ended(name)
    balancer.on_restart(AMPLE_PAGES)
    assert [balancer.load(rank) for rank in range(3)] == [RankLoad()] * 3


def test_prefix_index_agrees_with_the_radix_tree() -> None:
    draw = random.Random(0)
    tree, index = RadixTree(PAGE), PrefixIndex(10**6)
    pages = iter(range(10**6))
    for _ in range(300):
        ids, salt = [draw.randrange(2) for _ in range(draw.randrange(1, 40))], draw.choice((0, 0, 1, 1 << 70))
        assert index.count_cached(page_hashes_of(ids, PAGE, salt)) == len(tree.match(ids, salt))
        count = (len(ids) - 1) // PAGE
        tree.insert(ids, [next(pages) for _ in range(count)], salt=salt)
        index.add(page_hashes_of(ids, PAGE, salt))
        assert len(index) == tree.pages


def test_prefix_index_is_bounded_and_evicts_prefix_tails_first() -> None:
    index = PrefixIndex(10)
    chains = [tuple(range(100 * i, 100 * i + 4)) for i in range(50)]
    for chain in chains:
        index.add(chain)
        assert len(index) <= 10
    assert [index.count_cached(chain) for chain in chains[-3:]] == [2, 4, 4]
    index.add(range(1000, 1100))
    assert (len(index), index.count_cached(range(1000, 1100))) == (10, 10)


def test_balancer_of_settings_takes_policy_dp_size_and_page_size() -> None:
    config = EngineConfig(model_path="x", tp_size=8, attn_dp_size=4, page_size=8, routing_policy="total_tokens")
    balancer = Balancer.of(ResolvedSettings.from_settings(config))
    assert (balancer.policy, balancer.dp_size, balancer.page_size) == ("total_tokens", 4, 8)
    balancer = Balancer.of(ResolvedSettings.from_settings(config.model_copy(update={"disable_radix_cache": True})))
    balancer.choose(request("a", 41), 8.0)
    run_to_end(balancer, "a")
    assert balancer.load(0).pages == 0  # a disabled cache holds no pages


def test_restart_sets_the_index_size_unless_the_cache_is_disabled() -> None:
    balancer = Balancer("expected_load", 1, PAGE, index_pages=50)
    balancer.on_restart(20)
    for i in range(9):
        balancer.choose(request(f"r{i}", 100, 1000 * i), 8.0)
        run_to_end(balancer, f"r{i}")
    assert balancer.load(0).pages == 20
    balancer.on_restart(30)
    assert balancer.load(0).pages == 0
    uncached_balancer = Balancer("expected_load", 1, PAGE, index_pages=0)
    uncached_balancer.on_restart(20)
    uncached_balancer.choose(request("a", 41), 8.0)
    run_to_end(uncached_balancer, "a")
    assert uncached_balancer.load(0).pages == 0  # a disabled cache stays disabled
