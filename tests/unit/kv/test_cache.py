"""The KV cache: which request owns or shares which page after each operation, also compared with a simple model."""

from random import Random

import numpy as np
import pytest
import torch

from cluster.batch import PageCopy, PageWrite
from cluster.kv.cache import KVCache, Lease
from cluster.kv.page_table import PageTable
from tests.support.page_tables import apply, held_slots

CPU = torch.device("cpu")


def small_cache(pages: int = 12, page_size: int = 4, rows: int = 3, radix: bool = True) -> KVCache:
    return KVCache(pages, PageTable(rows, 64, page_size, CPU), radix)


def open_lease(cache: KVCache, tokens: list[int], reach: int, salt: int = 0) -> Lease:
    lease = cache.open(tokens, reach, salt=salt)
    assert lease is not None
    return lease


def test_page_table_row_follows_the_pages_of_the_lease() -> None:
    cache = small_cache()
    lease = open_lease(cache, [5] * 6, 6)
    cache.grow([lease], [9])
    expected = [page * 4 + offset for page in lease.own_pages for offset in range(4)]
    row = held_slots(cache.table, lease.row, 64).tolist()
    assert row[:12] == expected
    assert set(row[12:]) == {0, 1, 2, 3}, "entries beyond the lease must point to the sink page"
    cache.close(lease, [5] * 6, 6)
    assert not cache.table.host_pages[lease.row].any()


def test_full_committed_pages_are_cached_when_the_next_token_is_known() -> None:
    cache = small_cache()
    tokens = list(range(9))
    lease = open_lease(cache, tokens, 9)
    cached_pages = lease.own_pages[:2]
    cache.close(lease, tokens, 8)
    assert (cache.free_pages, cache.evictable_pages, cache.used_pages) == (10, 2, 0)
    longer_lease = open_lease(cache, [*range(8), 8, 50, 51], 11)
    assert [node.page for node in longer_lease.locked_nodes] == cached_pages
    assert (longer_lease.cached_tokens, cache.take_copies()) == (8, ())
    assert (cache.evictable_pages, cache.used_pages) == (0, 3)
    differing_lease = open_lease(cache, [*range(8), 99], 9)
    assert [node.page for node in differing_lease.locked_nodes] == cached_pages[:1], (
        "the last draft cell of the second page depends on token 8"
    )
    equal_lease = open_lease(cache, list(range(8)), 8)
    assert [node.page for node in equal_lease.locked_nodes] == cached_pages[:1], "one token must be computed"


def test_shared_cells_within_a_page_are_copied() -> None:
    cache = small_cache()
    tokens = list(range(9))
    cache.close(open_lease(cache, tokens, 9), tokens, 8)
    second_lease = open_lease(cache, [*range(6), 99, 98], 8)
    assert second_lease.copy_source is not None
    assert second_lease.cached_tokens == 5, "the cell of token 5 depends on the token after it too"
    assert cache.take_copies() == (PageCopy(second_lease.copy_source.page, second_lease.own_pages[0], 1),)
    assert cache.take_copies() == (), "a copy must be made once"
    cache.check()
    assert cache.evictable_pages == 0, "the source page must stay until the step has run"
    cache.publish(second_lease, [*range(6), 99, 98, 97], 8)
    assert second_lease.copy_source is None
    assert cache.evictable_pages == 1
    cache.check()
    cache.close(second_lease, [*range(6), 99, 98, 97], 8)
    assert cache.evictable_pages == 3


def test_open_copies_no_cells_when_the_request_needs_all_pages() -> None:
    cache = small_cache()
    tokens = [1, 2, 3, 4, 5]
    cache.close(open_lease(cache, tokens, 5), tokens, 4)
    assert (cache.free_pages, cache.evictable_pages) == (11, 1)
    lease = cache.open([1, 2, *range(50, 92)], 44, reserved_pages=1)
    assert lease is not None, "the cache has eleven pages and one reserved page"
    assert (lease.copy_source, lease.cached_tokens, cache.take_copies()) == (None, 0, ())
    assert (cache.free_pages, cache.evictable_pages, len(lease.own_pages)) == (0, 1, 11)
    cache.check()
    assert cache.grow([lease], [48]), "the reserved page is free"
    cache.check()


def test_partially_filled_page_of_a_running_request_is_a_copy_source() -> None:
    cache = small_cache()
    tokens = list(range(7))
    running_lease = open_lease(cache, tokens, 11)
    cache.publish(running_lease, [*tokens, 50], 7)
    equal_lease = open_lease(cache, [*range(7)], 7)
    assert equal_lease.locked_nodes == running_lease.locked_nodes and len(equal_lease.locked_nodes) == 1
    assert equal_lease.cached_tokens == 6
    assert cache.take_copies() == (PageCopy(running_lease.own_pages[0], equal_lease.own_pages[0], 2),)
    longer_lease = open_lease(cache, [*range(7), 50, 51], 9)
    assert longer_lease.cached_tokens == 7
    assert cache.take_copies() == (PageCopy(running_lease.own_pages[0], longer_lease.own_pages[0], 3),)
    cache.check()


def test_full_pages_are_shared_while_their_request_runs() -> None:
    cache = small_cache()
    tokens = list(range(9))
    running_lease = open_lease(cache, tokens, 12)
    first, second, third = running_lease.own_pages
    cache.publish(running_lease, tokens, 6)
    assert ([node.page for node in running_lease.locked_nodes], running_lease.own_pages) == ([first], [second, third])
    assert open_lease(cache, tokens, 9).locked_nodes == running_lease.locked_nodes
    cache.publish(running_lease, tokens, 9)
    assert ([node.page for node in running_lease.locked_nodes], running_lease.own_pages) == ([first, second], [third])
    assert cache.table.host_pages[running_lease.row, :3].tolist() == [first, second, third]
    cache.check()
    cache.close(running_lease, tokens, 9)
    cache.check()


def test_publishing_a_page_computed_twice_switches_to_the_cached_page() -> None:
    cache = small_cache()
    tokens = list(range(9))
    first_lease, second_lease = open_lease(cache, tokens, 12), open_lease(cache, tokens, 12)
    cached_pages = first_lease.own_pages[:2]
    cache.publish(first_lease, tokens, 9)
    cache.table.mark_sent()
    free_pages_before, second_pages = cache.free_pages, second_lease.own_pages[:]
    cache.publish(second_lease, tokens, 9)
    assert second_lease.locked_nodes == first_lease.locked_nodes and second_lease.own_pages == second_pages[2:]
    assert cache.free_pages == free_pages_before + 2, "the second lease's two pages must be free again"
    assert cache.table.unsent_writes == (
        PageWrite(second_lease.row, 0, cached_pages[0]),
        PageWrite(second_lease.row, 1, cached_pages[1]),
    )
    cache.check()
    cache.close(first_lease, tokens, 9)
    assert cache.used_pages == 3, "the second lease still reads them"
    cache.close(second_lease, tokens, 9)
    cache.check()


def test_open_leaves_the_reserved_pages_free() -> None:
    cache = small_cache()
    tokens = list(range(17))
    cache.close(open_lease(cache, tokens, 17), tokens, 17)
    assert (cache.free_pages, cache.evictable_pages) == (8, 4)
    prompt = [*tokens, 60, 61, 62]  # five pages; four are cached, and cannot be evicted once locked
    assert cache.open(prompt, 20, reserved_pages=8) is None
    assert (cache.free_pages, cache.evictable_pages, cache.free_rows) == (8, 4, 3)
    assert cache.open(prompt, 20, reserved_pages=7) is not None


def test_next_pages_are_equal_for_requests_that_compute_the_same_pages() -> None:
    cache = small_cache()
    a, b = list(range(20)), [*range(10), *range(50, 60)]
    running_lease = open_lease(cache, a, 20)
    assert cache.next_pages(a, 2, running_lease) == cache.next_pages(b, 2) is not None
    assert cache.next_pages(a, 3, running_lease) != cache.next_pages(b, 3)
    assert cache.next_pages(b[:9], 2) == cache.next_pages(b, 2)
    assert cache.next_pages(b[:8], 2) is None, "nothing would be left to compute"
    cache.publish(running_lease, a, 8)
    assert cache.next_pages(a, 2, running_lease) != cache.next_pages(b, 2)
    cache.check()
    assert small_cache(radix=False).next_pages(a, 2) is None


def test_cache_shares_nothing_between_salts() -> None:
    cache = small_cache(24)
    tokens = list(range(11))
    for salt in (0, 5):
        assert cache.max_cached_tokens(tokens, salt) < 4, "less than a page"
        running_lease = open_lease(cache, tokens, 12, salt)
        shorter_lease = open_lease(cache, [*range(7)], 7, salt)
        assert (running_lease.cached_tokens, shorter_lease.cached_tokens, cache.take_copies()) == (0, 0, ())
        cache.publish(running_lease, tokens, 3)
        copying_lease = open_lease(cache, tokens[:4], 4, salt)
        assert (copying_lease.cached_tokens, len(cache.take_copies())) == (3, 1), (
            "requests with the same salt copy cells of a page"
        )
        cache.close(copying_lease, tokens[:4], 0)
        assert cache.next_pages(tokens, 2, None, salt) == cache.next_pages(tokens, 2, running_lease, salt)
        assert cache.next_pages(tokens, 2, None, salt) != cache.next_pages(tokens, 2, None, salt + 1)
        cache.publish(running_lease, tokens, 10)
        cache.check()
        cache.close(shorter_lease, tokens[:7], 0)
        cache.close(running_lease, tokens, 10)
        assert cache.max_cached_tokens(tokens, salt) >= 8
        cache.check()
    assert cache.evictable_pages == 4, "two pages per salt"
    assert open_lease(cache, tokens, 11, 5).cached_tokens == 8


def test_cache_without_radix_caches_no_pages() -> None:
    cache = small_cache(radix=False)
    cache.close(open_lease(cache, list(range(9)), 9), list(range(9)), 9)
    assert (cache.free_pages, cache.evictable_pages) == (12, 0)


def test_grow_is_all_or_nothing_and_evicts() -> None:
    cache = small_cache()
    tokens = list(range(17))
    cache.close(open_lease(cache, tokens, 17), tokens, 17)
    a, b = open_lease(cache, [40], 1), open_lease(cache, [41], 1)
    assert (cache.free_pages, cache.evictable_pages) == (6, 4)
    assert not cache.grow([a, b], [24, 29])
    assert (a.page_count, b.page_count, cache.evictable_pages) == (1, 1, 4)
    assert cache.grow([a, b], [24, 20])
    assert (a.page_count, b.page_count, cache.free_pages, cache.evictable_pages) == (6, 5, 0, 1)
    cache.check()


def test_closing_a_lease_twice_raises_an_error() -> None:
    cache = small_cache()
    lease = open_lease(cache, [1, 2], 2)
    cache.close(lease, [1, 2], 2)
    with pytest.raises(ValueError, match="closed twice"):
        cache.close(lease, [1, 2], 2)


def test_check_detects_lost_and_doubly_owned_pages() -> None:
    cache = small_cache()
    a, b = open_lease(cache, [1], 5), open_lease(cache, [2], 5)
    page = a.own_pages.pop()
    with pytest.raises(AssertionError, match="no owner"):
        cache.check()
    a.own_pages.append(b.own_pages[0])
    with pytest.raises(AssertionError, match="two owners"):
        cache.check()
    a.own_pages[-1] = page
    cache.check()


def test_check_detects_wrong_locks_and_page_table_entries() -> None:
    cache = small_cache()
    tokens = list(range(9))
    running_lease = open_lease(cache, tokens, 9)
    cache.publish(running_lease, tokens, 9)
    running_lease.locked_nodes[0].locks += 1
    with pytest.raises(AssertionError, match="has 2 locks"):
        cache.check()
    running_lease.locked_nodes[0].locks -= 1
    cache.table.write([running_lease.row], [1], [running_lease.own_pages[0]])
    with pytest.raises(AssertionError, match="row 0 has other pages"):
        cache.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_cache_operations_lose_no_pages(page_size: int, seed: int) -> None:
    """Open, grow, commit, publish and close leases at random. Prompts have few different tokens and salts, so that many
    share prefixes. A second page table is updated with the unsent writes of the first, and must equal it.
    """
    random = Random(seed)
    cache = KVCache(48 // page_size, PageTable(4, 48, page_size, CPU), True)
    follower = PageTable(4, 48, page_size, CPU)
    tokens_of_slot: dict[int, tuple[int, ...]] = {}  # slot -> salt, and tokens up to the one after the slot's
    running: list[tuple[Lease, list[int], int]] = []  # lease, tokens, committed
    hit_count = copy_count = swapped_count = 0

    def write(lease: Lease, tokens: list[int], start: int, stop: int) -> None:
        for index in range(start, stop):
            slot = int(held_slots(cache.table, lease.row, index + 1)[index])
            assert slot >= page_size, "a committed token is in the sink page"
            tokens_of_slot[slot] = (lease.salt, *tokens[: index + 2])

    def check_cells(lease: Lease, tokens: list[int], count: int) -> None:
        for index, slot in enumerate(held_slots(cache.table, lease.row, count).tolist()):
            assert tokens_of_slot[slot] == (lease.salt, *tokens[: index + 2]), "a cell holds other tokens"

    for _ in range(800):
        operation = random.random()
        if operation < 0.35:
            tokens = [int(random.random() < 0.15) for _ in range(random.randint(1, 16))]
            counts_before = (cache.free_pages, cache.evictable_pages, cache.free_rows)
            salt = random.choice((0, 0, 0, 9))
            lease = cache.open(tokens, len(tokens), random.choice((0, 0, 3)), salt)
            if lease is None:
                assert (cache.free_pages, cache.evictable_pages, cache.free_rows) == counts_before
            else:
                for copy in cache.take_copies():
                    copy_count += 1
                    for cell in range(copy.tokens):
                        tokens_of_slot[copy.target * page_size + cell] = tokens_of_slot[copy.source * page_size + cell]
                assert lease.cached_tokens < len(tokens)
                hit_count += lease.cached_tokens > 0
                check_cells(lease, tokens, lease.cached_tokens)
                running.append((lease, tokens, lease.cached_tokens))
        elif running and operation < 0.75:
            lease_index = random.randrange(len(running))
            lease, tokens, committed = running[lease_index]
            new_tokens = [int(random.random() < 0.15) for _ in range(random.randint(1, 6))]
            if len(tokens) + len(new_tokens) <= 40 and cache.grow([lease], [len(tokens) + len(new_tokens)]):
                tokens += new_tokens
                committed_now = random.randint(committed, len(tokens) - 1)
                write(lease, tokens, committed, committed_now)
                if random.random() < 0.8:
                    pages_before = lease.own_pages[:]
                    cache.publish(lease, tokens, committed_now)
                    swapped_count += sum(
                        page not in (n.page for n in lease.locked_nodes)
                        for page in pages_before[: -len(lease.own_pages) or 99]
                    )
                    check_cells(lease, tokens, committed_now)
                running[lease_index] = (lease, tokens, committed_now)
        elif running:
            lease, tokens, committed = running.pop(random.randrange(len(running)))
            check_cells(lease, tokens, committed)
            cache.close(lease, tokens, committed)
        cache.check()
        if random.random() < 0.5:
            apply(follower, cache.table.unsent_writes)
            cache.table.mark_sent()
            assert np.array_equal(follower.device_pages.numpy(), cache.table.host_pages)
        owned_count = sum(len(lease.own_pages) for lease, _, _ in running)
        read_nodes = {n for lease, _, _ in running for n in [*lease.locked_nodes, lease.copy_source] if n is not None}
        assert cache.used_pages == owned_count + len(read_nodes)
        assert cache.free_pages + cache.evictable_pages + cache.used_pages == cache.total_pages
    for lease, tokens, committed in running:
        cache.close(lease, tokens, committed)
    assert cache.used_pages == 0
    assert hit_count > 10 and swapped_count > 3 and (copy_count > 5 or page_size == 1)
