"""The steps of one rank, in lockstep with its gang: begins them, reads their results when due, sleeps and wakes."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.batch import StepInput
from cluster.device.timing import Spans
from cluster.engine.lockstep import Lockstep, StepInFlight
from cluster.engine.schedule import Schedule
from cluster.observability.metrics import EngineMetrics, StepStats
from cluster.request import Request, SequenceOutput
from cluster.status import EngineStatus, RankInfo


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one call of `step`: outputs of requests, and statistics of the step whose results were read."""

    outputs: tuple[SequenceOutput, ...]
    stats: StepStats


class StepLoop:
    """A rank of a gang. By itself it is a follower, which runs the steps of the leader of its attention group; a leader
    is an `Engine`, which has a step loop. One thread owns it; any thread may use `ring`, `close`, `position`,
    `progress`, `prepare_grammars` and `read_grammar`.
    """

    has_work = False
    """A follower never has work of its own."""

    def __init__(self, lockstep: Lockstep, metrics: EngineMetrics, info: RankInfo, forwards: Spans) -> None:
        """`forwards` collects the spans of model forwards; each step takes those that it added."""
        self.lockstep, self.metrics, self._info, self._forwards = lockstep, metrics, info, forwards
        self.quiet = True
        """Whether no rank had requests in the last step."""
        self.steps = self.padded_rows = 0
        self.own_seconds = 0.0
        self._rung = threading.Event()
        self._slept_at = -1  # the step of the last sleep; the next sleep deletes the key of its ring
        self.flights: deque[StepInFlight] = deque()
        """Steps whose results are not read yet, the oldest first."""
        self._read_at = 0.0

    @property
    def left(self) -> bool:
        """Whether the gang has ended by agreement, in a step that all ranks took part in."""
        return self.lockstep.left

    @property
    def position(self) -> tuple[int, str]:
        """The current step and phase of this rank."""
        return self.lockstep.mesh.position

    @property
    def progress(self) -> tuple[int, bool]:
        """`ProgressClock.marks`, and whether this rank is in a collective or waits for its device."""
        clock = self.lockstep.mesh.world.clock
        return clock.marks, clock.waits

    def begin(self, order: StepInput, schedule: Schedule, requests: int) -> StepInFlight:
        """Begin the next step of the gang; `order` and `requests` as in `Lockstep.run`."""
        flight = self.lockstep.run(order, requests, schedule.num_steps, schedule.decode_us)
        flight.schedule, flight.forwards, self.quiet = schedule, self._forwards.split(), flight.plan.quiet
        self.steps += 1
        self.padded_rows += self.idle_rows(flight)
        if flight.output is not None:
            self.flights.append(flight)
        return flight

    def due(self, last: StepInFlight) -> StepInFlight | None:
        """If the results of a step are due after `last` has begun, wait for them and return that step; else None.

        At most `Lockstep.lag` steps stay in flight. If `last` ran nothing, none stays: the device has no work that
        could overlap.
        """
        if len(self.flights) <= (0 if last.output is None else self.lockstep.lag):
            return None
        due = self.flights.popleft()
        self.lockstep.read(due)
        before, self._read_at = self._read_at, time.perf_counter()
        due.took, due.waited = self._read_at - max(due.began, before), due.waits.take()
        due.own = max(0.0, due.took - due.waited)  # 0: the wait to agree may be before `took` begins
        self.own_seconds += due.own
        return due

    def idle_rows(self, flight: StepInFlight) -> int:
        """The padding rows of a step's target phase on this rank."""
        return flight.plan.idle(self.lockstep.mesh.dp_rank).rows(flight.shape.num_draft_tokens)

    def leave(self) -> None:
        """Make the next step end the gang on every rank."""
        self.lockstep.leaving = True

    def sleep(self) -> None:
        """Block, without using the CPU, until a rank rings. A ring since the last step counts, so no ring is missed."""
        mesh, step = self.lockstep.mesh, self.lockstep.coordinator.step
        if mesh.world.size == 1:
            self._rung.wait()
            self._rung.clear()
        else:
            mesh.sleep(step)
            mesh.forget(self._slept_at)
            self._slept_at = step

    def ring(self) -> None:
        """Wake all sleeping ranks of the gang."""
        mesh = self.lockstep.mesh
        if mesh.world.size == 1:
            self._rung.set()
        else:
            mesh.ring(self.lockstep.coordinator.step)

    def prepare_grammars(self) -> None:
        """Load what the first request with a grammar would otherwise wait for.

        Raises:
            ConfigError: no grammar can be matched over this model's tokens.
        """
        self.lockstep.grammars.prepare()

    def read_grammar(self, grammar: str) -> None:
        """Compile a grammar before its request is admitted, because compiling takes long.

        Raises:
            GrammarError: the text is not a compiled grammar for this model.
        """
        self.lockstep.grammars.read(grammar)

    def close(self, reason: str = "") -> None:
        """Leave the gang at once. The steps of the peers then raise, and the peers can read `reason`."""
        self.lockstep.mesh.close(reason, self.lockstep.programs.drop)

    def info(self) -> RankInfo:
        """The resolved settings of this rank, with all that was chosen automatically."""
        return self._info

    # What follows is a follower's part; an `Engine` has its own.

    def step(self) -> StepResult:
        """Run the leader's step on this rank's shards."""
        lockstep = self.lockstep
        # The plan ignores the votes of followers.
        step = self.due(self.begin(StepInput(), Schedule(num_steps=len(lockstep.shapes) - 1), 0))
        stats = StepStats(rank=lockstep.mesh.rank)
        if step is not None and step.output is not None:
            stats = StepStats(
                phase_seconds=step.seconds | step.output.phases.seconds(),
                waited_seconds=step.waited,
                own_seconds=step.own,
                padded_rows=self.idle_rows(step),
                rank=lockstep.mesh.rank,
            )
        self.metrics.observe_step(stats)
        return StepResult((), stats)

    def status(self) -> EngineStatus:
        """The current progress. Only a leader reports its load."""
        return EngineStatus(self.steps, padded_rows=self.padded_rows, own_seconds=self.own_seconds)

    def submit(self, request: Request) -> None:
        """Raise: requests go to leaders.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"request {request.request_id!r} was sent to a follower; send it to the leader of its group")

    def abort(self, request_id: str) -> None:
        """Do nothing: a follower has no requests."""

    def on_begun(self, call: Callable[[tuple[str, ...]], None]) -> None:
        """Do nothing: a follower admits no requests."""
