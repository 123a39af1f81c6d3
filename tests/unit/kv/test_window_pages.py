"""Window pages: running requests always find the cells that their next rows see, and no window page is lost."""

from random import Random

import pytest
import torch

from cluster.kv.cache import KVCache, Lease
from cluster.kv.page_table import PageTable
from cluster.kv.pool_sizes import EXPECTED_TOKENS, PoolSizes, WindowNeeds
from cluster.kv.window_map import WindowMap
from cluster.kv.window_pages import WindowPages

CPU = torch.device("cpu")
REACH, WRITTEN = 7, 6
"""Here rows see at most `REACH` committed tokens, and a step writes at most `WRITTEN` tokens of a request."""


def window_cache(pages: int, page_size: int, window_pages: int, rows: int = 4, radix: bool = True) -> KVCache:
    request_pages = -(-(REACH + WRITTEN) // page_size) + 2
    needs = WindowNeeds(REACH, WRITTEN, request_pages, 0, rows)
    window_map = WindowMap(pages, page_size, CPU)
    table = PageTable(rows, 64, page_size, CPU, window_map)
    return KVCache(pages, table, radix, WindowPages(needs, window_pages, window_map))


def opened(cache: KVCache, tokens: list[int]) -> Lease:
    lease = cache.open(tokens, len(tokens))
    assert lease is not None
    cache.take_copies()
    return lease


def run_prompt(cache: KVCache, lease: Lease, tokens: list[int], chunk: int = 4) -> None:
    """Read the rest of a prompt in chunks, as the engine does."""
    for start in range(lease.cached_tokens, len(tokens), chunk):
        stop = min(start + chunk, len(tokens))
        cache.cover(lease, stop)
        cache.publish(lease, tokens, stop)
        cache.check()


def test_pages_behind_the_window_are_given_up_while_the_request_runs() -> None:
    cache = window_cache(16, 4, 12, radix=False)
    assert cache.window is not None
    tokens = list(range(40))
    lease = opened(cache, tokens)
    run_prompt(cache, lease, tokens)
    assert cache.used_pages == 10 and cache.window.total - cache.window.free == 2, "33 to 39 are in two pages"
    mapped = [cache.window.map.host_pages[page] > 0 for page in lease.own_pages]
    assert mapped == [False] * 8 + [True] * 2
    cache.close(lease, tokens, 40)
    assert cache.window.free == 12
    cache.check()


def test_a_prefix_is_reused_only_as_far_as_its_window_is_kept() -> None:
    cache = window_cache(32, 4, 12)
    window = cache.window
    assert window is not None
    tokens = list(range(33))
    first = opened(cache, tokens)
    run_prompt(cache, first, tokens)
    cache.close(first, tokens, 33)
    assert window.evictable == 8, "all pages are kept as long as there is room"
    again = opened(cache, [*tokens, 50])
    assert again.cached_tokens == 32
    cache.close(again, [*tokens, 50], 32)
    # Another request takes the pages that are not at the end of the cached prefix.
    other_tokens = list(range(100, 141))
    other = opened(cache, other_tokens)
    run_prompt(cache, other, other_tokens)
    cache.check()
    kept = [node for node in cache._tree.match(tokens) if window.map.host_pages[node.page]]
    assert len(kept) < 8 and cache._tree.match(tokens)[-2:] == kept[-2:]
    assert cache.max_cached_tokens([*tokens, 50]) >= 32, "the end of the prefix is whole"
    assert cache.max_cached_tokens(tokens[:18]) < 16, "before token 16 the window has gaps"
    shorter = opened(cache, tokens[:18])
    assert shorter.cached_tokens < 16
    run_prompt(cache, shorter, tokens[:18])
    cache.check()
    assert cache.max_cached_tokens(tokens[:18]) >= 16, "the pages were computed again, and the tree took them"


def test_a_window_page_that_is_copied_from_may_be_given_to_the_request_that_copies() -> None:
    cache = window_cache(16, 4, 8)
    assert cache.window is not None
    tokens = list(range(18))
    first = opened(cache, tokens)
    run_prompt(cache, first, tokens)
    cache.close(first, tokens, 18)
    source = cache._tree.match(tokens)[0]
    window_page = cache.window.map.host_pages[source.page]
    cache.window._allocator.allocate(cache.window.free)  # as if other requests had them
    lease = cache.open([0, 1, 2, 60, 61], 5)
    assert lease is not None
    (copy,) = cache.take_copies()
    assert copy == (source.page, lease.own_pages[0], 2, window_page, window_page)
    assert cache.window.map.host_pages[source.page] == 0


def test_no_request_is_admitted_whose_window_pages_could_run_out() -> None:
    cache = window_cache(64, 4, 13)
    assert cache.window is not None and cache.window.needs.request_pages == 6
    leases = [opened(cache, [n] * 30) for n in range(2)]
    assert cache.open([9] * 5, 5) is None
    for lease, token in zip(leases, range(2), strict=True):
        run_prompt(cache, lease, [token] * 30)
    assert cache.open([9] * 5, 5, most_tokens=6) is None, "6 tokens, and 6 that steps write, need 3 pages"
    short = WindowNeeds(REACH, WRITTEN, 6, 0, 4)
    assert short.reserved_pages(6, 4) == 3 and short.reserved_pages(60, 4) == 6
    cache.close(leases[0], [0] * 30, 30)
    first = cache.open([9] * 5, 5, most_tokens=6)
    assert first is not None and first.span.reserved == 3
    assert cache.open([8] * 5, 5, most_tokens=6) is not None, "two short requests in place of a long one"
    assert cache.open([7] * 5, 5, most_tokens=6) is None
    cache.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("plenty", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_running_requests_always_find_the_cells_that_rows_see(page_size: int, plenty: bool, seed: int) -> None:
    """Requests with many common prefixes open, read chunks, decode and end at random. The test keeps for each window
    slot which tokens it holds, as if steps wrote and copied them.
    """
    random, pages = Random(seed), 96 // page_size
    cache = window_cache(pages, page_size, pages if plenty else 48 // page_size)
    window = cache.window
    assert window is not None
    held: dict[int, tuple[int, ...]] = {}  # by window slot: the tokens up to the one after the slot's
    running: list[tuple[Lease, list[int], int, int]] = []
    reused = copied = 0

    def slot(lease: Lease, index: int) -> int:
        page = int(cache.table.host_pages[lease.row, index // page_size])
        assert window.map.host_pages[page], f"token {index} has no window page"
        return window.map.host_pages[page] * page_size + index % page_size

    def check_cells(lease: Lease, tokens: list[int], committed: int) -> None:
        for index in range(max(0, committed - REACH), committed):
            assert held[slot(lease, index)] == tuple(tokens[: index + 2]), "a cell holds other tokens"

    for _ in range(600):
        choice = random.random()
        if choice < 0.3:
            tokens = [int(random.random() < 0.15) for _ in range(random.randint(1, 30))]
            most = random.choice((len(tokens), 50))
            lease = cache.open(tokens, len(tokens), most_tokens=most)
            if lease is not None:
                sources = {copy: [held.get(copy.window_source * page_size + i) for i in range(copy.tokens)]
                           for copy in cache.take_copies()}  # fmt: skip
                for copy, cells in sources.items():
                    held.update({copy.window_target * page_size + i: cell for i, cell in enumerate(cells) if cell})
                copied, reused = copied + len(sources), reused + (lease.cached_tokens >= page_size)
                check_cells(lease, tokens, lease.cached_tokens)
                running.append((lease, tokens, lease.cached_tokens, most))
        elif running and choice < 0.85:
            number = random.randrange(len(running))
            lease, tokens, committed, most = running[number]
            if committed + WRITTEN >= len(tokens) and len(tokens) < most:
                tokens += [int(random.random() < 0.15) for _ in range(random.randint(1, WRITTEN))]
            stop = min(committed + WRITTEN, len(tokens) - 1)
            if not cache.grow([lease], [len(tokens)]):
                continue
            cache.cover(lease, stop)
            for index in range(committed, stop):
                held[slot(lease, index)] = tuple(tokens[: index + 2])
            committed = max(committed, random.randint(committed, stop) if stop > committed else committed)
            cache.publish(lease, tokens, committed)
            check_cells(lease, tokens, committed)
            running[number] = lease, tokens, committed, most
        elif running:
            lease, tokens, committed, _ = running.pop(random.randrange(len(running)))
            cache.close(lease, tokens, committed)
        cache.check()
    for lease, tokens, committed, _ in running:
        cache.close(lease, tokens, committed)
    cache.check()
    assert window.free + window.evictable == window.total
    assert reused > 20 and (copied > 5 or page_size == 1)


def test_trial_requests_use_window_pages_that_nobody_owns() -> None:
    cache = window_cache(16, 4, 7)
    assert cache.window is not None
    lease = opened(cache, list(range(40)))
    cache.window.lend(lease.own_pages)
    assert {cache.window.map.host_pages[page] for page in lease.own_pages} == set(range(1, 8))
    cache.window.take_back(lease.own_pages)
    cache.close(lease, list(range(40)), 0)
    cache.check()


def test_window_map_sends_the_last_write_of_each_page() -> None:
    window_map = WindowMap(6, 4, CPU)
    window_map.write([3, 5], [1, 2])
    window_map.write([3], [0])
    assert window_map.unsent_writes == ((3, 0), (5, 2))
    window_map.apply(torch.tensor(window_map.unsent_writes).t())
    window_map.mark_sent()
    assert window_map.unsent_writes == () and window_map.device_pages.tolist() == [0, 0, 0, 0, 0, 2, 0]
    assert window_map.slots(torch.tensor([[21, 13], [0, 3]])).tolist() == [[9, 1], [0, 3]]


@pytest.mark.parametrize("ratio", [None, 0.25])
def test_pools_take_no_more_bytes_than_allowed_and_one_more_page_would(ratio: float | None) -> None:
    needs = WindowNeeds(143, 16, 12, 32, 64, ratio)
    sizes = PoolSizes(16, 1000, 3000, needs)
    for size in (0, 10**6, 10**7, 10**8, 10**9, 10**10):
        tokens = sizes.tokens_in(size)
        assert tokens % 16 == 0 and (tokens == 0 or sizes.bytes_of(tokens) <= size < sizes.bytes_of(tokens + 16))
    assert sizes.tokens_in(-5) == 0 and sizes.page_bytes == 64_000
    assert PoolSizes(16, 1000).tokens_in(10**6 + 1) == 1000, "without window pools, tokens are not rounded to pages"


def test_window_pages_are_enough_for_expected_requests_and_never_more_than_pages() -> None:
    needs = WindowNeeds(143, 16, 12, 32, 64)
    assert needs.pages(10, 16) == 10 and needs.pages(100, 16) == 50 + 32
    many = needs.pages(100_000, 16)
    assert many == 2 * 64 * 12 + 32, "two windows for each request that may run"
    few = WindowNeeds(1039, 16, 70, 32, 64)
    assert few.pages(8192, 16) >= 8192 * 16 / EXPECTED_TOKENS * 70, "as many requests of the expected length as fit"
