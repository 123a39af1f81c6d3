"""What crosses between a Serve replica and the shards of its gang, and the seam the REST layer is written against."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.request import Request, RequestOutput


@dataclass(frozen=True, slots=True)
class StepItem:
    """The one item a shard streams per step: what every request of that rank got in it.

    `refused` holds (request id, message) of requests that the engine would not take, in the step that they would have
    joined.
    """

    rank: int
    step: int
    outputs: tuple[RequestOutput, ...]
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Commands:
    """What a replica tells one shard in one actor call: requests that begin and ids of requests that end."""

    submits: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The pulse of one rank, read from its own clock.

    `age_s` is the time since the rank last made progress while it had work, and 0.0 when it is idle; `failed` is the
    reason that its loop ended, or empty; `status` holds the counters of the engine after its last step.
    """

    rank: int
    steps: int
    busy: bool
    age_s: float
    failed: str = ""
    status: dict[str, Any] = field(default_factory=dict)


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


class Overloaded(Exception):  # noqa: N818 - it is a state of the gang, not a mistake
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
