"""All-to-all of rows for expert-parallel experts: which rows go to which ranks, in what order, and with what data.

Experts are divided into `parts`. Neighbouring ranks share one part: each of them holds some columns of the part's
experts. A row goes once to every rank of each part that holds one of its experts, with the weights and ids of all its
experts. Legend: m rows that a rank carries (its share of its group's rows), k experts that a row takes, H hidden, n
ranks, S rows that a rank sends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.device.wait_hook import catch_up
from cluster.distributed.mesh import Shard, added
from cluster.models.context import part_of_experts

Table = tuple[tuple[int, ...], ...]
"""The number of rows that each rank sends to each part, `[n][parts]`; the same on all ranks."""

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
INTEGERS[torch.bfloat16] = torch.int16


class AllToAll:
    """Where this rank's m rows go: `counts` of rows to each part, indices of the rows that go `to` each rank."""

    def __init__(self, taken: Tensor, parts: int, ranks: int) -> None:
        """`taken` `[m, k]` are the parts that hold the experts of each row. Waits for the device to read the counts."""
        hits = taken.new_zeros(taken.shape[0], parts, dtype=torch.bool).scatter_(1, taken, True)
        self.carried = taken.shape[0]
        going = hits.sum(0)
        catch_up()  # wait under the watchdog: `tolist` alone would hang if a peer is lost
        self.counts: tuple[int, ...] = tuple(going.tolist())
        each = torch.split(hits.t().nonzero()[:, 1], list(self.counts))
        self.to = [each[part] for part in held(parts, ranks)]

    @property
    def rows(self) -> Tensor:
        """The indices of the rows to send, in order of destination rank, `[S]`."""
        return torch.cat(self.to)

    def summed(self, came: Tensor, common: range) -> Tensor:
        """Partial sums that came back, `[.., H]` -> their sums `[m, H]`, added in rank order.

        `came` holds, rank by rank, one sum for each row that went to that rank. If the rank is in `common`, one more
        sum follows for every row that this rank carries.
        """
        every = torch.arange(self.carried, device=came.device)
        places = []
        for rank, went in enumerate(self.to):
            places.append(went + rank * self.carried)
            if rank in common:
                places.append(every + rank * self.carried)
        # Row i from rank r is added at place r * m + i. A place gets at most two numbers, so the order in which a GPU
        # adds them, which is not fixed, does not change the sum.
        total = came.new_zeros(len(self.to) * self.carried, came.shape[1]).index_add_(0, torch.cat(places), came)
        return added(total.view(len(self.to), self.carried, came.shape[1]))


def held(parts: int, ranks: int) -> list[int]:
    """Return the part of the experts that each rank holds."""
    return [part_of_experts(parts, Shard(rank, ranks)).rank for rank in range(ranks)]


def flows(table: Table, rank: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that `rank` sends to each rank and receives from each."""
    parts = held(len(table[0]), len(table))
    return [table[rank][part] for part in parts], [row[parts[rank]] for row in table]


def impossible(table: Table, carried: Sequence[int], active: int) -> int | None:
    """Return the first rank whose counts are impossible for its rows, or None. A row goes to at least 1 part, and to at
    most min(active, parts) parts.
    """
    for rank, (counts, rows) in enumerate(zip(table, carried, strict=True)):
        most = rows * min(active, len(counts))
        if not all(0 <= count <= rows for count in counts) or not rows <= sum(counts) <= most:
            return rank
    return None


def packed(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Join rows `[m, H]`, weights `[m, k]` and expert ids `[m, k]` to `[m, H + 2 k]`. Ids travel as bit patterns,
    because bfloat16, for example, cannot represent all ids as numbers.
    """
    return torch.cat([rows, weights, experts.to(INTEGERS[rows.dtype]).view(rows.dtype)], 1)


def unpacked(given: Tensor, active: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split what `packed` joined: rows, weights, ids as int64."""
    rows, weights, experts = torch.split(given, [given.shape[1] - 2 * active, active, active], 1)
    return rows, weights, experts.view(INTEGERS[given.dtype]).long()
