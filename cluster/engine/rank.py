"""One rank of a gang as its loop uses it: what leaders and followers of attention groups share, and the follower."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.batch import Order
from cluster.engine.lockstep import GangStep, Lockstep
from cluster.metrics import EngineMetrics, StepStats
from cluster.request import Request, RequestOutput
from cluster.status import EngineStatus, RankInfo


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: outputs of the requests that got tokens, and the step in numbers."""

    outputs: tuple[RequestOutput, ...]
    stats: StepStats


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

    def close(self, reason: str = "") -> None:
        """Leave the gang at once; peers read `reason` and their steps raise."""
        self._lockstep.mesh.close(reason)

    def info(self) -> RankInfo:
        """The resolved settings, JSON-ready, with what was chosen automatically."""
        return self._info

    def _ran(self, ran: GangStep, seconds: float) -> float:
        """Note a step that took `seconds`; returns how many of them were this rank's own."""
        own = seconds - ran.waited
        self._quiet = ran.plan.quiet
        self._steps += 1
        self._own_seconds += own
        self._padded_rows += self._idle_rows(ran)
        return own

    def _idle_rows(self, ran: GangStep) -> int:
        """Rows of the target phase that this rank computed only to fill the plan."""
        group, plan = self._lockstep.mesh.dp_rank, ran.plan
        requests, rows = plan.idle(group)
        return requests * ran.shape.num_draft_tokens + rows


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
        lockstep, started = self._lockstep, time.perf_counter()
        ran = lockstep.run(Order(), 0, len(lockstep.shapes) - 1)
        own = self._ran(ran, time.perf_counter() - started)
        seconds = {"agree": ran.agreed, **(ran.output.seconds if ran.output else {})}
        stats = StepStats(
            phase_seconds=seconds,
            waited_seconds=ran.waited,
            own_seconds=own,
            padded_rows=self._idle_rows(ran),
            rank=lockstep.mesh.rank,
        )
        self.metrics.observe_step(stats)
        return StepResult((), stats)

    def status(self) -> EngineStatus:
        """Progress now; load is the leader's."""
        return EngineStatus(self._steps, padded_rows=self._padded_rows, own_seconds=self._own_seconds)
