"""Runs the steps of one rank in lockstep with its gang (the ranks of one replica): begins each step, and reads its
results when they are due. Between requests the rank sleeps.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.batch import StepInput
from cluster.device.timing import Spans
from cluster.engine.lockstep import Lockstep, StepInFlight
from cluster.engine.schedule import Schedule
from cluster.observability.metrics import EngineMetrics
from cluster.observability.step_stats import StepStats
from cluster.request import Request, SequenceOutput
from cluster.status import EngineStatus, RankInfo


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one call of `step`: outputs of requests, and statistics of the step whose results were read. If
    none were read, the statistics count nothing.
    """

    outputs: tuple[SequenceOutput, ...]
    stats: StepStats


class StepLoop:
    """A rank of a gang. A follower is a `StepLoop` alone, and runs the steps of the leader of its attention group. A
    leader is an `Engine`, which has a `StepLoop`. One thread runs the steps. Any thread may use `wake_ranks`, `close`,
    `position`, `progress`, `prepare_grammars` and `read_grammar`; only that thread may use anything else.
    """

    has_work = False
    """A follower never has work of its own."""

    def __init__(self, lockstep: Lockstep, metrics: EngineMetrics, info: RankInfo, forward_spans: Spans) -> None:
        """`forward_spans` collects the spans of model forwards; each step takes those that it added."""
        self.lockstep, self.metrics, self._info, self._forward_spans = lockstep, metrics, info, forward_spans
        self.is_idle = True
        """Whether no rank had requests in the last step."""
        self.steps = self.padded_rows = 0
        self.own_seconds = 0.0
        self._wake_event = threading.Event()
        self._slept_at = -1  # the step of the last sleep; the next sleep deletes the wake-up key of that step
        self.in_flight: deque[StepInFlight] = deque()
        """Steps whose results are not read yet, the oldest first."""
        self._last_read_at = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the gang has ended by agreement, in a step that all ranks took part in."""
        return self.lockstep.has_ended

    @property
    def position(self) -> tuple[int, str]:
        """The current step and phase of this rank."""
        return self.lockstep.mesh.position

    @property
    def progress(self) -> tuple[int, bool]:
        """`ProgressClock.progress_count`, and whether this rank is in a collective or waits for its device."""
        clock = self.lockstep.mesh.world.clock
        return clock.progress_count, clock.is_waiting

    def begin(self, step_input: StepInput, schedule: Schedule, requests: int) -> StepInFlight:
        """Begin the next step of the gang. `step_input` and `requests` are those of `Lockstep.run`."""
        step = self.lockstep.run(step_input, requests, schedule.vote, schedule.decode_us)
        step.schedule, step.forwards, self.is_idle = schedule, self._forward_spans.split(), step.plan.no_requests
        self.steps += 1
        self.padded_rows += self.idle_rows(step)
        if step.output is not None:
            self.in_flight.append(step)
        return step

    def read_due(self, last_begun: StepInFlight) -> StepInFlight | None:
        """If the results of a step are due after `last_begun` has begun, wait for them and return that step; else None.

        At most `Lockstep.max_in_flight` steps stay in flight. If `last_begun` ran nothing, none stays: the device has
        no work that could overlap.
        """
        if len(self.in_flight) <= (0 if last_begun.output is None else self.lockstep.max_in_flight):
            return None
        step = self.in_flight.popleft()
        self.lockstep.read(step)
        previous_read_at, self._last_read_at = self._last_read_at, time.perf_counter()
        step.elapsed_s, step.wait_s = (
            self._last_read_at - max(step.started_at, previous_read_at),
            step.wait_spans.take(),
        )
        # The collectives in `wait_s` may have begun before the time that `elapsed_s` measures.
        step.own_s = max(0.0, step.elapsed_s - step.wait_s)
        self.own_seconds += step.own_s
        return step

    def skip_time(self, seconds: float) -> None:
        """Do not count `seconds`, in which the caller did other things, as time of the steps in flight."""
        self._last_read_at += seconds

    def idle_rows(self, step: StepInFlight) -> int:
        """The number of padding rows in a step's target phase on this rank."""
        return step.plan.idle(self.lockstep.mesh.dp_rank).rows(step.shape.num_draft_tokens)

    def leave(self) -> None:
        """Make the next step end the gang on every rank."""
        self.lockstep.end_requested = True

    def sleep(self) -> None:
        """Block, without using the CPU, until a rank calls `wake_ranks`. If a rank has called
        `wake_ranks` since the ranks agreed on the last step, return at once, so that no call is missed.
        """
        mesh, step = self.lockstep.mesh, self.lockstep.coordinator.step
        if mesh.world.size == 1:
            self._wake_event.wait()
            self._wake_event.clear()
        else:
            mesh.sleep(step)
            mesh.delete_wake_key(self._slept_at)
            self._slept_at = step

    def wake_ranks(self) -> None:
        """Wake all sleeping ranks of the gang."""
        mesh = self.lockstep.mesh
        if mesh.world.size == 1:
            self._wake_event.set()
        else:
            mesh.wake_ranks(self.lockstep.coordinator.step)

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
        self.lockstep.grammars.preload(grammar)

    def close(self, reason: str = "") -> None:
        """Leave the gang at once. The steps of the peers then raise, and the peers can read `reason`."""
        self.lockstep.mesh.close(reason, self.lockstep.programs.remove_all)

    def info(self) -> RankInfo:
        """The resolved settings of this rank, with all that was chosen automatically."""
        return self._info

    # The methods below are those of a follower; an `Engine` has methods of its own in their place.

    def step(self) -> StepResult:
        """Run the step of the group's leader on this rank's shards. The result has no outputs."""
        lockstep = self.lockstep
        # The plan ignores the votes of followers.
        step = self.read_due(self.begin(StepInput(), Schedule(vote=lockstep.any_tier), 0))
        stats = StepStats(rank=lockstep.mesh.rank)
        if step is not None and step.output is not None:
            stats = StepStats(
                phase_seconds=step.seconds | step.output.phases.seconds(),
                waited_seconds=step.wait_s,
                own_seconds=step.own_s,
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

    def on_admitted(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        """Do nothing: a follower admits no requests."""
