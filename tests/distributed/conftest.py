"""A fixture for the rank processes of gangs of 2 and of 4 ranks. Each set of processes is started once."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.gang import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankProcesses]]:
    """A function that returns the processes of a gang of a given size; the first call for a size starts them."""
    started: dict[int, RankProcesses] = {}

    def of_size(world_size: int) -> RankProcesses:
        if world_size not in started:
            started[world_size] = RankProcesses(world_size)
        return started[world_size]

    yield of_size
    for processes in started.values():
        processes.__exit__(None, None, None)
