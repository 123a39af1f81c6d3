"""What a forward needs to know of its rows: where k and v are written, and who sees what.

Prefill, draft level, verify and extend are one call: each request brings q rows that see its committed tokens and,
of the window after them, what a mask says. Requests with equally many rows form a group `[R, q]`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cluster.batch import Group, Reach
from cluster.kv.page_table import PageTable

MASKED = float("-inf")


def reach_of(table: PageTable, rows: Tensor, committed: Tensor, longest: int, window: int, dtype: torch.dtype) -> Reach:
    """What requests at table rows `rows` `[R]` can see and write: `committed` `[R]` tokens, then `window` slots.

    `longest` is the largest committed count, known on the host; beyond its own count a request reads its own first
    window slot, masked. It never reads memory of others, for which the bias would not be enough, as 0 * NaN is NaN.
    Computed once per step, shared by its phases.
    """
    device = rows.device
    slots = table.slots(rows[:, None], committed[:, None] + torch.arange(window, device=device))
    beyond = torch.arange(longest, device=device) >= committed[:, None]
    prefix = torch.where(beyond, slots[:, :1], table.first_slots(rows, longest))
    bias = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, MASKED)
    return Reach(prefix, bias[:, None], slots)


def partly_written(reach: Reach, written: Tensor) -> Reach:
    """`reach` where only the first `written` `[R]` window slots, one at least, are written before they are read.

    In place of the others a request reads its own first one.
    """
    slots = reach.window
    ahead = torch.arange(slots.shape[1], device=slots.device)
    return replace(reach, window=torch.where(ahead < written[:, None], slots, slots[:, :1]))


def bias_of(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias, 0 or -inf, of a mask `[.., q, w]` of what each row sees."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, MASKED)


def slid(bias: Tensor, sliding_window: int) -> Tensor:
    """`bias` `[R, q, L]` narrowed to the last `sliding_window` slots that each row sees, its own included.

    What a row sees lies in order of position, one slot for each: committed tokens, then its ancestors in the window.
    So counting visible slots from the end counts positions, in a tree as well as in a plain sequence.
    """
    seen = bias == 0
    behind = seen.flip(-1).cumsum(-1).flip(-1)
    return bias.masked_fill(seen & (behind > sliding_window), MASKED)


def causal_bias(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bias `[1, w, w]` of rows that see themselves and the window rows before them."""
    return torch.full((1, width, width), MASKED, dtype=dtype, device=device).triu_(1)


def window_group(reach: Reach, bias: Tensor, rows: slice | Tensor, back: Tensor | None = None) -> Group:
    """The group of q rows per request that see the committed tokens and, of the window, what `bias` says.

    `bias` is `[R, q, w]` or `[1, q, w]` over the first w window slots; `rows` and `back` as in `Group`.
    """
    requests, q, width = reach.window.shape[0], bias.shape[1], bias.shape[2]
    slots = torch.cat([reach.prefix, reach.window[:, :width]], 1)
    seen = torch.cat([reach.bias.expand(-1, q, -1), bias.expand(requests, -1, -1)], 2)
    return Group(requests, q, rows, slots, seen, back)
