"""All-to-all of rows for expert-parallel experts: which rows go to which ranks, in what order, and with what data.

Experts are divided into `ep_size` parts; EP rank i holds part i. If there are more ranks than parts, neighbouring ranks
have the same EP rank: each of them then holds some columns of the part's experts. If a part holds at least one of a
row's experts, the row goes once to every rank of that part, with the weights and ids of all its experts.

Legend: m rows that a rank carries (its share of the rows of its attention group), k experts that a row takes, H hidden,
n ranks, S rows that a rank sends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.device.wait_hook import wait_for_device
from cluster.distributed.mesh import Shard, sum_in_order
from cluster.models.context import expert_shard

RowCounts = tuple[tuple[int, ...], ...]
"""The number of rows that each rank sends to each EP rank, `[n][ep_size]`; the same on all ranks."""

INTEGER_DTYPES = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
INTEGER_DTYPES[torch.bfloat16] = torch.int16


class AllToAll:
    """Says where this rank's m rows go. `counts[e]` is the number of rows for EP rank e, and `rows_to_rank[r]` are the
    indices of the rows for rank r.
    """

    def __init__(self, ep_ranks: Tensor, ep_size: int, world_size: int) -> None:
        """`ep_ranks` `[m, k]` are the EP ranks that hold the k experts of each row. The constructor waits for the
        device, because it reads the counts.
        """
        is_sent = ep_ranks.new_zeros(ep_ranks.shape[0], ep_size, dtype=torch.bool).scatter_(1, ep_ranks, True)
        self.num_rows = ep_ranks.shape[0]
        counts = is_sent.sum(0)
        wait_for_device()  # wait under the watchdog: `tolist` alone would hang if a peer is lost
        self.counts: tuple[int, ...] = tuple(counts.tolist())
        rows_to_ep_rank = torch.split(is_sent.t().nonzero()[:, 1], list(self.counts))
        self.rows_to_rank = [rows_to_ep_rank[ep_rank] for ep_rank in ep_ranks_of(ep_size, world_size)]

    @property
    def rows(self) -> Tensor:
        """The indices of the rows to send, in order of destination rank, `[S]`."""
        return torch.cat(self.rows_to_rank)

    def sum_received(self, received: Tensor, common_ranks: range) -> Tensor:
        """Partial sums that came back, `received` `[.., H]` -> their sums `[m, H]`, added in rank order.

        `received` holds, rank by rank, one partial sum for each row that was sent to that rank. If `common_ranks`
        contains the rank, one more partial sum follows for each of the m rows.
        """
        all_rows = torch.arange(self.num_rows, device=received.device)
        targets = []
        for rank, rows in enumerate(self.rows_to_rank):
            targets.append(rows + rank * self.num_rows)
            if rank in common_ranks:
                targets.append(all_rows + rank * self.num_rows)
        # Row i from rank r is added at place r * m + i. A place gets at most two numbers, so the order in which a GPU
        # adds them, which is not fixed, does not change the sum.
        total = received.new_zeros(len(self.rows_to_rank) * self.num_rows, received.shape[1]).index_add_(
            0, torch.cat(targets), received
        )
        return sum_in_order(total.view(len(self.rows_to_rank), self.num_rows, received.shape[1]))


def ep_ranks_of(ep_size: int, world_size: int) -> list[int]:
    """Return the EP rank of each rank."""
    return [expert_shard(ep_size, Shard(rank, world_size)).rank for rank in range(world_size)]


def send_receive_counts(row_counts: RowCounts, rank: int) -> tuple[list[int], list[int]]:
    """Return two lists: how many rows `rank` sends to each rank, and how many it receives from each rank."""
    ep_ranks = ep_ranks_of(len(row_counts[0]), len(row_counts))
    return [row_counts[rank][ep_rank] for ep_rank in ep_ranks], [counts[ep_ranks[rank]] for counts in row_counts]


def first_invalid_rank(row_counts: RowCounts, num_rows: Sequence[int], experts_per_row: int) -> int | None:
    """Return the first rank whose counts are impossible for its number of rows (`num_rows`), or None. A row goes to at
    least 1 EP rank, and to at most min(experts_per_row, ep_size).
    """
    for rank, (counts, rows) in enumerate(zip(row_counts, num_rows, strict=True)):
        max_sent = rows * min(experts_per_row, len(counts))
        if not all(0 <= count <= rows for count in counts) or not rows <= sum(counts) <= max_sent:
            return rank
    return None


def pack_rows(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Join rows `[m, H]`, weights `[m, k]` and expert ids `[m, k]` to `[m, H + 2 k]`. Ids travel as bit patterns,
    because bfloat16, for example, cannot represent all ids as numbers.
    """
    return torch.cat([rows, weights, experts.to(INTEGER_DTYPES[rows.dtype]).view(rows.dtype)], 1)


def unpack_rows(packed: Tensor, experts_per_row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split what `pack_rows` joined. Return the rows, the weights, and the ids as int64."""
    rows, weights, experts = torch.split(
        packed, [packed.shape[1] - 2 * experts_per_row, experts_per_row, experts_per_row], 1
    )
    return rows, weights, experts.view(INTEGER_DTYPES[packed.dtype]).long()
