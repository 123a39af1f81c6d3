"""One rank of a gang as its loop uses it: what leaders and followers of attention groups share, and the follower."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.batch import StepInput
from cluster.device.timing import Spans
from cluster.engine.lockstep import GangStep, Lockstep
from cluster.engine.scheduler import Schedule
from cluster.observability.metrics import EngineMetrics, StepStats
from cluster.request import Request, SequenceOutput
from cluster.spec.result import StepDecisions
from cluster.status import EngineStatus, RankInfo


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one call of `step` read: outputs of the requests that got tokens, and the step that gave them in numbers."""

    outputs: tuple[SequenceOutput, ...]
    stats: StepStats


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step under way: begun, its results not read yet. `seconds` are those of the host's phases before it began,
    `began` when the host turned to it; `forwards` are the spans of its model forwards.
    """

    schedule: Schedule
    ran: GangStep
    began: float
    seconds: dict[str, float] = field(default_factory=dict)
    forwards: Spans = field(default_factory=Spans)


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose results were read, after `took` seconds during which no step before it was under way; `own` of them
    this rank spent outside collectives, `waited` inside.
    """

    flight: StepInFlight
    given: StepDecisions
    took: float
    own: float
    waited: float


class Rank:
    """A rank of a gang. One thread owns it; `ring`, `close`, `position` and `progress` may be used by any thread."""

    def __init__(self, lockstep: Lockstep, metrics: EngineMetrics, info: RankInfo) -> None:
        self.metrics = metrics
        self._lockstep, self._info = lockstep, info
        self._rung = threading.Event()
        self._quiet = True
        self._slept_at = -1
        self._steps = self._padded_rows = 0
        self._own_seconds = 0.0
        self._begun: Callable[[tuple[str, ...]], None] = _unheard
        self._flights: deque[StepInFlight] = deque()
        self._read_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether this rank itself has something to do."""
        return False

    @property
    def quiet(self) -> bool:
        """Whether no rank of the gang had work in the last step and this one has none now; alone, just the latter."""
        return (self._quiet or self._lockstep.mesh.world.size == 1) and not self.has_work

    @property
    def left(self) -> bool:
        """Whether the gang has ended by agreement."""
        return self._lockstep.left

    @property
    def position(self) -> tuple[int, str]:
        """The step and phase in which this rank is now."""
        return self._lockstep.mesh.position

    @property
    def progress(self) -> tuple[int, bool]:
        """A number that grows with each collective entered or left and each part of a layer reached, and whether this
        rank is in a collective now.
        """
        clock = self._lockstep.mesh.world.clock
        return clock.marks, clock.waits

    def on_begun(self, call: Callable[[tuple[str, ...]], None]) -> None:
        """Have `call` called before each step runs, with the ids of the requests that it admits."""
        self._begun = call

    def leave(self) -> None:
        """Have the next step end the gang on every rank."""
        self._lockstep.leave()

    def sleep(self) -> None:
        """Wait, without using the CPU, until a rank rings; a ring since the last step counts."""
        mesh, step = self._lockstep.mesh, self._lockstep.coordinator.step
        if mesh.world.size == 1:
            self._rung.wait()
            self._rung.clear()
        else:
            mesh.sleep(step)
            mesh.forget(self._slept_at)
            self._slept_at = step

    def ring(self) -> None:
        """Wake every rank of the gang that sleeps."""
        mesh = self._lockstep.mesh
        if mesh.world.size == 1:
            self._rung.set()
        else:
            mesh.ring(self._lockstep.coordinator.step)

    def prepare_grammars(self) -> None:
        """Do beforehand, from any thread, what the first request with a grammar would wait for.

        Raises:
            ConfigError: no grammar can be matched over this model's tokens.
        """
        self._lockstep.grammars.prepare()

    def read_grammar(self, grammar: str) -> None:
        """Do beforehand, from any thread, what takes long when a request with this compiled grammar is admitted.

        Raises:
            GrammarError: it is no compiled grammar for this model.
        """
        self._lockstep.grammars.read(grammar)

    def close(self, reason: str = "") -> None:
        """Leave the gang at once; peers read `reason` and their steps raise."""
        self._lockstep.mesh.close(reason, self._lockstep.programs.drop)

    def info(self) -> RankInfo:
        """The resolved settings, JSON-ready, with what was chosen automatically."""
        return self._info

    def _begin(self, flight: StepInFlight) -> ReadStep | None:
        """Note a step that has begun; returns the one whose results are due now, if any, after waiting for them.

        If nothing was run, the device is to be waited for rather than kept busy.
        """
        self._quiet = flight.ran.plan.quiet
        self._steps += 1
        self._padded_rows += self._idle_rows(flight.ran)
        if flight.ran.output is not None:
            self._flights.append(flight)
        if len(self._flights) > (0 if flight.ran.output is None else self._lockstep.lag):
            return self._land(self._flights.popleft())
        return None

    def _land(self, flight: StepInFlight) -> ReadStep:
        given = self._lockstep.read(flight.ran)
        before, self._read_at = self._read_at, time.perf_counter()
        took = self._read_at - max(flight.began, before)
        waited = flight.ran.waits.take()
        own = max(0.0, took - waited)  # it may have waited to agree on this step while the one before was under way
        self._own_seconds += own
        return ReadStep(flight, given, took, own, waited)

    def _idle_rows(self, ran: GangStep) -> int:
        """Rows of the target phase that this rank computed only to fill the plan."""
        group, plan = self._lockstep.mesh.dp_rank, ran.plan
        return plan.idle(group).rows(ran.shape.num_draft_tokens)


def _unheard(ids: tuple[str, ...]) -> None:
    """The default of `on_begun`."""


class Follower(Rank):
    """A rank that gets its batches from the leader of its attention group, over the process group."""

    def submit(self, request: Request) -> None:
        """Refuse: requests go to leaders.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"request {request.request_id!r} was sent to a follower; send it to the leader of its group")

    def abort(self, request_id: str) -> None:
        """Do nothing: a follower has no requests."""

    def step(self) -> StepResult:
        """Run the leader's batch on this rank's shards."""
        lockstep, began = self._lockstep, time.perf_counter()
        ran = lockstep.run(StepInput(), 0, len(lockstep.shapes) - 1)
        landed = self._begin(StepInFlight(Schedule(), ran, began, {"agree": ran.agreed}))
        stats = StepStats(rank=lockstep.mesh.rank)
        if landed is not None:
            stats = StepStats(
                phase_seconds=landed.flight.seconds | landed.given.seconds,
                waited_seconds=landed.waited,
                own_seconds=landed.own,
                padded_rows=self._idle_rows(landed.flight.ran),
                rank=lockstep.mesh.rank,
            )
        self.metrics.observe_step(stats)
        return StepResult((), stats)

    def status(self) -> EngineStatus:
        """Progress now; load is the leader's."""
        return EngineStatus(self._steps, padded_rows=self._padded_rows, own_seconds=self._own_seconds)
