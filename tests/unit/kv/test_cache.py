"""The cache against a model of it: who owns which page, after every operation."""

from random import Random

import numpy as np
import pytest
import torch

from cluster.batch import PageCopy, PageWrite
from cluster.kv.cache import KVCache, Lease
from cluster.kv.page_table import PageTable
from tests.tables import apply, held_slots

CPU = torch.device("cpu")


def small(pages: int = 12, page_size: int = 4, rows: int = 3, radix: bool = True) -> KVCache:
    return KVCache(pages, PageTable(rows, 64, page_size, CPU), radix)


def opened(cache: KVCache, tokens: list[int], reach: int, salt: int = 0) -> Lease:
    lease = cache.open(tokens, reach, salt=salt)
    assert lease is not None
    return lease


def test_page_table_row_follows_the_pages_of_the_lease() -> None:
    cache = small()
    lease = opened(cache, [5] * 6, 6)
    cache.grow([lease], [9])
    expected = [page * 4 + offset for page in lease.own_pages for offset in range(4)]
    row = held_slots(cache.table, lease.row, 64).tolist()
    assert row[:12] == expected
    assert set(row[12:]) == {0, 1, 2, 3}, "beyond the lease lies the sink"
    cache.close(lease, [5] * 6, 6)
    assert not cache.table.host_pages[lease.row].any()


def test_full_committed_pages_are_cached_when_the_next_token_is_known() -> None:
    cache = small()
    tokens = list(range(9))
    lease = opened(cache, tokens, 9)
    kept = lease.own_pages[:2]
    cache.close(lease, tokens, 8)
    assert (cache.free_pages, cache.evictable_pages, cache.used_pages) == (10, 2, 0)
    again = opened(cache, [*range(8), 8, 50, 51], 11)
    assert [node.page for node in again.locked_nodes] == kept
    assert (again.cached_tokens, cache.take_copies()) == (8, ())
    assert (cache.evictable_pages, cache.used_pages) == (0, 3)
    other = opened(cache, [*range(8), 99], 9)
    assert [node.page for node in other.locked_nodes] == kept[:1], (
        "the second page's last draft cell is made of token 8"
    )
    alone = opened(cache, list(range(8)), 8)
    assert [node.page for node in alone.locked_nodes] == kept[:1], "at least one token is computed"


def test_shared_cells_within_a_page_are_copied() -> None:
    cache = small()
    tokens = list(range(9))
    cache.close(opened(cache, tokens, 9), tokens, 8)
    other = opened(cache, [*range(6), 99, 98], 8)
    assert other.copy_source is not None
    assert other.cached_tokens == 5, "the cell of token 5 is made of the token after it as well"
    assert cache.take_copies() == (PageCopy(other.copy_source.page, other.own_pages[0], 1),)
    assert cache.take_copies() == (), "a copy is made once"
    cache.check()
    assert cache.evictable_pages == 0, "what is copied stays until the step has run"
    cache.publish(other, [*range(6), 99, 98, 97], 8)
    assert other.copy_source is None
    assert cache.evictable_pages == 1
    cache.check()
    cache.close(other, [*range(6), 99, 98, 97], 8)
    assert cache.evictable_pages == 3


def test_open_copies_no_cells_when_the_request_needs_all_pages() -> None:
    cache = small()
    tokens = [1, 2, 3, 4, 5]
    cache.close(opened(cache, tokens, 5), tokens, 4)
    assert (cache.free_pages, cache.evictable_pages) == (11, 1)
    lease = cache.open([1, 2, *range(50, 92)], 44, reserved_pages=1)
    assert lease is not None, "eleven pages and one to spare are all there are"
    assert (lease.copy_source, lease.cached_tokens, cache.take_copies()) == (None, 0, ())
    assert (cache.free_pages, cache.evictable_pages, len(lease.own_pages)) == (0, 1, 11)
    cache.check()
    assert cache.grow([lease], [48]), "the page that was spared"
    cache.check()


def test_partially_filled_page_of_a_running_request_is_a_copy_source() -> None:
    cache = small()
    tokens = list(range(7))
    running = opened(cache, tokens, 11)
    cache.publish(running, [*tokens, 50], 7)
    other = opened(cache, [*range(7)], 7)
    assert other.locked_nodes == running.locked_nodes and len(other.locked_nodes) == 1
    assert other.cached_tokens == 6
    assert cache.take_copies() == (PageCopy(running.own_pages[0], other.own_pages[0], 2),)
    more = opened(cache, [*range(7), 50, 51], 9)
    assert more.cached_tokens == 7
    assert cache.take_copies() == (PageCopy(running.own_pages[0], more.own_pages[0], 3),)
    cache.check()


def test_full_pages_are_shared_while_their_request_runs() -> None:
    cache = small()
    tokens = list(range(9))
    running = opened(cache, tokens, 12)
    first, second, third = running.own_pages
    cache.publish(running, tokens, 6)
    assert ([node.page for node in running.locked_nodes], running.own_pages) == ([first], [second, third])
    assert opened(cache, tokens, 9).locked_nodes == running.locked_nodes
    cache.publish(running, tokens, 9)
    assert ([node.page for node in running.locked_nodes], running.own_pages) == ([first, second], [third])
    assert cache.table.host_pages[running.row, :3].tolist() == [first, second, third]
    cache.check()
    cache.close(running, tokens, 9)
    cache.check()


def test_publishing_a_page_computed_twice_switches_to_the_cached_page() -> None:
    cache = small()
    tokens = list(range(9))
    one, other = opened(cache, tokens, 12), opened(cache, tokens, 12)
    kept = one.own_pages[:2]
    cache.publish(one, tokens, 9)
    cache.table.mark_sent()
    before, mine = cache.free_pages, other.own_pages[:]
    cache.publish(other, tokens, 9)
    assert other.locked_nodes == one.locked_nodes and other.own_pages == mine[2:]
    assert cache.free_pages == before + 2, "its own two pages are free again"
    assert cache.table.unsent_writes == (PageWrite(other.row, 0, kept[0]), PageWrite(other.row, 1, kept[1]))
    cache.check()
    cache.close(one, tokens, 9)
    assert cache.used_pages == 3, "the other one still reads them"
    cache.close(other, tokens, 9)
    cache.check()


def test_open_leaves_the_reserved_pages_free() -> None:
    cache = small()
    tokens = list(range(17))
    cache.close(opened(cache, tokens, 17), tokens, 17)
    assert (cache.free_pages, cache.evictable_pages) == (8, 4)
    asked = [*tokens, 60, 61, 62]  # five pages, four of which are there; those cannot be evicted once they are locked
    assert cache.open(asked, 20, reserved_pages=8) is None
    assert (cache.free_pages, cache.evictable_pages, cache.free_rows) == (8, 4, 3)
    assert cache.open(asked, 20, reserved_pages=7) is not None


def test_next_pages_are_equal_for_requests_that_compute_the_same_pages() -> None:
    cache = small()
    a, b = list(range(20)), [*range(10), *range(50, 60)]
    running = opened(cache, a, 20)
    assert cache.next_pages(a, 2, running) == cache.next_pages(b, 2) is not None
    assert cache.next_pages(a, 3, running) != cache.next_pages(b, 3)
    assert cache.next_pages(b[:9], 2) == cache.next_pages(b, 2)
    assert cache.next_pages(b[:8], 2) is None, "nothing would be left to compute"
    cache.publish(running, a, 8)
    assert cache.next_pages(a, 2, running) != cache.next_pages(b, 2)
    cache.check()
    assert small(radix=False).next_pages(a, 2) is None


def test_cache_shares_nothing_between_salts() -> None:
    cache = small(24)
    tokens = list(range(11))
    for salt in (0, 5):
        assert cache.max_cached_tokens(tokens, salt) < 4, "less than a page"
        running = opened(cache, tokens, 12, salt)
        other = opened(cache, [*range(7)], 7, salt)
        assert (running.cached_tokens, other.cached_tokens, cache.take_copies()) == (0, 0, ())
        cache.publish(running, tokens, 3)
        filling = opened(cache, tokens[:4], 4, salt)
        assert (filling.cached_tokens, len(cache.take_copies())) == (3, 1), (
            "within a salt the cells of a page are copied"
        )
        cache.close(filling, tokens[:4], 0)
        assert cache.next_pages(tokens, 2, None, salt) == cache.next_pages(tokens, 2, running, salt)
        assert cache.next_pages(tokens, 2, None, salt) != cache.next_pages(tokens, 2, None, salt + 1)
        cache.publish(running, tokens, 10)
        cache.check()
        cache.close(other, tokens[:7], 0)
        cache.close(running, tokens, 10)
        assert cache.max_cached_tokens(tokens, salt) >= 8
        cache.check()
    assert cache.evictable_pages == 4, "two pages of each"
    assert opened(cache, tokens, 11, 5).cached_tokens == 8


def test_cache_without_radix_caches_no_pages() -> None:
    cache = small(radix=False)
    cache.close(opened(cache, list(range(9)), 9), list(range(9)), 9)
    assert (cache.free_pages, cache.evictable_pages) == (12, 0)


def test_grow_is_all_or_nothing_and_evicts() -> None:
    cache = small()
    tokens = list(range(17))
    cache.close(opened(cache, tokens, 17), tokens, 17)
    a, b = opened(cache, [40], 1), opened(cache, [41], 1)
    assert (cache.free_pages, cache.evictable_pages) == (6, 4)
    assert not cache.grow([a, b], [24, 29])
    assert (a.page_count, b.page_count, cache.evictable_pages) == (1, 1, 4)
    assert cache.grow([a, b], [24, 20])
    assert (a.page_count, b.page_count, cache.free_pages, cache.evictable_pages) == (6, 5, 0, 1)
    cache.check()


def test_closing_a_lease_twice_raises_an_error() -> None:
    cache = small()
    lease = opened(cache, [1, 2], 2)
    cache.close(lease, [1, 2], 2)
    with pytest.raises(ValueError, match="closed twice"):
        cache.close(lease, [1, 2], 2)


def test_check_detects_lost_and_doubly_owned_pages() -> None:
    cache = small()
    a, b = opened(cache, [1], 5), opened(cache, [2], 5)
    page = a.own_pages.pop()
    with pytest.raises(AssertionError, match="no owner"):
        cache.check()
    a.own_pages.append(b.own_pages[0])
    with pytest.raises(AssertionError, match="two owners"):
        cache.check()
    a.own_pages[-1] = page
    cache.check()


def test_check_detects_wrong_locks_and_page_table_entries() -> None:
    cache = small()
    tokens = list(range(9))
    running = opened(cache, tokens, 9)
    cache.publish(running, tokens, 9)
    running.locked_nodes[0].locks += 1
    with pytest.raises(AssertionError, match="has 2 locks"):
        cache.check()
    running.locked_nodes[0].locks -= 1
    cache.table.write([running.row], [1], [running.own_pages[0]])
    with pytest.raises(AssertionError, match="row 0 has other pages"):
        cache.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_cache_operations_lose_no_pages(page_size: int, seed: int) -> None:
    """Open, grow, commit, publish and close at random; texts come from few tokens and salts, so that prefixes meet. A
    second table follows the first one by its journal.
    """
    random = Random(seed)
    cache = KVCache(48 // page_size, PageTable(4, 48, page_size, CPU), True)
    follower = PageTable(4, 48, page_size, CPU)
    contents: dict[int, tuple[int, ...]] = {}  # slot -> the salt, and the text up to and after it, written there
    running: list[tuple[Lease, list[int], int]] = []  # lease, tokens, committed
    hits = copied = swapped = 0

    def write(lease: Lease, tokens: list[int], start: int, stop: int) -> None:
        for index in range(start, stop):
            slot = int(held_slots(cache.table, lease.row, index + 1)[index])
            assert slot >= page_size, "a committed token lies in the sink"
            contents[slot] = (lease.salt, *tokens[: index + 2])

    def holds(lease: Lease, tokens: list[int], count: int) -> None:
        for index, slot in enumerate(held_slots(cache.table, lease.row, count).tolist()):
            assert contents[slot] == (lease.salt, *tokens[: index + 2]), "a cell was made of other tokens"

    for _ in range(800):
        move = random.random()
        if move < 0.35:
            tokens = [int(random.random() < 0.15) for _ in range(random.randint(1, 16))]
            before = (cache.free_pages, cache.evictable_pages, cache.free_rows)
            salt = random.choice((0, 0, 0, 9))
            lease = cache.open(tokens, len(tokens), random.choice((0, 0, 3)), salt)
            if lease is None:
                assert (cache.free_pages, cache.evictable_pages, cache.free_rows) == before
            else:
                for copy in cache.take_copies():
                    copied += 1
                    for cell in range(copy.tokens):
                        contents[copy.target * page_size + cell] = contents[copy.source * page_size + cell]
                assert lease.cached_tokens < len(tokens)
                hits += lease.cached_tokens > 0
                holds(lease, tokens, lease.cached_tokens)
                running.append((lease, tokens, lease.cached_tokens))
        elif running and move < 0.75:
            at = random.randrange(len(running))
            lease, tokens, committed = running[at]
            more = [int(random.random() < 0.15) for _ in range(random.randint(1, 6))]
            if len(tokens) + len(more) <= 40 and cache.grow([lease], [len(tokens) + len(more)]):
                tokens += more
                committed_now = random.randint(committed, len(tokens) - 1)
                write(lease, tokens, committed, committed_now)
                if random.random() < 0.8:
                    mine = lease.own_pages[:]
                    cache.publish(lease, tokens, committed_now)
                    swapped += sum(
                        page not in (n.page for n in lease.locked_nodes) for page in mine[: -len(lease.own_pages) or 99]
                    )
                    holds(lease, tokens, committed_now)
                running[at] = (lease, tokens, committed_now)
        elif running:
            lease, tokens, committed = running.pop(random.randrange(len(running)))
            holds(lease, tokens, committed)
            cache.close(lease, tokens, committed)
        cache.check()
        if random.random() < 0.5:
            apply(follower, cache.table.unsent_writes)
            cache.table.mark_sent()
            assert np.array_equal(follower.device_pages.numpy(), cache.table.host_pages)
        owned = sum(len(lease.own_pages) for lease, _, _ in running)
        read = {n for lease, _, _ in running for n in [*lease.locked_nodes, lease.copy_source] if n is not None}
        assert cache.used_pages == owned + len(read)
        assert cache.free_pages + cache.evictable_pages + cache.used_pages == cache.total_pages
    for lease, tokens, committed in running:
        cache.close(lease, tokens, committed)
    assert cache.used_pages == 0
    assert hits > 10 and swapped > 3 and (copied > 5 or page_size == 1)
