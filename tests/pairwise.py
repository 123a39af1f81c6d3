"""Few rows that hold every combination of values of any two (or three) axes, where the whole product would be many."""

from collections.abc import Sequence
from itertools import combinations, product
from random import Random
from typing import Any


def covering(axes: Sequence[Sequence[Any]], strength: int = 2, seed: int = 0) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, in which all combinations of values of any `strength` axes occur.

    The choice is greedy and follows from the seed alone: each row holds a combination that no earlier one has, and is
    the best of 30 random rows that do.
    """
    random = Random(seed)
    groups = list(combinations(range(len(axes)), strength))
    left = {(group, at) for group in groups for at in product(*(range(len(axes[i])) for i in group))}
    rows = []
    while left:
        group, at = min(left)
        best: set[Any] = set()
        for _ in range(30):
            row = [random.randrange(len(axis)) for axis in axes]
            for i, value in zip(group, at, strict=True):
                row[i] = value
            new = {(each, tuple(row[i] for i in each)) for each in groups} & left
            if len(new) > len(best):
                best, chosen = new, row
        left -= best
        rows.append(tuple(axis[i] for axis, i in zip(axes, chosen, strict=True)))
    return rows


def assert_covering(rows: Sequence[Sequence[Any]], axes: Sequence[Sequence[Any]], strength: int = 2) -> None:
    """Fail unless all combinations of values of any `strength` axes occur in the rows."""
    for group in combinations(range(len(axes)), strength):
        met = {tuple(str(row[i]) for i in group) for row in rows}
        wanted = {tuple(map(str, values)) for values in product(*(axes[i] for i in group))}
        assert wanted <= met, f"axes {group} miss {sorted(wanted - met)}"
