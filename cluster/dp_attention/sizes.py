"""How many rows each group runs in a step: those that its requests have, or few sizes for which programs are captured.

A program is one for its sizes, so a device on which capturing is dear pads to few of them. A device that pays for every
padded row runs exact sizes, and captures those that recur.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

MOST_ROWS = 1024
"""Rows of the target in a captured step, counted with the deepest tree: a program's buffers grow with its rows, and
what it saves does not."""


class Sizes(NamedTuple):
    """What a group runs in a step: R decoding requests, c prompt rows, F prompts that finish, idle ones included."""

    decodes: int
    prompt_rows: int
    finals: int

    def rows(self, nodes: int) -> int:
        """Rows of the target, in trees of so many nodes."""
        return self.decodes * nodes + self.prompt_rows


def most(groups: Sequence[Sizes]) -> Sizes:
    """The largest of each size."""
    return Sizes(*(max(column) for column in zip(*groups, strict=True)))


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that captured programs have, ascending; none: exactly those that occur.

    None has more than `rows` rows of the target, and one with rows of prompts only if they have `prompts`. If `alike`,
    all groups run the same in it: parts of other sizes travel by a collective that a graph cannot hold.
    """

    sizes: tuple[int, ...] = ()
    rows: int = MOST_ROWS
    prompts: bool = True
    alike: bool = False

    def hold(self, own: Sizes, nodes: int) -> bool:
        """Whether a group that runs `own`, with trees of so many nodes, may run a captured program."""
        return own.rows(nodes) <= self.rows and (self.prompts or not own.prompt_rows)

    def fitted(self, groups: Sequence[Sizes]) -> Sizes | None:
        """The least sizes of a program that each of `groups` fits into; None if they are too large for all.

        Ends of prompts that there are not need an idle prompt row, whose ends they are.
        """
        if not self.sizes:
            largest = most(groups)
            return largest._replace(prompt_rows=_with_ends(groups, largest.finals))
        decodes = self._least(max(own.decodes for own in groups))
        finals = self._least(max(own.finals for own in groups))
        if decodes is None or finals is None:
            return None
        rows = self._least(_with_ends(groups, finals))
        return None if rows is None else Sizes(decodes, rows, finals)

    def _least(self, count: int) -> int | None:
        if count == 0 or count > self.sizes[-1]:
            return None if count else 0
        return self.sizes[bisect_left(self.sizes, count)]

    def spans(self) -> list[range]:
        """For each size, the numbers of requests that run at it."""
        return [range(below + 1, size + 1) for below, size in pairwise((0, *self.sizes))]


def _with_ends(groups: Sequence[Sizes], finals: int) -> int:
    """The prompt rows in which each of `groups` has room for `finals` ends."""
    return max(own.prompt_rows + (own.finals < finals) for own in groups)


def multiples(sizes: Sequence[int], of: int) -> tuple[int, ...]:
    """Ascending sizes, each rounded up to a multiple, which so many ranks share evenly."""
    return tuple(dict.fromkeys(-(-size // of) * of for size in sizes))


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16 and so on: at most a third of the rows that a group runs at such sizes is idle, as from
    2 on each is at most one and a half times the one before.
    """
    sizes, power = [1], 2
    while power < largest:
        sizes += [power, power + power // 2]
        power *= 2
    return (*(size for size in sizes if size < largest), largest)
