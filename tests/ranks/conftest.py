"""Gangs of 2 and of 4 processes, each started once."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks.gang import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """The processes of a world of so many ranks."""
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        if world not in started:
            started[world] = Ranks(world)
        return started[world]

    yield of
    for each in started.values():
        each.__exit__(None, None, None)
