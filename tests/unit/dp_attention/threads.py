"""A gang in one process: a thread per rank, whose collectives meet on a board. Nothing here is `torch.distributed`."""

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
    """Where the ranks of one axis meet."""

    def __init__(self, size: int) -> None:
        self._barrier, self._laid = Barrier(size), [None] * size

    def swap(self, rank: int, pieces: list[Tensor]) -> list[Tensor]:
        """`pieces[r]` for rank r -> what every rank has for this one."""
        self._laid[rank] = pieces  # type: ignore[call-overload]
        self._barrier.wait(30)
        found = [each[rank].clone() for each in self._laid]  # type: ignore[index]
        self._barrier.wait(30)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class Meeting(Axis):
    """An axis over a board; each collective counts once, as those of the mesh do."""

    def __init__(self, rank: int, size: int, board: Board, clock: ProgressClock) -> None:
        super().__init__(rank, size, clock=clock)
        self.board = board

    def _swap(self, pieces: list[Tensor]) -> list[Tensor]:
        began = self.clock.begin()
        found = self.board.swap(self.rank, pieces)
        self.clock.end(began)
        return found

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        assert rows.shape[0] == counts[self.rank]
        return torch.cat(self._swap([rows] * self.size)) if self.size > 1 else rows

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return sum_in_order(torch.stack(self._swap(list(torch.split(rows, list(counts))))))

    def all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        found = self._swap(list(torch.split(rows, list(sent))))
        assert [piece.shape[0] for piece in found] == list(taken), "one rank's sizes are not another's"
        return torch.cat(found)


def on_ranks(world: int, groups: int, run: Callable[[Mesh], T], kind: type[Meeting] = Meeting) -> list[T]:
    """What `run` gives on each rank of a gang with axes of this kind, in rank order; a rank's first error is raised."""
    attn = world // groups
    whole, of_groups = Board(world), [Board(attn) for _ in range(groups)]

    def rank_of(rank: int) -> Any:
        clock = ProgressClock()
        axis = kind(rank, world, whole, clock)
        group = kind(rank % attn, attn, of_groups[rank // attn], clock)
        try:
            with torch.inference_mode():
                return run(Mesh(rank, axis, group, axis, group))
        except BaseException:
            for board in (whole, *of_groups):
                board.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank_of, range(world)))
