"""Lists on their way to the device: what was put in comes out, wherever each begins."""

import pytest
import torch

from cluster.device.staging import Staging
from cluster.device.timing import timer_of

LISTS = {"a": [1, 2, 3], "b": [], "c": [4], "d": [5, 6]}


@pytest.mark.parametrize("each", [1, 2])
def test_staged_lists_are_returned_unchanged_and_aligned(each: int) -> None:
    staging = Staging(torch.device("cpu"), each)
    for name, words in LISTS.items():
        staging.add(name, words)
    sent = staging.send()
    assert {name: one.tolist() for name, one in sent.lists().items()} == LISTS
    first, others = sent.split_at(3)
    assert {name: one.tolist() for part in (first, others) for name, one in part.lists().items()} == LISTS
    start = sent.integers.data_ptr()
    assert all((one.data_ptr() - start) % (8 * each) == 0 for one in sent.lists().values() if len(one))


def test_staging_aligns_lists_for_triton_only_on_cuda() -> None:
    assert Staging(torch.device("cuda"))._alignment == 2 and Staging(torch.device("cpu"))._alignment == 1


def test_timer_of_cuda_without_index_does_not_set_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone is given no number of a device, which `set_device` would refuse."""
    given: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", given.append)
    timer_of(torch.device("cuda")).make_current()
    timer_of(torch.device("cuda", 1)).make_current()
    assert given == [torch.device("cuda", 1)]
