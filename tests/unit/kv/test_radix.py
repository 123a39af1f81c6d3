"""The radix tree of full pages. Because of the EAGLE shift, the key of a page is its salt, its tokens and the token
after them. Eviction is LRU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from cluster.kv.radix import Node, RadixTree


def pages(path: Sequence[Node]) -> list[int]:
    return [node.page for node in path]


@pytest.fixture
def tree() -> RadixTree:
    """Return a tree with pages of two tokens. It holds `1 2 | 3 4 | 5`: tokens 1 2 on page 10, 3 4 on page 11."""
    tree = RadixTree(2)
    assert pages(tree.insert([1, 2, 3, 4, 5], [10, 11])) == [10, 11]
    return tree


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5], [10, 11]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [10, 11]),
        ([1, 2, 3, 4, 9], [10]),  # the last draft cell of page 11 depends on the token after the page, which differs
        ([1, 2, 3, 4], [10]),  # the token after page 11 is not known yet
        ([1, 2, 3, 9, 5], [10]),
        ([1, 2, 9, 4, 5], []),
        ([1, 2, 3], [10]),
        ([1, 2], []),
        ([1], []),
        ([], []),
        ([3, 4, 5], []),
    ],
)
def test_match_returns_pages_whose_next_token_is_equal(tree: RadixTree, tokens: list[int], expected: list[int]) -> None:
    assert pages(tree.match(tokens)) == expected


def test_radix_tree_supports_pages_of_one_token() -> None:
    tree = RadixTree(1)
    tree.insert([7, 8, 9], [1, 2])
    assert pages(tree.match([7, 8, 9])) == [1, 2]
    assert pages(tree.match([7, 8, 5])) == [1]
    assert pages(tree.match([7, 5])) == []
    assert tree.nearest([7, 5], []) is None, "no part of a one-token page can be shared"


@pytest.mark.parametrize(
    ("tokens", "expected_page", "expected_cells"),
    [
        ([1, 2, 3, 4, 9], 20, 3),  # the cell of token 4 depends on the token after it too
        ([1, 2, 3, 4], 20, 3),
        ([1, 2, 3, 9, 5], 20, 2),
        ([1, 2, 7, 7, 7], 21, 3),
        ([1, 2, 7], 21, 2),
        ([1, 2], 20, 1),
        ([1], None, 0),
        ([1, 9], None, 0),
        ([2, 2, 3, 4, 5], None, 0),
    ],
)
def test_nearest_counts_cells_whose_next_token_is_equal(
    tokens: list[int], expected_page: int | None, expected_cells: int
) -> None:
    tree = RadixTree(4)
    tree.insert([1, 2, 3, 4, 5], [20])
    tree.insert([1, 2, 7, 7, 6], [21])
    tree.insert([1, 8, 7, 7, 6], [22])
    nearest = tree.nearest(tokens, [])
    assert (nearest and (nearest[0].page if expected_page else None, nearest[1])) == (
        None if expected_page is None else (expected_page, expected_cells)
    )


def test_insert_continues_after_a_matched_path(tree: RadixTree) -> None:
    path = tree.match([1, 2, 3, 4, 5])
    assert pages(tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9], [12, 13], path)) == [12, 13]
    assert pages(tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9])) == [10, 11, 12, 13]
    tree.check()


def test_unlocking_a_path_twice_raises_an_error(tree: RadixTree) -> None:
    path = tree.match([1, 2, 3, 4, 5])
    tree.lock(path)
    tree.unlock(path)
    with pytest.raises(ValueError, match="page 11 is unlocked twice"):
        tree.unlock(path)


def test_radix_tree_drops_roots_of_salts_without_pages() -> None:
    tree = RadixTree(1)
    for salt in range(1, 1000):
        tree.insert([1], [salt], salt=salt)  # no page is full
        tree.match([1, 2], salt)
        tree.insert([1, 2, 3], [salt, salt], salt=salt)
        assert len(tree.evict(2)) == 2
    assert tree._roots == {} and tree.root(5) is None
    tree.check()


@dataclass
class BruteForce:
    """A simple model of the radix tree. Its dictionaries are keyed by prefix: the salt, and all tokens up to the one
    after the page. `page` holds the page of each prefix.
    """

    page_size: int
    clock: int = 0
    page: dict[tuple[int, ...], int] = field(default_factory=dict)
    last_used: dict[tuple[int, ...], int] = field(default_factory=dict)
    locks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def page_prefixes(self, tokens: Sequence[int], salt: int) -> list[tuple[int, ...]]:
        return [(salt, *tokens[: end + 1]) for end in range(self.page_size, len(tokens), self.page_size)]

    def use(self, prefixes: Sequence[tuple[int, ...]]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.last_used[prefix] = self.clock

    def match(self, tokens: Sequence[int], salt: int) -> list[tuple[int, ...]]:
        matched = []
        for prefix in self.page_prefixes(tokens, salt):
            if prefix not in self.page:
                break
            matched.append(prefix)
        self.use(matched)
        return matched

    def insert(self, tokens: Sequence[int], new_pages: Sequence[int], salt: int) -> None:
        prefixes = self.page_prefixes(tokens, salt)[: len(new_pages)]
        for prefix, page in zip(prefixes, new_pages, strict=False):
            self.page.setdefault(prefix, page)
        self.use(prefixes)

    def change_locks(self, prefixes: Sequence[tuple[int, ...]], change: int) -> None:
        for prefix in prefixes:
            self.locks[prefix] = self.locks.get(prefix, 0) + change
        self.use(prefixes)

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            # The prefix of a page's parent is the page's prefix without its last `page_size` tokens.
            parents = {prefix[: -self.page_size] for prefix in self.page}
            leaves = [prefix for prefix in self.page if prefix not in parents and not self.locks.get(prefix)]
            if not leaves:
                break
            oldest = min(leaves, key=self.last_used.__getitem__)
            freed.append(self.page.pop(oldest))
        return freed


def compare_with_brute_force(operations: int, size: int, seed: int) -> tuple[int, int]:
    """Run `operations` random operations on a tree and on its model, and compare them. Return the most pages that the
    tree had, and how many pages were evicted.
    """
    random, tree, model = Random(seed), RadixTree(size), BruteForce(size)
    locked: list[tuple[list[Node], list[tuple[int, ...]]]] = []
    evicted = next_page = max_pages = 0
    for number in range(operations):
        operation = random.random()
        tokens = [random.choice((0, 0, 0, 1, 2)) for _ in range(random.randint(1, 8 * size))]
        salt = random.choice((0, 0, 0, 0, 1, 1 << 70))
        if operation < 0.3:
            assert pages(tree.match(tokens, salt)) == [model.page[prefix] for prefix in model.match(tokens, salt)]
        elif operation < 0.6:
            count = random.randint(0, len(tokens) // size)
            new_pages = list(range(next_page, next_page + count))
            next_page += count
            nodes = tree.insert(tokens, new_pages, salt=salt)
            model.insert(tokens, new_pages, salt)
            assert pages(nodes) == [model.page[prefix] for prefix in model.page_prefixes(tokens, salt)[:count]]
        elif operation < 0.7 and len(locked) < 6:
            path, prefixes = tree.match(tokens, salt), model.match(tokens, salt)
            tree.lock(path)
            model.change_locks(prefixes, 1)
            locked.append((path, prefixes))
        elif operation < 0.8 and locked:
            path, prefixes = locked.pop(random.randrange(len(locked)))
            tree.unlock(path)
            model.change_locks(prefixes, -1)
        else:
            count = random.randint(1, 3) if random.random() < 0.998 else 60
            freed = [node.page for node in tree.evict(count)]
            assert freed == model.evict(count)
            evicted += len(freed)
        max_pages = max(max_pages, tree.pages)
        assert tree.pages == len(model.page)
        assert tree.evictable == sum(not model.locks.get(prefix) for prefix in model.page)
        if number % 50 == 0:
            tree.check()
    return max_pages, evicted


@pytest.mark.parametrize("operations", [7000, pytest.param(25_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_radix_tree_equals_a_brute_force_lru_model(size: int, operations: int) -> None:
    """The slow cases have 100,000 operations in all."""
    max_pages, evicted = compare_with_brute_force(operations, size, seed=size)
    assert max_pages > 60 and evicted > operations / 5


def test_insert_after_a_long_path_reads_only_new_tokens() -> None:
    read_keys: list[int] = []

    class CountingTree(RadixTree):
        def _keys(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[int, ...]]:
            for key in super()._keys(tokens, start):
                read_keys.append(1)
                yield key

    tree, long_path = CountingTree(1), list(range(2000))
    path = tree.insert(long_path, range(1999))
    read_keys.clear()
    tree.insert([*long_path, 5, 6], [3000, 3001], path)
    assert len(read_keys) <= 3
    assert [node.page for node in tree.evict(1999)] == [3001, 3000, *range(1998, 1, -1)]
    assert tree.pages == 2
