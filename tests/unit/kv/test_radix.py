"""Exact pages, with the EAGLE shift: a page is known by salt, tokens and the token after them; eviction is LRU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from cluster.kv.radix import Node, RadixTree


def pages(path: Sequence[Node]) -> list[int]:
    return [node.page for node in path]


@pytest.fixture
def tree() -> RadixTree:
    """Pages of two tokens: `1 2 | 3 4 | 5` on pages 10, 11."""
    tree = RadixTree(2)
    assert pages(tree.insert([1, 2, 3, 4, 5], [10, 11])) == [10, 11]
    return tree


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5], [10, 11]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [10, 11]),
        ([1, 2, 3, 4, 9], [10]),  # the token after page 11 differs, and its last draft cell is made of it
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
    assert tree.nearest([7, 5], []) is None, "a page of one token is shared whole or not at all"


@pytest.mark.parametrize(
    ("tokens", "page", "cells"),
    [
        ([1, 2, 3, 4, 9], 20, 3),  # the cell of 4 is made of the token after it as well
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
def test_nearest_counts_cells_whose_next_token_is_equal(tokens: list[int], page: int | None, cells: int) -> None:
    tree = RadixTree(4)
    tree.insert([1, 2, 3, 4, 5], [20])
    tree.insert([1, 2, 7, 7, 6], [21])
    tree.insert([1, 8, 7, 7, 6], [22])
    found = tree.nearest(tokens, [])
    assert (found and (found[0].page if page else None, found[1])) == (None if page is None else (page, cells))


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
    """The same tree as a dictionary: a page by salt and text up to the token after it, found by looking at all."""

    size: int
    clock: int = 0
    page: dict[tuple[int, ...], int] = field(default_factory=dict)
    used: dict[tuple[int, ...], int] = field(default_factory=dict)
    locks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def texts(self, tokens: Sequence[int], salt: int) -> list[tuple[int, ...]]:
        return [(salt, *tokens[: end + 1]) for end in range(self.size, len(tokens), self.size)]

    def use(self, texts: Sequence[tuple[int, ...]]) -> None:
        self.clock += 1
        for text in texts:
            self.used[text] = self.clock

    def match(self, tokens: Sequence[int], salt: int) -> list[tuple[int, ...]]:
        held = []
        for text in self.texts(tokens, salt):
            if text not in self.page:
                break
            held.append(text)
        self.use(held)
        return held

    def insert(self, tokens: Sequence[int], given: Sequence[int], salt: int) -> None:
        texts = self.texts(tokens, salt)[: len(given)]
        for text, page in zip(texts, given, strict=False):
            self.page.setdefault(text, page)
        self.use(texts)

    def change_locks(self, texts: Sequence[tuple[int, ...]], by: int) -> None:
        for text in texts:
            self.locks[text] = self.locks.get(text, 0) + by
        self.use(texts)

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            # A text goes over its page's last token, so that a page's parent's text ends `size` tokens before.
            parents = {text[: -self.size] for text in self.page}
            leaves = [text for text in self.page if text not in parents and not self.locks.get(text)]
            if not leaves:
                break
            oldest = min(leaves, key=self.used.__getitem__)
            freed.append(self.page.pop(oldest))
        return freed


def brute_force_lives(operations: int, size: int, seed: int) -> tuple[int, int]:
    """So many random operations on a tree and on its model; the most pages it had, and how many were evicted."""
    random, tree, model = Random(seed), RadixTree(size), BruteForce(size)
    locked: list[tuple[list[Node], list[tuple[int, ...]]]] = []
    evicted = fresh = most = 0
    for number in range(operations):
        move = random.random()
        tokens = [random.choice((0, 0, 0, 1, 2)) for _ in range(random.randint(1, 8 * size))]
        salt = random.choice((0, 0, 0, 0, 1, 1 << 70))
        if move < 0.3:
            assert pages(tree.match(tokens, salt)) == [model.page[text] for text in model.match(tokens, salt)]
        elif move < 0.6:
            count = random.randint(0, len(tokens) // size)
            new = list(range(fresh, fresh + count))
            fresh += count
            nodes = tree.insert(tokens, new, salt=salt)
            model.insert(tokens, new, salt)
            assert pages(nodes) == [model.page[text] for text in model.texts(tokens, salt)[:count]]
        elif move < 0.7 and len(locked) < 6:
            path, texts = tree.match(tokens, salt), model.match(tokens, salt)
            tree.lock(path)
            model.change_locks(texts, 1)
            locked.append((path, texts))
        elif move < 0.8 and locked:
            path, texts = locked.pop(random.randrange(len(locked)))
            tree.unlock(path)
            model.change_locks(texts, -1)
        else:
            count = random.randint(1, 3) if random.random() < 0.998 else 60
            freed = tree.evict(count)
            assert freed == model.evict(count)
            evicted += len(freed)
        most = max(most, tree.pages)
        assert tree.pages == len(model.page)
        assert tree.evictable == sum(not model.locks.get(text) for text in model.page)
        if number % 50 == 0:
            tree.check()
    return most, evicted


@pytest.mark.parametrize("operations", [7000, pytest.param(25_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_radix_tree_equals_a_brute_force_lru_model(size: int, operations: int) -> None:
    """100,000 operations in all, where there is time."""
    most, evicted = brute_force_lives(operations, size, seed=size)
    assert most > 60 and evicted > operations / 5


def test_insert_after_a_long_path_reads_only_new_tokens() -> None:
    read: list[int] = []

    class Counting(RadixTree):
        def _keys(self, tokens: Sequence[int], start: int = 0) -> Iterator[tuple[int, ...]]:
            for key in super()._keys(tokens, start):
                read.append(1)
                yield key

    tree, text = Counting(1), list(range(2000))
    path = tree.insert(text, range(1999))
    read.clear()
    tree.insert([*text, 5, 6], [3000, 3001], path)
    assert len(read) <= 3
    assert tree.evict(1999) == [3001, 3000, *range(1998, 1, -1)]
    assert tree.pages == 2
