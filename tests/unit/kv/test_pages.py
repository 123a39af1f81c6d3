import pytest

from cluster.kv.pages import SINK_PAGE, PageAllocator


def test_every_page_is_handed_out_once() -> None:
    pages = PageAllocator(5)
    first, second = pages.allocate(2), pages.allocate(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert SINK_PAGE not in first + second
    assert pages.free_count == 0


def test_taking_too_many_takes_none() -> None:
    pages = PageAllocator(3)
    pages.allocate(1)
    with pytest.raises(MemoryError, match="3 pages wanted, 2 free"):
        pages.allocate(3)
    assert pages.free_count == 2


def test_a_page_is_freed_once() -> None:
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.release([page])
    with pytest.raises(ValueError, match=f"page {page} is freed twice"):
        pages.release([page])
    with pytest.raises(ValueError, match="freed twice"):
        pages.release([2])
    taken = pages.allocate(3)
    with pytest.raises(ValueError, match="freed twice"):
        pages.release([taken[0], taken[0]])


def test_the_sink_has_no_owner() -> None:
    with pytest.raises(ValueError, match="page 0"):
        PageAllocator(3).release([SINK_PAGE])


def test_pages_that_come_back_in_any_order_are_handed_out_in_ascending_order() -> None:
    pages = PageAllocator(8)
    taken = pages.allocate(6)
    pages.release([taken[i] for i in (3, 0, 5, 1, 4, 2)])
    assert pages.allocate(6) == [1, 2, 3, 4, 5, 6]
