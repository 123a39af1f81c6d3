"""One rank of a gang, as its step loop uses it: the base of leaders and followers, and the follower of a group."""

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
    """The results of one call of `step`: outputs of requests, and statistics of the step whose results were read."""

    outputs: tuple[SequenceOutput, ...]
    stats: StepStats


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose results are not read yet. `seconds` are the times of the host's phases (schedule, agree); `began` is
    when the host began to schedule it; `forwards` are the spans of its model forwards.
    """

    schedule: Schedule
    ran: GangStep
    began: float
    seconds: dict[str, float] = field(default_factory=dict)
    forwards: Spans = field(default_factory=Spans)


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose results were read. `took` are the seconds until then, from the later of two moments: this step
    began, or the step before was read. This rank spent `waited` seconds in collectives, and `own` outside collectives.
    """

    flight: StepInFlight
    given: StepDecisions
    took: float
    own: float
    waited: float


class Rank:
    """A rank of a gang. One thread owns it; any thread may use `ring`, `close`, `position` and `progress`."""

    def __init__(self, lockstep: Lockstep, metrics: EngineMetrics, info: RankInfo) -> None:
        self.metrics = metrics
        self._lockstep, self._info = lockstep, info
        self._rung = threading.Event()
        self._quiet = True
        self._slept_at = -1  # the step of the last sleep; the next sleep deletes the key of its ring
        self._steps = self._padded_rows = 0
        self._own_seconds = 0.0
        self._begun: Callable[[tuple[str, ...]], None] = _unheard
        self._flights: deque[StepInFlight] = deque()
        self._read_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether this rank has work. A follower never has work of its own."""
        return False

    @property
    def quiet(self) -> bool:
        """Whether no rank had requests in the last step (a rank alone ignores this), and this rank has no work."""
        return (self._quiet or self._lockstep.mesh.world.size == 1) and not self.has_work

    @property
    def left(self) -> bool:
        """Whether the gang has ended by agreement, in a step that all ranks took part in."""
        return self._lockstep.left

    @property
    def position(self) -> tuple[int, str]:
        """The current step and phase of this rank."""
        return self._lockstep.mesh.position

    @property
    def progress(self) -> tuple[int, bool]:
        """`ProgressClock.marks`, and whether this rank is in a collective or waits for its device."""
        clock = self._lockstep.mesh.world.clock
        return clock.marks, clock.waits

    def on_begun(self, call: Callable[[tuple[str, ...]], None]) -> None:
        """Have `call` called with the ids of the requests that a step admits, before that step runs."""
        self._begun = call

    def leave(self) -> None:
        """Make the next step end the gang on every rank."""
        self._lockstep.leave()

    def sleep(self) -> None:
        """Block, without using the CPU, until a rank rings. A ring since the last step counts, so no ring is missed."""
        mesh, step = self._lockstep.mesh, self._lockstep.coordinator.step
        if mesh.world.size == 1:
            self._rung.wait()
            self._rung.clear()
        else:
            mesh.sleep(step)
            mesh.forget(self._slept_at)
            self._slept_at = step

    def ring(self) -> None:
        """Wake all sleeping ranks of the gang."""
        mesh = self._lockstep.mesh
        if mesh.world.size == 1:
            self._rung.set()
        else:
            mesh.ring(self._lockstep.coordinator.step)

    def prepare_grammars(self) -> None:
        """Load what the first request with a grammar would otherwise wait for. Any thread may call this.

        Raises:
            ConfigError: no grammar can be matched over this model's tokens.
        """
        self._lockstep.grammars.prepare()

    def read_grammar(self, grammar: str) -> None:
        """Compile a grammar before its request is admitted, because compiling takes long. Any thread may call this.

        Raises:
            GrammarError: the text is not a compiled grammar for this model.
        """
        self._lockstep.grammars.read(grammar)

    def close(self, reason: str = "") -> None:
        """Leave the gang at once. The steps of the peers then raise, and the peers can read `reason`."""
        self._lockstep.mesh.close(reason, self._lockstep.programs.drop)

    def info(self) -> RankInfo:
        """The resolved settings of this rank, with all that was chosen automatically."""
        return self._info

    def _begin(self, flight: StepInFlight) -> ReadStep | None:
        """Note a step that has begun. If the results of a step are due now, wait for them and return that step;
        otherwise return None.

        At most `Lockstep.lag` steps stay in flight. If this step ran nothing, none stays: the device has no work that
        could overlap.
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
        """Wait for the results of a step, and compute its times."""
        given = self._lockstep.read(flight.ran)
        before, self._read_at = self._read_at, time.perf_counter()
        took = self._read_at - max(flight.began, before)
        waited = flight.ran.waits.take()
        own = max(0.0, took - waited)  # 0: the wait to agree may be before `took` begins, during the step before
        self._own_seconds += own
        return ReadStep(flight, given, took, own, waited)

    def _idle_rows(self, ran: GangStep) -> int:
        """The padding rows of the target phase on this rank."""
        group, plan = self._lockstep.mesh.dp_rank, ran.plan
        return plan.idle(group).rows(ran.shape.num_draft_tokens)


def _unheard(ids: tuple[str, ...]) -> None:
    """The default of `on_begun`: do nothing."""


class Follower(Rank):
    """A rank that receives its step inputs from the leader of its attention group, over the process group."""

    def submit(self, request: Request) -> None:
        """Raise: requests go to leaders.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"request {request.request_id!r} was sent to a follower; send it to the leader of its group")

    def abort(self, request_id: str) -> None:
        """Do nothing: a follower has no requests."""

    def step(self) -> StepResult:
        """Run the leader's step on this rank's shards."""
        lockstep, began = self._lockstep, time.perf_counter()
        ran = lockstep.run(StepInput(), 0, len(lockstep.shapes) - 1)  # the plan ignores votes of followers
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
        """The current progress. Only a leader reports its load."""
        return EngineStatus(self._steps, padded_rows=self._padded_rows, own_seconds=self._own_seconds)
