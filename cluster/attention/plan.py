"""What a forward needs to know of its rows: where k and v are written, and who sees what.

Prefill, draft level, verify and extend are one call: each request brings q rows that see its committed tokens and,
of the window after them, what a mask says. Requests with equally many rows form a group `[R, q]`.
"""

import torch
from torch import Tensor


def window_group(
    table: Tensor, rows: Tensor, committed: Tensor, visible: Tensor, longest: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Slots `[R, L]` and bias `[R, q, L]` of requests at table rows `rows` `[R]`.

    `committed` `[R]` tokens are visible to every row; then comes a window of w slots of which row q sees
    `visible` `[R, q, w]` (or `[1, q, w]`). `longest` is the largest committed count, known on the host.
    """
    width = visible.shape[-1]
    reach = longest + width
    index = torch.arange(reach, device=table.device)
    offset = index - committed[:, None]
    in_window = (offset >= 0) & (offset < width)
    slots = table[:, :reach].index_select(0, rows).masked_fill_((offset >= width), 0)
    picked = offset.clamp_(0, width - 1)[:, None].expand(-1, visible.shape[1], -1)
    allowed = visible.expand(rows.shape[0], -1, -1).gather(2, picked)
    allowed = torch.where(in_window[:, None], allowed, (index < committed[:, None])[:, None])
    bias = torch.zeros(allowed.shape, dtype=dtype, device=table.device).masked_fill_(~allowed, float("-inf"))
    return slots, bias


def window_slots(table: Tensor, rows: Tensor, start: Tensor, count: int) -> Tensor:
    """Pool slots `[R, count]` of logical indices `start[r] .. start[r] + count - 1`."""
    index = start[:, None] + torch.arange(count, device=table.device)
    return table[rows[:, None], index]
