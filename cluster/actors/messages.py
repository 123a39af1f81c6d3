"""Messages between a Serve replica and the shards of its gang, and the interface that the REST layer uses."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cluster.request import Request, SequenceOutput
from cluster.status import EngineStatus, RankInfo

FailureKind = Literal["lost", "out_of_step", "failed"]
LossKind = Literal["died", "frozen", "failed", "out_of_step"]


@dataclass(frozen=True, slots=True)
class StepItem:
    """One item of a shard's stream. A shard sends an item after each step with outputs or refusals, and an item with
    `admitted` before each step that admits requests.

    `refused` holds (request id, message) of each request that the engine refused. `admitted` holds the ids of the
    requests that the step about to run admits.
    """

    rank: int
    step: int
    outputs: tuple[SequenceOutput, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    admitted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commands:
    """What a replica sends to one shard in one actor call: requests to submit (`submits`) and ids of requests to abort.

    `suspects` are ids of submitted requests that may have killed an earlier incarnation: the incarnation was lost
    before they got tokens beyond the first one. A step that admits a suspect reports this (`StepItem.admitted`),
    and waits until the replica confirms the report. `confirmed` are the ids that the replica confirms.
    """

    submits: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the loop of rank `reported_by` ended without being stopped, or cannot be used.

    `kind` is "lost" if a peer is gone, "out_of_step" if the ranks disagree, and "failed" if a step of this rank or a
    call to this rank raised an error. `rank` is the rank at fault, or None if rank `reported_by` does not know it.
    `step` and `phase` say where the failure was noticed.
    """

    reported_by: int
    kind: FailureKind
    rank: int | None
    step: int
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The progress of one rank, by its own clock.

    `steps` counts the steps of this rank's loop; `step` and `phase` say where the rank is now. `busy` is True while the
    rank loads or steps, even if only other ranks have requests. It is False while the rank sleeps because no rank has
    work, and after its loop has ended. `idle_s` is the time since the rank's last progress; use of CPU time is progress
    unless the rank waits. `since_mark_s` is the time since the rank last reached another step, phase, collective or
    part of a layer. `is_waiting` is True if the rank is in a collective, where it may wait for other ranks, or if it
    waits for its device. `status` is the engine's status after the last step.
    """

    rank: int
    steps: int
    busy: bool
    idle_s: float
    step: int = 0
    phase: str = ""
    since_mark_s: float = 0.0
    is_waiting: bool = False
    status: EngineStatus = field(default_factory=EngineStatus)


@dataclass(frozen=True, slots=True)
class Blame:
    """Which rank is at fault, in what way, and in which step and phase."""

    rank: int
    kind: LossKind
    step: int
    phase: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind} at step {self.step}, phase {self.phase}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Loss(Blame):
    """The end of one incarnation of a gang, and the rank at fault.

    `epoch` is the number of the incarnation. `at` is the Unix time when the rank at fault was decided, which is up to a
    second after the loss was noticed. `noticed_s` is the number of seconds from the last evidence that the rank at
    fault was alive (its heartbeat, or any rank's step item) until the loss was noticed. `restored_s` is the number of
    seconds from then until the gang served again, and `attempts` the number of starts that this took. They are None and
    0 until the gang serves again.
    """

    epoch: int
    at: float
    noticed_s: float
    restored_s: float | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class GangHistory:
    """The history of a gang. `start_seconds` is how long the first start took; `restart_timeout_s` is the limit of a
    restart.

    `epoch` is the number of earlier incarnations, `restarts` are the latest losses. `decided` holds, by name, what was
    decided before the start, as text. `gang` is the gang's name, which is different for each replica.
    """

    decided: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 0.0
    restart_timeout_s: float = 0.0
    epoch: int = 0
    restarts: tuple[Loss, ...] = ()
    gang: str = ""


@dataclass(frozen=True, slots=True)
class GangStatus:
    """The health and load of a gang, as its replica sees it.

    `healthy` becomes False as soon as a rank is dead, has failed, or does not answer or make progress for
    `watchdog_timeout_s`. It becomes True again when the rank recovers or the restarted gang serves. While it is False,
    `reason` says why; if a rank is at fault, it names rank, step and phase. `queued_tokens` are the tokens of requests
    that wait for their first token, with the tokens that they are expected to get. `running` counts the open requests
    that have had an output. `ranks` has the settings and hardware of each rank; it is empty before the first start.
    `heartbeats` has the last heartbeat of each rank that sent one; it is empty while the gang does not serve.
    """

    healthy: bool
    reason: str = ""
    queued_tokens: int = 0
    running: int = 0
    history: GangHistory = field(default_factory=GangHistory)
    ranks: tuple[RankInfo, ...] = ()
    heartbeats: tuple[Heartbeat, ...] = ()


class Overloaded(Exception):  # noqa: N818 - it is a state of the gang, not a mistake
    """The gang does not admit a request, because the queue is full or the wait would be too long. The client gets a 503
    with Retry-After at once.

    `retry_after_s` is the expected wait of a request that would join the queue now.
    """

    def __init__(self, message: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)  # both, so that it can be unpickled
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class Unavailable(Exception):  # noqa: N818 - it is a state of the gang, not a mistake
    """The gang is lost or shutting down. The client gets 503; a retry after `retry_after_s` may succeed."""

    def __init__(self, reason: str, retry_after_s: float = 5.0) -> None:
        super().__init__(reason, retry_after_s)  # both, so that it can be unpickled
        self.reason, self.retry_after_s = reason, retry_after_s

    def __str__(self) -> str:
        return self.reason


class LoadError(RuntimeError):
    """A shard could not load. `kind` is "failed" if the shard itself failed. It is "lost" or "out_of_step" if another
    shard failed.
    """

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message, kind)  # both, so that it can be unpickled
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class EngineClient(Protocol):
    """The interface through which the REST layer uses a gang."""

    def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        """Stream one output for each step that produced tokens of the request. Closing the iterator aborts the request.

        If the last output has finish_reason "abort", the gang ended before the request did. If it has "error", the
        request itself cannot go on.

        Raises:
            Overloaded: before the first output, when the queue is full or the wait would be too long.
            Unavailable: before the first output, when the gang is lost or shutting down.
            ValueError: the request cannot be served as it is (prompt too long, token id outside the vocabulary).
        """
        ...

    def overload(self) -> Overloaded | None:
        """Return why even a short request would be refused now, or None if it would be admitted. Cheap to call."""
        ...

    async def status(self) -> GangStatus:
        """Return the gang's health and load now; wait for at most a second."""
        ...

    async def metrics(self) -> list[bytes]:
        """Return the metrics of all ranks of the deployment and of the other replicas, each serialised for
        `cluster.observability.metrics.merge`.
        """
        ...
