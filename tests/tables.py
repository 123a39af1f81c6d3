"""Page tables for tests, and what they hold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.batch import PageWrite
from cluster.kv.page_table import PageTable


def table_of(slots: Tensor) -> PageTable:
    """A table of pages of one token, so that the device's entries are the `slots` `[rows, length]` themselves."""
    table = PageTable(slots.shape[0] - 1, slots.shape[1], 1, slots.device)
    table.device_pages.copy_(slots)
    return table


def held_slots(table: PageTable, row: int, count: int) -> Tensor:
    """The slots of the first `count` tokens of a row, as the host knows them."""
    pages = torch.from_numpy(table.host_pages[row]).long()
    return (pages[:, None] * table.page_size + torch.arange(table.page_size)).view(-1)[:count]


def apply(table: PageTable, writes: Sequence[PageWrite]) -> None:
    """Bring the device's copy up to date, as a step with these writes in its order does."""
    cleared = [write.row for write in writes if write.entry < 0]
    written = list(zip(*writes[len(cleared) :], strict=True)) or [(), (), ()]
    table.apply(torch.tensor(cleared, dtype=torch.int64), torch.tensor(written, dtype=torch.int64))
