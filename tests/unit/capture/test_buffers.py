"""Memory that is lent comes back when nothing holds it any more, and addresses in it stay valid."""

import gc
from bisect import bisect_left
from typing import Any

import pytest
import torch

from cluster.capture import buffers as module
from cluster.capture.buffers import Buffers


def test_dropped_buffer_is_lent_again() -> None:
    buffers = Buffers()
    first, buffer = buffers.lend(torch.empty(4, 3))
    place = first.data_ptr()
    assert first.shape == (4, 3) and place == buffer.data_ptr()
    second, _ = buffers.lend(torch.empty(4, 3))
    assert second.data_ptr() != place
    del first
    third, _ = buffers.lend(torch.empty(3, 4))
    assert third.data_ptr() == place and third.shape == (3, 4)
    assert buffers.bytes == 2 * 12 * 4


def test_view_of_a_lent_tensor_keeps_its_buffer_in_use() -> None:
    buffers = Buffers()
    first, _ = buffers.lend(torch.empty(6))
    place, part = first.data_ptr(), first.view(2, 3)[1]
    del first
    assert buffers.lend(torch.empty(6))[0].data_ptr() != place
    del part
    assert buffers.lend(torch.empty(6))[0].data_ptr() == place


def test_buffer_is_reused_for_same_dtype_and_at_least_half_its_size() -> None:
    buffers = Buffers()
    for numbers, dtype, again in ((4, torch.float32, True), (3, torch.float32, False), (7, torch.int32, False)):
        place = buffers.lend(torch.empty(8))[0].data_ptr()
        lent, buffer = buffers.lend(torch.empty(numbers, dtype=dtype))
        assert (lent.data_ptr() == place) is again and lent.numel() == numbers <= buffer.numel()


def test_unowned_view_keeps_the_address_but_does_not_hold_the_buffer() -> None:
    buffers = Buffers()
    lent, _ = buffers.lend(torch.empty(2, 4))
    lent.copy_(torch.arange(8.0).view(2, 4))
    lasting = buffers.unowned_view(lent[:, 1:3])
    assert lasting.tolist() == [[1, 2], [5, 6]] and lasting.data_ptr() == lent.data_ptr() + 4
    place = lent.data_ptr()
    del lent
    again, _ = buffers.lend(torch.empty(8))
    assert again.data_ptr() == place
    again.zero_()
    assert lasting.tolist() == [[0, 0], [0, 0]]


def test_lend_tolerates_garbage_collection_during_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that comes back then moves the others along."""
    buffers = Buffers()
    both = [buffers.lend(torch.empty(numbers))[0] for numbers in (8, 20)]
    circle: list[Any] = [buffers.lend(torch.empty(4))[0]]
    circle.append(circle)
    both.clear()
    del circle

    def looked(*given: Any) -> int:
        found = bisect_left(*given)
        gc.collect()
        return found

    monkeypatch.setattr(module, "bisect_left", looked)
    lent, buffer = buffers.lend(torch.empty(15))
    assert lent.numel() == 15 <= buffer.numel()
