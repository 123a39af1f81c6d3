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
    """One item of a shard's stream: one per step with the outputs of the rank's requests, and one before each step that
    admits requests.

    `refused` holds (request id, message) of requests that the engine refused, in the step that they would have joined;
    `begun` the ids of those that the step about to run admits.
    """

    rank: int
    step: int
    outputs: tuple[SequenceOutput, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    begun: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commands:
    """What a replica sends one shard in one actor call: requests to submit and ids of requests to abort.

    `doubted` are the ids of those submits that were lost with a gang before they went on from their prompt: each may be
    what killed it. The step that admits one waits until the replica knows that it begins; `heard` says of which it
    does.
    """

    submits: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()
    doubted: tuple[str, ...] = ()
    heard: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the loop of rank `by` ended without being asked to.

    `kind` "lost": a peer is gone; "out_of_step": the ranks disagree; "failed": a step of this rank raised. `rank` is
    the rank at fault as far as `by` knows, `step` and `phase` are where it was noticed.
    """

    by: int
    kind: FailureKind
    rank: int | None
    step: int
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The progress of one rank, by its own clock.

    `steps` were taken; `step` and `phase` are where the rank is now; `busy`: it has work. `age_s` is the time since its
    last progress, `unmarked_s` the time since it last reached another step, phase, collective or part of a layer: using
    CPU time counts as progress for the first only. `waits`: it is in a collective, where it may wait for peers.
    `status` is the engine's after its last step.
    """

    rank: int
    steps: int
    busy: bool
    age_s: float
    step: int = 0
    phase: str = ""
    unmarked_s: float = 0.0
    waits: bool = False
    status: EngineStatus = field(default_factory=EngineStatus)


@dataclass(frozen=True, slots=True)
class Blame:
    """Which rank is at fault, how, and where it was."""

    rank: int
    kind: LossKind
    step: int
    phase: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind} at step {self.step}, phase {self.phase}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Loss(Blame):
    """The end of one life of a gang, and which rank is to blame.

    `epoch` is the life that ended, `at` the Unix time when that was noticed. In seconds: `noticed_s` from the rank's
    last sign of life (a heartbeat, or any rank's step item) until then; `restored_s` from then until the gang served
    again, after `attempts` starts (None while it does not).
    """

    epoch: int
    at: float
    noticed_s: float
    restored_s: float | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class GangHistory:
    """The lives of a gang: how long its first start took, how long a restart may take, and why lives ended.

    `epoch` counts the lives before this one, `restarts` are the latest losses. `decided` holds what was settled before
    the start and how, by name; `gang` is the gang's own name, which tells it from those of other replicas.
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

    `healthy` is False as soon as a rank is dead, failed, or gives no sign of progress for `watchdog_timeout_s`, and
    until the gang serves again; `reason` then names rank, step and phase. `ranks` says what each runs with, `beats` how
    far it is; both are empty before the first start, and while a rank has no heart beat yet it is not in `beats`.
    """

    healthy: bool
    reason: str = ""
    queued_tokens: int = 0
    running: int = 0
    history: GangHistory = field(default_factory=GangHistory)
    ranks: tuple[RankInfo, ...] = ()
    beats: tuple[Heartbeat, ...] = ()


class Overloaded(Exception):  # noqa: N818 - it is a state of the gang, not a mistake
    """Admission refused: the queue is full or the wait too long. Answered as 503 with Retry-After at once.

    `retry_after_s` is the estimated wait of a request that would join the queue now.
    """

    def __init__(self, message: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)  # both, so that it can be unpickled
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class Unavailable(Exception):  # noqa: N818 - it is a state of the gang, not a mistake
    """The gang is lost or shutting down. Answered as 503; trying again after `retry_after_s` may help."""

    def __init__(self, reason: str, retry_after_s: float = 5.0) -> None:
        super().__init__(reason, retry_after_s)  # both, so that it can be unpickled
        self.reason, self.retry_after_s = reason, retry_after_s

    def __str__(self) -> str:
        return self.reason


class LoadError(RuntimeError):
    """A shard could not load. `kind` is "failed" for an error of its own, else what was wrong with its peers."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message, kind)  # both, so that it can be unpickled
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class EngineClient(Protocol):
    """What the REST layer needs from a gang."""

    def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        """Stream one output per step that gave the request tokens; closing the iterator aborts the request.

        A last output with finish_reason "abort" says that the gang ended before the request did, "error" that the
        request itself cannot go on.

        Raises:
            Overloaded: before the first output, when the queue is full.
            Unavailable: before the first output, when the gang is lost or shutting down.
            ValueError: the request cannot be served as it is (prompt too long, token id outside the vocabulary).
        """
        ...

    def full(self) -> Overloaded | None:
        """Why even a short request would be refused now; None when it would not. Costs next to nothing."""
        ...

    async def status(self) -> GangStatus:
        """The gang's health and load now; never waits longer than a second."""
        ...

    async def metrics(self) -> list[bytes]:
        """One serialised registry sample per rank (see `cluster.observability.metrics`), for the sum over ranks."""
        ...
