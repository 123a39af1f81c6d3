"""Planted divergences: what goes wrong on one rank only, from one step on. Each must be reported, never acted out."""

from collections.abc import Callable

from cluster.engine import Rank

PLANTS: dict[str, Callable[[Rank, int, Callable[[], None]], Callable[[], None]]] = {}


def plant(name: str, rank: Rank, at_step: int, struck: Callable[[], None]) -> Callable[[], None]:
    """Plant it in this rank; `struck` tells when it did its harm. Returns what undoes it."""
    return PLANTS[name](rank, at_step, struck)
