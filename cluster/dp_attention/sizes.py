"""Sizes: how many requests and rows an attention group runs in a step, with padding; and the keys of captured programs.

Each program has fixed sizes. A GPU, where a capture is expensive, pads to few sizes. A CPU, where each padded row costs
time, runs exact sizes and captures the sizes that recur.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from cluster.batch import ExtendMode

MAX_CAPTURED_ROWS = 1024
"""The largest number of target rows of a captured step, if it has the largest tree. The buffers of a program grow with
its rows; the time that it saves does not.
"""


class Sizes(NamedTuple):
    """What one group runs in a step: R decoding requests, c prompt rows, F finishing prompts. If the step is padded,
    padding is counted too.
    """

    decodes: int
    prompt_rows: int
    finishing_prompts: int

    def rows(self, tree_nodes: int) -> int:
        """Return the number of target rows, R * N + c, if each tree has N = `tree_nodes` nodes."""
        return self.decodes * tree_nodes + self.prompt_rows


class ProgramKey(NamedTuple):
    """Everything that decides the shapes and branches of a step's program. `tier` is the index of its tree shape,
    `sizes` has an entry for each group. `buffer_set` is the index of the buffer set that the step uses: two steps that
    may be in flight together use different sets.
    """

    tier: int
    forced_nodes: int
    mode: int
    sizes: tuple[Sizes, ...]
    extend_mode: int = ExtendMode.ACCEPTED
    buffer_set: int = 0


def max_sizes(groups: Sequence[Sizes]) -> Sizes:
    """Return sizes of which each is the largest over the groups."""
    return Sizes(*(max(column) for column in zip(*groups, strict=True)))


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that captured programs may have. Each count of a program (`Sizes`) is 0 or one of `sizes`, which
    ascend. If `sizes` is empty, programs have exactly the sizes that occur.

    In a captured step, each group has at most `max_rows` target rows. If `chunk_sizes` is empty, `allow_prompts` says
    whether the step may have prompt rows. Otherwise it may have none, or a number of them that is in `chunk_sizes`; in
    the latter case no prompt may end in it. If `equal_sizes` is True, all groups must run the same sizes in a captured
    step: a CUDA graph cannot hold an all-to-all that exchanges parts of different sizes.
    """

    sizes: tuple[int, ...] = ()
    max_rows: int = MAX_CAPTURED_ROWS
    allow_prompts: bool = True
    equal_sizes: bool = False
    chunk_sizes: tuple[int, ...] = ()

    def can_hold(self, sizes: Sizes, tree_nodes: int) -> bool:
        """Whether a group may have the sizes `sizes` in a captured program, with trees of `tree_nodes` nodes."""
        if sizes.rows(tree_nodes) > self.max_rows:
            return False
        if not sizes.prompt_rows or not self.chunk_sizes:
            return self.allow_prompts or not sizes.prompt_rows
        return sizes.prompt_rows in self.chunk_sizes and not sizes.finishing_prompts

    def fit(self, groups: Sequence[Sizes]) -> Sizes | None:
        """Return the smallest sizes of a program into which each of `groups` fits, or None if a group is too large for
        any program.

        If a group has fewer finishing prompts than the program, it also needs an idle prompt row (padding): the padding
        entries of `PromptBatch.final_rows` point at that row.
        """
        if not self.sizes:
            needed = max_sizes(groups)
            return needed._replace(prompt_rows=_prompt_rows_needed(groups, needed.finishing_prompts))
        decodes = self._bucket(max(group.decodes for group in groups))
        finishing_prompts = self._bucket(max(group.finishing_prompts for group in groups))
        if decodes is None or finishing_prompts is None:
            return None
        prompt_rows = self._bucket(_prompt_rows_needed(groups, finishing_prompts))
        return None if prompt_rows is None else Sizes(decodes, prompt_rows, finishing_prompts)

    def _bucket(self, count: int) -> int | None:
        """Return the smallest size that is at least `count`. Return 0 if `count` is 0, and None if it is larger than
        every size.
        """
        if count == 0 or count > self.sizes[-1]:
            return None if count else 0
        return self.sizes[bisect_left(self.sizes, count)]

    def padded_ranges(self) -> list[range]:
        """For each size, the range of the numbers of requests that are padded to it."""
        return [range(below + 1, size + 1) for below, size in pairwise((0, *self.sizes))]


def _prompt_rows_needed(groups: Sequence[Sizes], finishing_prompts: int) -> int:
    """Return the most prompt rows that any group needs in a program for `finishing_prompts` prompts that end in the
    step. A group needs its own prompt rows, and one idle row (padding) if fewer of its own prompts end.
    """
    return max(group.prompt_rows + (group.finishing_prompts < finishing_prompts) for group in groups)


def multiples(sizes: Sequence[int], divisor: int) -> tuple[int, ...]:
    """Return ascending `sizes`, each rounded up to a multiple of `divisor`, without duplicates."""
    return tuple(dict.fromkeys(-(-size // divisor) * divisor for size in sizes))


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16 and so on, and `largest` as the last size. Each size after 2 is at most 1.5 times
    the previous size, so at most a third of the rows is idle.
    """
    sizes, power = [1], 2
    while power < largest:
        sizes += [power, power + power // 2]
        power *= 2
    return (*(size for size in sizes if size < largest), largest)
