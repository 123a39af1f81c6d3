"""A gang in one process, with one thread per rank. Collectives exchange tensors over a `Board` in memory, without
`torch.distributed`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.distributed.mesh import Axis, Mesh, sum_in_order
from cluster.distributed.progress import ProgressClock

T = TypeVar("T")


class Board:
    """Shared memory through which the threads of one axis exchange tensors."""

    def __init__(self, size: int) -> None:
        self._barrier, self._pieces_of_ranks = Barrier(size), [None] * size

    def swap(self, rank: int, pieces: list[Tensor]) -> list[Tensor]:
        """Give `pieces[r]` to rank r; return the pieces that the ranks gave to this rank, in rank order."""
        self._pieces_of_ranks[rank] = pieces  # type: ignore[call-overload]
        self._barrier.wait(30)
        received = [rank_pieces[rank].clone() for rank_pieces in self._pieces_of_ranks]  # type: ignore[index]
        self._barrier.wait(30)
        return received

    def abort(self) -> None:
        self._barrier.abort()


class ThreadAxis(Axis):
    """An axis whose ranks are threads that share a board. The clock counts each collective once, as a mesh's does."""

    def __init__(self, rank: int, size: int, board: Board, clock: ProgressClock) -> None:
        super().__init__(rank, size, clock=clock)
        self.board = board

    def _swap(self, pieces: list[Tensor]) -> list[Tensor]:
        started = self.clock.begin()
        received = self.board.swap(self.rank, pieces)
        self.clock.end(started)
        return received

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        assert rows.shape[0] == counts[self.rank]
        return torch.cat(self._swap([rows] * self.size)) if self.size > 1 else rows

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return sum_in_order(torch.stack(self._swap(list(torch.split(rows, list(counts))))))

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        received = self._swap(list(torch.split(rows, list(send_counts))))
        assert [piece.shape[0] for piece in received] == list(receive_counts), "ranks disagree on the counts"
        return torch.cat(received)


def run_on_ranks(
    world: int, groups: int, run: Callable[[Mesh], T], axis_class: type[ThreadAxis] = ThreadAxis
) -> list[T]:
    """Call `run` on each rank of a gang with axes of `axis_class`. Return the results in rank order, or raise the error
    of the first rank that has one.
    """
    group_size = world // groups
    world_board, group_boards = Board(world), [Board(group_size) for _ in range(groups)]

    def run_rank(rank: int) -> Any:
        clock = ProgressClock()
        axis = axis_class(rank, world, world_board, clock)
        group = axis_class(rank % group_size, group_size, group_boards[rank // group_size], clock)
        try:
            with torch.inference_mode():
                return run(Mesh(rank, axis, group, axis, group))
        except BaseException:
            for board in (world_board, *group_boards):
                board.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run_rank, range(world)))
