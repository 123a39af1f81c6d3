"""The ranks that share work, and every collective among them. A wrong size ends a gloo process without a Python
exception, so callers (`cluster.dp_attention`) compare sizes before they enter a collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from cluster.device.timing import HOST, Timer
from cluster.distributed.one_shot_all_reduce import OneShot
from cluster.distributed.progress import ProgressClock


class Shard(NamedTuple):
    """Shard `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> tuple[int, int]:
        """This shard's `[start, stop)` of `total` items; shards differ by at most one item."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size


@dataclass(slots=True)
class Axis:
    """Ranks that share work. `group` is None when this rank is alone; then every collective is the identity.

    `direct` (NCCL): parts of equal size go through the backend's own all-gather and reduce-scatter. Else an all-to-all
    is used, which takes any sizes and is twice as fast on gloo; sums in rank order have the same bits on every rank.
    `one_shot`, where asked for, sums rows that are few.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    direct: bool = False
    clock: ProgressClock = field(default_factory=ProgressClock)
    timer: Timer = HOST
    one_shot: OneShot | None = None

    @property
    def part(self) -> Shard:
        """This rank's shard of what the axis splits."""
        return Shard(self.rank, self.size)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Own rows `[counts[rank], ..]` -> all ranks' rows `[sum(counts), ..]`, in rank order."""
        if self.size == 1:
            return rows
        every = rows.new_empty(sum(counts), *rows.shape[1:])
        began = self.clock.begin(self.timer)
        if self.direct and len(set(counts)) == 1:
            dist.all_gather_into_tensor(every, rows.contiguous(), group=self.group)
        else:
            own = rows.repeat(self.size, *[1] * (rows.dim() - 1))
            dist.all_to_all_single(every, own, list(counts), [rows.shape[0]] * self.size, group=self.group)
        self.clock.end(began, self.timer)
        return every

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Partial sums of all ranks' rows `[sum(counts), ..]` -> own rows `[counts[rank], ..]`, summed."""
        if self.size == 1:
            return rows
        own = counts[self.rank]
        began = self.clock.begin(self.timer)
        if self.direct and len(set(counts)) == 1:
            summed = rows.new_empty(own, *rows.shape[1:])
            dist.reduce_scatter_tensor(summed, rows.contiguous(), group=self.group)
            self.clock.end(began, self.timer)
            return summed
        parts = rows.new_empty(self.size * own, *rows.shape[1:])
        dist.all_to_all_single(parts, rows.contiguous(), [own] * self.size, list(counts), group=self.group)
        self.clock.end(began, self.timer)
        return added(parts.view(self.size, own, *rows.shape[1:]))

    def all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Rows in rank order of whom they go to, `sent[r]` to rank r -> those that come, `taken[r]` from rank r.

        What one rank sends to another is what the other takes from it: callers agree on both before.
        """
        if self.size == 1:
            return rows
        came = rows.new_empty(sum(taken), *rows.shape[1:])
        began = self.clock.begin(self.timer)
        dist.all_to_all_single(came, rows.contiguous(), list(taken), list(sent), group=self.group)
        self.clock.end(began, self.timer)
        return came

    def all_reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of the same rows -> their sum, with the same bits on every rank."""
        if self.size == 1:
            return rows
        if not self.direct:
            return added(self.gather(rows, [rows.shape[0]] * self.size).view(self.size, *rows.shape))
        began = self.clock.begin(self.timer)
        if self.one_shot is not None and self.one_shot.takes(rows):
            rows = self.one_shot(rows)
        else:
            dist.all_reduce(rows, group=self.group)
        self.clock.end(began, self.timer)
        return rows

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite `values` on all ranks with the first rank's, in place."""
        if self.size > 1:
            began = self.clock.begin(self.timer)
            dist.broadcast(values, group=self.group, group_src=0)
            self.clock.end(began, self.timer)
        return values

    def leave(self) -> None:
        """Drop the group: gloo closes its connections only when nothing refers to them, even after an abort."""
        self.group = None


def added(parts: Tensor) -> Tensor:
    """The sum over the first dimension, added in order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
