"""What crosses between a Serve replica and the shards of its gang, and the seam the REST layer is written against."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.request import Request, RequestOutput


@dataclass(frozen=True, slots=True)
class StepItem:
    """The one item a shard streams per step: what every request of that rank got in it."""

    rank: int
    step: int
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class GangStatus:
    """The health and load of a gang, as its replica sees it.

    `healthy` is False as soon as a shard is dead or busy without a step for `watchdog_timeout_s`; `reason` then names
    the rank. `info` is JSON-ready: the resolved config of rank 0 and per-rank counters.
    """

    healthy: bool
    reason: str = ""
    queued_tokens: int = 0
    running: int = 0
    info: dict[str, Any] = field(default_factory=dict)


class Overloaded(Exception):
    """Admission refused: the queue holds `max_queued_tokens`. Answered as 503 with Retry-After at once."""


class EngineClient(Protocol):
    """What the REST layer needs from a gang."""

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Stream one output per step that gave the request tokens; closing the iterator aborts the request.

        Raises:
            Overloaded: before the first output, when the queue is full.
            ValueError: the request cannot be served as it is (prompt too long, token id outside the vocabulary).
        """
        ...

    async def status(self) -> GangStatus:
        """The gang's health and load now; never waits longer than a second."""
        ...

    async def metrics(self) -> list[bytes]:
        """One serialised registry sample per rank (see `cluster.metrics`), for the sum over ranks."""
        ...
