"""Lent buffers are free again when no tensor uses them any more, and addresses in them stay valid."""

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
    address = first.data_ptr()
    assert first.shape == (4, 3) and address == buffer.data_ptr()
    second, _ = buffers.lend(torch.empty(4, 3))
    assert second.data_ptr() != address
    del first
    third, _ = buffers.lend(torch.empty(3, 4))
    assert third.data_ptr() == address and third.shape == (3, 4)
    assert buffers.bytes == 2 * 12 * 4


def test_view_of_a_lent_tensor_keeps_its_buffer_in_use() -> None:
    buffers = Buffers()
    first, _ = buffers.lend(torch.empty(6))
    address, view = first.data_ptr(), first.view(2, 3)[1]
    del first
    assert buffers.lend(torch.empty(6))[0].data_ptr() != address
    del view
    assert buffers.lend(torch.empty(6))[0].data_ptr() == address


def test_buffer_is_reused_for_same_dtype_and_at_least_half_its_size() -> None:
    buffers = Buffers()
    for length, dtype, is_reused in ((4, torch.float32, True), (3, torch.float32, False), (7, torch.int32, False)):
        address = buffers.lend(torch.empty(8))[0].data_ptr()
        lent, buffer = buffers.lend(torch.empty(length, dtype=dtype))
        assert (lent.data_ptr() == address) is is_reused and lent.numel() == length <= buffer.numel()


def test_unowned_view_keeps_the_address_but_does_not_hold_the_buffer() -> None:
    buffers = Buffers()
    lent, _ = buffers.lend(torch.empty(2, 4))
    lent.copy_(torch.arange(8.0).view(2, 4))
    unowned = buffers.unowned_view(lent[:, 1:3])
    assert unowned.tolist() == [[1, 2], [5, 6]] and unowned.data_ptr() == lent.data_ptr() + 4
    address = lent.data_ptr()
    del lent
    second, _ = buffers.lend(torch.empty(8))
    assert second.data_ptr() == address
    second.zero_()
    assert unowned.tolist() == [[0, 0], [0, 0]]


def test_lend_tolerates_garbage_collection_during_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that the garbage collector frees during the search changes the positions of the other free buffers."""
    buffers = Buffers()
    lent_tensors = [buffers.lend(torch.empty(length))[0] for length in (8, 20)]
    cycle: list[Any] = [buffers.lend(torch.empty(4))[0]]
    cycle.append(cycle)
    lent_tensors.clear()
    del cycle

    def search_then_collect(*arguments: Any) -> int:
        index = bisect_left(*arguments)
        gc.collect()
        return index

    monkeypatch.setattr(module, "bisect_left", search_then_collect)
    lent, buffer = buffers.lend(torch.empty(15))
    assert lent.numel() == 15 <= buffer.numel()
