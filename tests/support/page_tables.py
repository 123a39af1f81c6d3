"""Page tables for tests, and helpers that read and update them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.batch import PageWrite
from cluster.kv.page_table import PageTable


def table_of(slots: Tensor) -> PageTable:
    """Return a page table with a page size of one token and these `slots` `[rows, length]` on the device."""
    table = PageTable(slots.shape[0] - 1, slots.shape[1], 1, slots.device)
    table.device_pages.copy_(slots)
    return table


def held_slots(table: PageTable, row: int, count: int) -> Tensor:
    """Return the slots of the first `count` tokens of a row, from the host's copy of the table."""
    pages = torch.from_numpy(table.host_pages[row]).long()
    return (pages[:, None] * table.page_size + torch.arange(table.page_size)).view(-1)[:count]


def apply(table: PageTable, writes: Sequence[PageWrite]) -> None:
    """Apply `writes` to the device's copy of the table, as a step with these writes in its `StepInput` does."""
    cleared = [write.row for write in writes if write.entry < 0]
    written = list(zip(*writes[len(cleared) :], strict=True)) or [(), (), ()]
    table.apply(torch.tensor(cleared, dtype=torch.int64), torch.tensor(written, dtype=torch.int64))
