"""Groups of ranks that share work, and all collectives among them.

A wrong size kills a gloo process without a Python exception. So callers (`cluster.dp_attention`) compare the sizes
before they enter a collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from cluster.device.timing import HOST_TIMER, Timer
from cluster.distributed.one_shot_all_reduce import OneShot
from cluster.distributed.progress import ProgressClock


class Shard(NamedTuple):
    """Shard `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> tuple[int, int]:
        """Return this shard's `[start, stop)` of `total` items; the sizes of shards differ by at most one item."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size


@dataclass(slots=True)
class Axis:
    """A group of ranks that share work. If this rank is alone, `group` is None and every collective is the identity.

    With `direct` (NCCL), all-gather and reduce-scatter are the backend's own if the parts of all ranks have equal size.
    In all other cases they are made of an all-to-all, which takes any sizes and is twice as fast on gloo. A rank adds
    the partial sums that an all-to-all brings in rank order, so the sums have the same bits on every rank. `one_shot`,
    if set, does all-reduces of few bytes.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    direct: bool = False
    clock: ProgressClock = field(default_factory=ProgressClock)
    timer: Timer = HOST_TIMER
    one_shot: OneShot | None = None

    @property
    def shard(self) -> Shard:
        """This rank's shard of what the axis splits."""
        return Shard(self.rank, self.size)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All-gather: own rows `[counts[rank], ..]` -> all ranks' rows `[sum(counts), ..]`, in rank order."""
        if self.size == 1:
            return rows
        gathered = rows.new_empty(sum(counts), *rows.shape[1:])
        entered_at = self.clock.begin(self.timer)
        if self.direct and len(set(counts)) == 1:
            dist.all_gather_into_tensor(gathered, rows.contiguous(), group=self.group)
        else:
            repeated = rows.repeat(self.size, *[1] * (rows.dim() - 1))
            dist.all_to_all_single(gathered, repeated, list(counts), [rows.shape[0]] * self.size, group=self.group)
        self.clock.end(entered_at, self.timer)
        return gathered

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Reduce-scatter: partial sums of all ranks' rows `[sum(counts), ..]` -> own rows `[counts[rank], ..]`."""
        if self.size == 1:
            return rows
        own_count = counts[self.rank]
        entered_at = self.clock.begin(self.timer)
        if self.direct and len(set(counts)) == 1:
            summed = rows.new_empty(own_count, *rows.shape[1:])
            dist.reduce_scatter_tensor(summed, rows.contiguous(), group=self.group)
            self.clock.end(entered_at, self.timer)
            return summed
        received = rows.new_empty(self.size * own_count, *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), [own_count] * self.size, list(counts), group=self.group)
        self.clock.end(entered_at, self.timer)
        return sum_in_order(received.view(self.size, own_count, *rows.shape[1:]))

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """All-to-all: `rows` are sorted by destination rank, and `send_counts[r]` of them go to rank r. Return the
        received rows, sorted by source rank; `receive_counts[r]` of them are from rank r.

        Callers agree on the counts first: `send_counts[r]` on rank q equals `receive_counts[q]` on rank r.
        """
        if self.size == 1:
            return rows
        received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        entered_at = self.clock.begin(self.timer)
        dist.all_to_all_single(received, rows.contiguous(), list(receive_counts), list(send_counts), group=self.group)
        self.clock.end(entered_at, self.timer)
        return received

    def all_reduce(self, rows: Tensor) -> Tensor:
        """All-reduce: partial sums of the same rows -> their sum, with the same bits on every rank. With NCCL, `rows`
        may be overwritten.
        """
        if self.size == 1:
            return rows
        if not self.direct:
            return sum_in_order(self.gather(rows, [rows.shape[0]] * self.size).view(self.size, *rows.shape))
        entered_at = self.clock.begin(self.timer)
        if self.one_shot is not None and self.one_shot.supports(rows):
            rows = self.one_shot(rows)
        else:
            dist.all_reduce(rows, group=self.group)
        self.clock.end(entered_at, self.timer)
        return rows

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite `values` in place with the `values` of the group's first rank, and return them."""
        if self.size > 1:
            entered_at = self.clock.begin(self.timer)
            dist.broadcast(values, group=self.group, group_src=0)
            self.clock.end(entered_at, self.timer)
        return values

    def leave(self) -> None:
        """Drop the group. gloo closes its connections only when nothing refers to the group, even after an abort."""
        self.group = None


def sum_in_order(summands: Tensor) -> Tensor:
    """Return the sum over the first dimension, added in order so that every rank gets the same bits."""
    total = summands[0]
    for summand in summands[1:]:
        total = total + summand
    return total
