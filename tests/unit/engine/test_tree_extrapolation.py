"""Times of more requests than were measured: all trees are fitted together."""

from random import Random
from statistics import median

import pytest

from cluster.config.tree_shape import TreeShape, tiers
from cluster.engine.tree_extrapolation import all_times

SHAPES = tiers(TreeShape(num_steps=3, topk=2, num_draft_tokens=8))


def true_us(shape: TreeShape, requests: int) -> float:
    """A step of 4 ms, a draft of 0.5 ms and 0.2 ms a level, 0.25 ms a row, 0.05 ms a level of a request."""
    levels, nodes, _ = shape.label
    return 4000 + 500 * (levels > 0) + 200 * levels + requests * (250 * nodes + 50 * levels)


def test_exact_times_are_continued_exactly() -> None:
    measured = [(n, dict(enumerate(round(true_us(shape, n)) for shape in SHAPES))) for n in (1, 4)]
    assert all_times(measured, SHAPES, 64) == pytest.approx([true_us(shape, 64) for shape in SHAPES], rel=0.02)


def test_noise_stays_small_where_lines_would_go_far_astray() -> None:
    random, errors, errors_of_lines = Random(4), list[float](), list[float]()
    for _ in range(40):
        measured = [
            (n, dict(enumerate(round(true_us(s, n) * random.uniform(0.95, 1.05)) for s in SHAPES))) for n in (1, 4)
        ]
        (_, few), (_, more) = measured
        lines = [b + (b - a) / 3 * 60 for a, b in zip(few.values(), more.values(), strict=True)]
        for us, line, shape in zip(all_times(measured, SHAPES, 64), lines, SHAPES, strict=True):
            errors.append(abs(us / true_us(shape, 64) - 1))
            errors_of_lines.append(abs(line / true_us(shape, 64) - 1))
    assert median(errors) < 0.05 and max(errors) < 0.4
    assert median(errors) < 0.75 * median(errors_of_lines), (median(errors), median(errors_of_lines))


def test_more_requests_never_take_less_time() -> None:
    measured = [(1, dict.fromkeys(range(len(SHAPES)), 1000)), (4, dict.fromkeys(range(len(SHAPES)), 900))]
    assert min(all_times(measured, SHAPES, 64)) >= 900


def bent_us(shape: TreeShape, requests: int) -> float:
    """As `true_us`, but rows beyond 100 take only half as long, as if larger products were faster."""
    rows = requests * shape.num_draft_tokens
    return true_us(shape, requests) - 125 * max(0, rows - 100)


def test_a_few_measured_trees_show_the_times_of_all() -> None:
    """In this test a row of a large step takes less time than a row of a small step. Steps with few requests do not
    show this; the steps with many requests that were measured with a few trees do.
    """
    measured = [(n, dict(enumerate(round(bent_us(shape, n)) for shape in SHAPES))) for n in (1, 4)]
    few = {tier: round(bent_us(SHAPES[tier], 64)) for tier in (0, 1, len(SHAPES) - 1)}
    times = all_times([*measured, (64, few)], SHAPES, 64)
    assert {tier: times[tier] for tier in few} == few
    assert times == pytest.approx([bent_us(shape, 64) for shape in SHAPES], rel=0.06)
    assert times == sorted(times)
    assert all_times(measured, SHAPES, 64) != pytest.approx(times, rel=0.3)
    more = all_times([*measured, (16, {0: round(bent_us(SHAPES[0], 16))}), (64, few)], SHAPES, 64)
    assert more == pytest.approx([bent_us(shape, 64) for shape in SHAPES], rel=0.06)


def test_between_two_measured_numbers_of_requests_a_few_trees_correct_a_line() -> None:
    def times_us(count: int) -> dict[int, int]:
        return dict(enumerate(round(bent_us(shape, count)) for shape in SHAPES))

    measured, true_times = [(n, times_us(n)) for n in (1, 4, 64)], [bent_us(shape, 24) for shape in SHAPES]
    assert all_times(measured, SHAPES, 24) != pytest.approx(true_times, rel=0.1)
    few = {tier: times_us(24)[tier] for tier in (0, 1, len(SHAPES) - 1)}
    times = all_times([*measured[:2], (24, few), measured[2]], SHAPES, 24)
    assert {tier: times[tier] for tier in few} == few
    assert times == pytest.approx(true_times, rel=0.06)
    assert all_times(measured, SHAPES, 64) == list(measured[2][1].values())
