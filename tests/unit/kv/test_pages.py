import pytest

from cluster.kv.pages import SINK_PAGE, PageAllocator


def test_page_allocator_hands_out_every_page_once() -> None:
    pages = PageAllocator(5)
    first, second = pages.allocate(2), pages.allocate(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert SINK_PAGE not in first + second
    assert pages.free_count == 0


def test_allocating_too_many_pages_raises_and_takes_none() -> None:
    pages = PageAllocator(3)
    pages.allocate(1)
    with pytest.raises(MemoryError, match="3 pages wanted, 2 free"):
        pages.allocate(3)
    assert pages.free_count == 2


def test_freeing_a_free_page_raises_an_error() -> None:
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.release([page])
    with pytest.raises(ValueError, match=f"page {page} is freed twice"):
        pages.release([page])
    with pytest.raises(ValueError, match="freed twice"):
        pages.release([2])
    allocated = pages.allocate(3)
    with pytest.raises(ValueError, match="freed twice"):
        pages.release([allocated[0], allocated[0]])


def test_sink_page_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="page 0"):
        PageAllocator(3).release([SINK_PAGE])


def test_page_allocator_hands_out_released_pages_in_ascending_order() -> None:
    pages = PageAllocator(8)
    allocated = pages.allocate(6)
    pages.release([allocated[i] for i in (3, 0, 5, 1, 4, 2)])
    assert pages.allocate(6) == [1, 2, 3, 4, 5, 6]
