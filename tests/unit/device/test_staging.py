"""Staging returns the lists that were added, at every alignment, and the timer selects the current device."""

import pytest
import torch

from cluster.device.staging import Staging
from cluster.device.timing import timer_of

LISTS = {"a": [1, 2, 3], "b": [], "c": [4], "d": [5, 6]}


@pytest.mark.parametrize("alignment", [1, 2])
def test_staged_lists_are_returned_unchanged_and_aligned(alignment: int) -> None:
    staging = Staging(torch.device("cpu"), alignment)
    for name, integers in LISTS.items():
        staging.add(name, integers)
    sent = staging.send()
    assert {name: tensor.tolist() for name, tensor in sent.lists().items()} == LISTS
    first, others = sent.split_at(3)
    assert {name: tensor.tolist() for half in (first, others) for name, tensor in half.lists().items()} == LISTS
    start = sent.integers.data_ptr()
    assert all((tensor.data_ptr() - start) % (8 * alignment) == 0 for tensor in sent.lists().values() if len(tensor))


def test_staging_aligns_lists_for_triton_only_on_cuda() -> None:
    assert Staging(torch.device("cuda"))._alignment == 2 and Staging(torch.device("cpu"))._alignment == 1


def test_timer_of_cuda_without_index_does_not_set_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank's device has no index, and `set_device` refuses a device without an index."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    timer_of(torch.device("cuda")).make_current()
    timer_of(torch.device("cuda", 1)).make_current()
    assert devices == [torch.device("cuda", 1)]
