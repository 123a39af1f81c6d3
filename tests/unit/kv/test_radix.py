"""Exact pages, with the EAGLE shift: a page is known by its tokens and by the token after it."""

import pytest

from cluster.kv.radix import Node, RadixTree


def pages(path: list[Node]) -> list[int]:
    return [node.page for node in path]


@pytest.fixture
def tree() -> RadixTree:
    """Pages of two tokens: `1 2 | 3 4 | 5` on pages 10, 11."""
    tree = RadixTree(2)
    assert tree.insert([1, 2, 3, 4, 5], [10, 11]) == []
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
def test_match(tree: RadixTree, tokens: list[int], expected: list[int]) -> None:
    assert pages(tree.match(tokens)) == expected


def test_pages_of_one_token_too() -> None:
    tree = RadixTree(1)
    tree.insert([7, 8, 9], [1, 2])
    assert pages(tree.match([7, 8, 9])) == [1, 2]
    assert pages(tree.match([7, 8, 5])) == [1]
    assert pages(tree.match([7, 5])) == []


def test_insert_returns_what_is_there_already(tree: RadixTree) -> None:
    assert tree.insert([1, 2, 3, 4, 5], [20, 21]) == [20, 21]
    assert tree.insert([1, 2, 3, 4, 6], [20, 21]) == [20], "one prefix, two ways on"
    assert pages(tree.match([1, 2, 3, 4, 6])) == [10, 21]
    assert pages(tree.match([1, 2, 3, 4, 5])) == [10, 11]
    assert tree.pages == 3


def test_insert_keeps_pages_that_are_its_own(tree: RadixTree) -> None:
    assert tree.insert([1, 2, 3, 4, 5, 6, 7], [10, 11, 12]) == []
    assert tree.pages == 3


def test_a_page_without_its_following_token_is_not_taken() -> None:
    tree = RadixTree(2)
    assert tree.insert([1, 2, 3, 4], [10, 11]) == [11]
    assert tree.pages == 1


def test_evict_takes_the_least_recently_used_leaf_first(tree: RadixTree) -> None:
    tree.insert([1, 2, 3, 9, 9], [10, 30])
    tree.match([1, 2, 3, 4, 5])
    assert tree.evict(1) == [30]
    assert tree.evict(2) == [11, 10], "a parent goes after its children"
    assert tree.evict(1) == []
    assert (tree.pages, tree.evictable) == (0, 0)


def test_locked_pages_stay(tree: RadixTree) -> None:
    tree.insert([1, 2, 3, 9, 9], [10, 30])
    path = tree.match([1, 2, 3, 4, 5])
    tree.lock(path)
    tree.lock(path[:1])
    assert tree.evictable == 1
    assert tree.evict(5) == [30]
    tree.unlock(path)
    assert tree.evictable == 1, "the first page has another lock"
    assert tree.evict(5) == [11]
    tree.unlock(path[:1])
    assert tree.evict(5) == [10]


def test_unlocking_twice_is_an_error(tree: RadixTree) -> None:
    path = tree.match([1, 2, 3, 4, 5])
    tree.lock(path)
    tree.unlock(path)
    with pytest.raises(ValueError, match="page 10 is unlocked twice"):
        tree.unlock(path)
