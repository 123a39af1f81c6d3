"""Parameters of which some are marked slow: `make test` runs the others, `make verify` all of them."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def every_nth_fast(n: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test. The cases 0, n, 2n and so on are fast, the others are marked slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if position % n else ())
        for position, case in enumerate(cases)
    ]


def diagonals_fast(n: int, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Parameters of a test with two axes: all pairs of their values. Every n-th diagonal is fast, the others are marked
    slow. If the axes have at least n values, each value of both occurs in a fast pair.
    """
    return [
        pytest.param(a, b, marks=pytest.mark.slow if (i + j) % n else ())
        for (i, a), (j, b) in product(enumerate(first), enumerate(second))
    ]
