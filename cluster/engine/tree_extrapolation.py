"""The times of trees with numbers of requests with which not all trees were measured.

Between two numbers with which all trees were measured, the time of a tree is taken to be linear. Beyond the largest one
this is not enough: a line through the times of one tree with one request and with four makes an error of a few percent
to one of half the time at 64 requests. So there all trees are fitted together: what a row of the target adds to a step,
and what a level of the draft adds for each request, is the same in all of them. A large tree with four requests has as
many rows as no tree with 48, so its time says how much 48 rows take.
"""

from collections.abc import Mapping, Sequence

from cluster.config.tree_shape import TreeShape

SWEEPS = 300
"""So often each coefficient is fitted, given the others. Then they change no more."""

Times = Sequence[tuple[int, Mapping[int, int]]]
"""Measured times: a number of requests, with the microseconds of a step by tier, the index of a tree shape."""


def all_times(measured: Times, shapes: Sequence[TreeShape], count: int) -> list[int]:
    """Return the times of all trees with `count` requests.

    In `measured`, the numbers of requests ascend. All trees must be measured with the first of them, and with at least
    one other. Some trees may be measured with further numbers; with `count` itself, such times are returned as they
    are. The times of the other trees are multiplied by what these show (`_factor`). All ranks of the same measurement
    get the same numbers.
    """
    full = [(n, times) for n, times in measured if len(times) == len(shapes)]
    right = next((i for i, (n, _) in enumerate(full) if n >= count), len(full))
    if right == len(full):
        expected_us = _extrapolated(measured, full[-1], shapes, count)
    else:
        (low, low_us), (high, high_us) = full[max(0, right - 1)], full[right]
        share = (count - low) / (high - low) if high > low else 1.0
        expected_us = [low_us[t] + (high_us[t] - low_us[t]) * share for t in range(len(shapes))]
    known_us = dict(measured).get(count, {})
    points = sorted((expected_us[tier], us / expected_us[tier]) for tier, us in known_us.items())
    return [known_us.get(tier) or round(us * _factor(points, us)) for tier, us in enumerate(expected_us)]


def _extrapolated(
    measured: Times, last: tuple[int, Mapping[int, int]], shapes: Sequence[TreeShape], count: int
) -> list[float]:
    """Return the times of all trees with `count` requests, more than in `last`, the largest number that was measured
    with all trees.

    The time of a step is taken to be a sum with coefficients that are not negative (`_parts`). They are the best fit of
    all measured times by relative errors, and say how much is added to the times of `last`.
    """
    coefficients = _fitted(
        [[part / us for part in _parts(shapes[tier], n)] for n, times in measured for tier, us in times.items()]
    )
    requests, last_us = last
    return [
        last_us[tier]
        + sum(c * (a - b) for c, a, b in zip(coefficients, _parts(shape, count), _parts(shape, requests), strict=True))
        for tier, shape in enumerate(shapes)
    ]


def _factor(points: Sequence[tuple[float, float]], expected_us: float) -> float:
    """Return by which factor a step is expected to take longer than `expected_us`, given the `points`: expected times
    of measured trees, in ascending order, with this factor. The factor is linear between two points, and constant
    beyond the first and the last. Without points it is 1.
    """
    if not points:
        return 1.0
    shorter = [point for point in points if point[0] <= expected_us] or points[:1]
    longer = [point for point in points if point[0] >= expected_us] or points[-1:]
    (low_us, low_factor), (high_us, high_factor) = shorter[-1], longer[0]
    if high_us <= low_us:
        return low_factor
    return low_factor + (high_factor - low_factor) * (expected_us - low_us) / (high_us - low_us)


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
