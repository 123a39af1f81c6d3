"""The times of trees with more requests than were measured at start.

A line through the times of one tree with one request and with four makes an error of a few percent to one of half the
time at 64 requests. So all trees are fitted together: what a row of the target adds to a step, and what a level of the
draft adds for each request, is the same in all of them. A large tree with four requests has as many rows as no tree
with 48, so its time says how much 48 rows take.
"""

from collections.abc import Sequence

from cluster.config.tree_shape import TreeShape

SWEEPS = 300
"""So often each coefficient is fitted, given the others. Then they change no more."""

Times = Sequence[tuple[int, Sequence[int]]]
"""Measured times: a number of requests, with the microseconds of a step by tree."""


def extrapolated(measured: Times, shapes: Sequence[TreeShape], count: int) -> list[int]:
    """Return the times of all trees with `count` requests, which are more than the last `measured` number, and not less
    than its times. At least two numbers of requests must be measured, in ascending order.

    The time of a step is taken to be a sum with coefficients that are not negative (`_parts`). They are the best fit of
    all measured times by relative errors. All ranks of the same measurement get the same numbers.
    """
    coefficients = _fitted(
        [
            [part / us for part in _parts(shape, n)]
            for n, times in measured
            for us, shape in zip(times, shapes, strict=True)
        ]
    )
    last, times = measured[-1]
    return [
        round(us + sum(c * (a - b) for c, a, b in zip(coefficients, _parts(s, count), _parts(s, last), strict=True)))
        for us, s in zip(times, shapes, strict=True)
    ]


def _parts(shape: TreeShape, requests: int) -> tuple[float, ...]:
    """Return what the time of a step depends on: the step itself, whether there is a draft, its levels, the requests,
    the rows of the target, and the levels of all requests.
    """
    levels, nodes, _ = shape.label
    return 1.0, float(levels > 0), float(levels), float(requests), float(requests * nodes), float(requests * levels)


def _fitted(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return coefficients, not below 0, with which the weighted sum of each row is as near to 1 as possible: least
    squares by coordinate descent.
    """
    columns = range(len(rows[0]))
    squares = [sum(row[k] * row[k] for row in rows) for k in columns]
    coefficients, missing = [0.0] * len(columns), [1.0] * len(rows)
    for _ in range(SWEEPS):
        for k in columns:
            if not squares[k]:
                continue
            old = coefficients[k]
            step = sum(row[k] * part for row, part in zip(rows, missing, strict=True)) / squares[k]
            coefficients[k] = max(0.0, old + step)
            change = coefficients[k] - old
            missing = [part - change * row[k] for row, part in zip(rows, missing, strict=True)]
    return coefficients
