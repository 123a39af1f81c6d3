"""Pairwise testing: a few rows that contain every combination of values of any two (or three) axes.

The full product of all axes would have too many rows.
"""

from collections.abc import Sequence
from itertools import combinations, product
from random import Random
from typing import Any


def covering(axes: Sequence[Sequence[Any]], strength: int = 2, seed: int = 0) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, in which all combinations of values of any `strength` axes occur.

    The choice is greedy and depends on the seed only. Each row contains one combination that no earlier row contains.
    Of 30 random rows with this combination, the one with the most new combinations is taken.
    """
    random = Random(seed)
    groups = list(combinations(range(len(axes)), strength))
    uncovered = {
        (group, value_indices) for group in groups for value_indices in product(*(range(len(axes[i])) for i in group))
    }
    rows = []
    while uncovered:
        group, value_indices = min(uncovered)
        best_new: set[Any] = set()
        for _ in range(30):
            row = [random.randrange(len(axis)) for axis in axes]
            for i, value in zip(group, value_indices, strict=True):
                row[i] = value
            newly_covered = {(axis_group, tuple(row[i] for i in axis_group)) for axis_group in groups} & uncovered
            if len(newly_covered) > len(best_new):
                best_new, best_row = newly_covered, row
        uncovered -= best_new
        rows.append(tuple(axis[i] for axis, i in zip(axes, best_row, strict=True)))
    return rows


def assert_covering(rows: Sequence[Sequence[Any]], axes: Sequence[Sequence[Any]], strength: int = 2) -> None:
    """Fail unless all combinations of values of any `strength` axes occur in the rows."""
    for group in combinations(range(len(axes)), strength):
        covered = {tuple(str(row[i]) for i in group) for row in rows}
        expected = {tuple(map(str, values)) for values in product(*(axes[i] for i in group))}
        assert expected <= covered, (
            f"combinations of the axes {group} that occur in no row: {sorted(expected - covered)}"
        )
