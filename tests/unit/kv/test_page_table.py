"""The device's page table: slots of positions beyond its end, and commits of idle requests."""

import torch

from cluster.kv.page_table import PageTable


def test_positions_past_the_table_end_use_the_last_slot() -> None:
    """A window may reach beyond the longest request. Cells that it writes there are never committed."""
    table = PageTable(2, 10, 4, torch.device("cpu"))
    table.device_pages[1] = torch.tensor([5, 2, 7])
    slots = table.slots(torch.tensor([1]), torch.tensor([0, 7, 11, 12, 40]))
    assert slots.tolist() == [20, 11, 31, 31, 31]


def test_commit_adds_no_tokens_to_idle_requests() -> None:
    table = PageTable(2, 10, 4, torch.device("cpu"))
    table.commit(torch.tensor([0, 2, 2]), torch.tensor([5, 3, 1]))
    assert table.lens.tolist() == [5, 0, 0]
