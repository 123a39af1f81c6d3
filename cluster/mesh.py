"""The process groups of a gang and the spelling of every collective. A world of one needs no process group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place among `world` ranks. With `world` 1 every collective is the identity."""

    rank: int = 0
    world: int = 1

    def all_gather_row(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        """One row of plain integers from every rank, in rank order."""
        return [row]
