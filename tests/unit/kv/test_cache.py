"""The cache against a model of it: who owns which page, after every operation."""

from random import Random

import pytest
import torch

from cluster.kv.cache import KVCache, Lease

CPU = torch.device("cpu")


def small(pages: int = 12, page_size: int = 4, rows: int = 3, radix: bool = True) -> KVCache:
    return KVCache(pages, page_size, rows, 64, radix, CPU)


def opened(cache: KVCache, tokens: list[int], reach: int) -> Lease:
    lease = cache.open(tokens, reach)
    assert lease is not None
    return lease


def test_slots_follow_pages() -> None:
    cache = small()
    lease = opened(cache, [5] * 6, 6)
    cache.grow([lease], [9])
    expected = [page * 4 + offset for page in lease.own for offset in range(4)]
    row = cache.table.slots[lease.row].tolist()
    assert row[:12] == expected
    assert set(row[12:]) == {0}, "beyond the lease lies the sink"
    cache.close(lease, [5] * 6, 6)
    assert set(cache.table.slots[lease.row].tolist()) == {0}


def test_full_committed_pages_are_cached_where_the_next_token_is_known() -> None:
    cache = small()
    tokens = list(range(9))
    lease = opened(cache, tokens, 9)
    kept = lease.own[:2]
    cache.close(lease, tokens, 8)
    assert (cache.free, cache.cached, cache.used) == (10, 2, 0)
    again = opened(cache, [*range(8), 8, 50, 51], 11)
    assert [node.page for node in again.locked] == kept
    assert cache.cached_tokens(again) == 8
    assert (cache.cached, cache.used) == (0, 3)
    other = opened(cache, [*range(8), 99], 9)
    assert cache.cached_tokens(other) == 4, "the second page's last draft cell is made of token 8"
    alone = opened(cache, list(range(8)), 8)
    assert cache.cached_tokens(alone) == 4, "at least one token is computed"


def test_a_page_that_is_not_committed_is_not_cached() -> None:
    cache = small()
    tokens = list(range(13))
    cache.close(opened(cache, tokens, 13), tokens, 7)
    assert cache.cached == 1


def test_without_radix_nothing_is_cached() -> None:
    cache = small(radix=False)
    cache.close(opened(cache, list(range(9)), 9), list(range(9)), 9)
    assert (cache.free, cache.cached) == (12, 0)


def test_open_changes_nothing_when_it_cannot_hold_the_request() -> None:
    cache = small()
    tokens = list(range(9))
    cache.close(opened(cache, tokens, 9), tokens, 9)
    lease = opened(cache, [7] * 30, 30)
    assert cache.open(tokens, 40) is None
    assert (cache.free, cache.cached, cache.free_rows) == (2, 2, 2)
    cache.check()
    cache.close(lease, [7] * 30, 0)


def test_open_without_a_free_row_is_none() -> None:
    cache = small(rows=1)
    opened(cache, [1], 1)
    assert cache.open([2], 1) is None


def test_grow_is_all_or_nothing_and_evicts() -> None:
    cache = small()
    tokens = list(range(17))
    cache.close(opened(cache, tokens, 17), tokens, 17)
    a, b = opened(cache, [40], 1), opened(cache, [41], 1)
    assert (cache.free, cache.cached) == (6, 4)
    assert not cache.grow([a, b], [24, 29])
    assert (a.pages, b.pages, cache.cached) == (1, 1, 4)
    assert cache.grow([a, b], [24, 20])
    assert (a.pages, b.pages, cache.free, cache.cached) == (6, 5, 0, 1)
    cache.check()


def test_closing_twice_is_an_error() -> None:
    cache = small()
    lease = opened(cache, [1, 2], 2)
    cache.close(lease, [1, 2], 2)
    with pytest.raises(ValueError, match="closed twice"):
        cache.close(lease, [1, 2], 2)


def test_check_sees_lost_and_doubly_owned_pages() -> None:
    cache = small()
    a, b = opened(cache, [1], 5), opened(cache, [2], 5)
    page = a.own.pop()
    with pytest.raises(AssertionError, match="no owner"):
        cache.check()
    a.own.append(b.own[0])
    with pytest.raises(AssertionError, match="two owners"):
        cache.check()
    a.own[-1] = page
    cache.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_lose_no_page(page_size: int, seed: int) -> None:
    """Open, grow, commit and close at random; texts come from few tokens, so that prefixes meet."""
    random = Random(seed)
    cache = KVCache(32 // page_size, page_size, 4, 48, True, CPU)
    contents: dict[int, tuple[int, ...]] = {}  # slot -> the text up to and after it that was written there
    running: list[tuple[Lease, list[int], int]] = []  # lease, tokens, committed
    hits = 0

    def write(lease: Lease, tokens: list[int], start: int, stop: int) -> None:
        for index in range(start, stop):
            slot = int(cache.table.slots[lease.row, index])
            assert slot >= page_size, "a committed token lies in the sink"
            contents[slot] = tuple(tokens[: index + 2])

    for _ in range(400):
        move = random.random()
        if move < 0.4:
            tokens = [int(random.random() < 0.15) for _ in range(random.randint(1, 16))]
            before = (cache.free, cache.cached, cache.free_rows)
            lease = cache.open(tokens, len(tokens))
            if lease is None:
                assert (cache.free, cache.cached, cache.free_rows) == before
            else:
                cached = cache.cached_tokens(lease)
                assert cached < len(tokens)
                hits += cached > 0
                for index in range(cached):
                    slot = int(cache.table.slots[lease.row, index])
                    assert contents[slot] == tuple(tokens[: index + 2]), "a cached cell was made of other tokens"
                running.append((lease, tokens, cached))
        elif running and move < 0.75:
            at = random.randrange(len(running))
            lease, tokens, committed = running[at]
            more = [int(random.random() < 0.15) for _ in range(random.randint(1, 6))]
            if len(tokens) + len(more) <= 40 and cache.grow([lease], [len(tokens) + len(more)]):
                tokens += more
                committed_now = random.randint(committed, len(tokens) - 1)
                write(lease, tokens, committed, committed_now)
                running[at] = (lease, tokens, committed_now)
        elif running:
            lease, tokens, committed = running.pop(random.randrange(len(running)))
            cache.close(lease, tokens, committed)
        cache.check()
        owned = sum(len(lease.own) for lease, _, _ in running) + len(
            {n for lease, _, _ in running for n in lease.locked}
        )
        assert cache.used == owned
        assert cache.free + cache.cached + cache.used == cache.total
    for lease, tokens, committed in running:
        cache.close(lease, tokens, committed)
    assert cache.used == 0
    assert hits > 10
