"""The way of rows to experts that are apart, and back: which rows go where, what travels with them, and in what order.

Experts are in `parts`; neighbouring ranks hold one part together, some columns of its experts each. A row goes once to
every rank of each part that has an expert for it, with weights and ids of all experts that it takes.
Shape legend: m rows that a rank carries, k experts that a row takes, H hidden, n ranks, S rows that a rank sends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.device.wait_hook import catch_up
from cluster.distributed.mesh import Shard, added
from cluster.models.context import part_of_experts

Table = tuple[tuple[int, ...], ...]
"""How many rows each rank sends to each part, `[n][parts]`; the same on all ranks."""

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
INTEGERS[torch.bfloat16] = torch.int16


class AllToAll:
    """Of the rows that this rank carries: how many go to each part, `counts`, and which go to each rank, `to`."""

    def __init__(self, taken: Tensor, parts: int, ranks: int) -> None:
        """`taken` `[m, k]` are the parts that hold the experts of each row. This waits for the device."""
        hits = taken.new_zeros(taken.shape[0], parts, dtype=torch.bool).scatter_(1, taken, True)
        self.carried = taken.shape[0]
        going = hits.sum(0)
        catch_up()
        self.counts: tuple[int, ...] = tuple(going.tolist())
        each = torch.split(hits.t().nonzero()[:, 1], list(self.counts))
        self.to = [each[part] for part in held(parts, ranks)]

    @property
    def rows(self) -> Tensor:
        """Which rows are sent, in order of the rank that they go to, `[S]`."""
        return torch.cat(self.to)

    def summed(self, came: Tensor, common: range) -> Tensor:
        """What has come back, rank by rank, the sums for the rows that went there, and from ranks in `common` one more
        for every row, `[.., H]` -> their sums `[m, H]`, added in rank order.
        """
        every = torch.arange(self.carried, device=came.device)
        places = []
        for rank, went in enumerate(self.to):
            places.append(went + rank * self.carried)
            if rank in common:
                places.append(every + rank * self.carried)
        # A place gets two numbers at most, so their order, which a GPU does not promise, changes nothing.
        total = came.new_zeros(len(self.to) * self.carried, came.shape[1]).index_add_(0, torch.cat(places), came)
        return added(total.view(len(self.to), self.carried, came.shape[1]))


def held(parts: int, ranks: int) -> list[int]:
    """The part that each rank holds."""
    return [part_of_experts(parts, Shard(rank, ranks)).rank for rank in range(ranks)]


def flows(table: Table, rank: int) -> tuple[list[int], list[int]]:
    """How many rows `rank` sends to each rank, and takes from each."""
    parts = held(len(table[0]), len(table))
    return [table[rank][part] for part in parts], [row[parts[rank]] for row in table]


def impossible(table: Table, carried: Sequence[int], active: int) -> int | None:
    """The first rank whose counts cannot be those of the rows that it carries, each of which takes `active` experts."""
    for rank, (counts, rows) in enumerate(zip(table, carried, strict=True)):
        most = rows * min(active, len(counts))
        if not all(0 <= count <= rows for count in counts) or not rows <= sum(counts) <= most:
            return rank
    return None


def packed(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """`[m, H]`, `[m, k]`, `[m, k]` as one, `[m, H + 2 k]`, ids as they are in memory: not every dtype has all of them
    among its numbers.
    """
    return torch.cat([rows, weights, experts.to(INTEGERS[rows.dtype]).view(rows.dtype)], 1)


def unpacked(given: Tensor, active: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `packed` joined."""
    rows, weights, experts = torch.split(given, [given.shape[1] - 2 * active, active, active], 1)
    return rows, weights, experts.view(INTEGERS[given.dtype]).long()
