"""The step loop of one rank: one thread owns the engine, all others leave commands in its inbox.

No Ray and no tensors here. The ranks of a gang step together, with work of their own or without; when none has any they
all sleep, and a submit to one of them wakes them all.
"""

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.actors.messages import Commands, Failure, FailureKind, Heartbeat, StepItem
from cluster.distributed.cpu_progress import Effort, Pulse
from cluster.request import Request, SequenceOutput
from cluster.status import EngineStatus, RankInfo

logger = logging.getLogger(__name__)

STEP_THREADS = "aerie-step"  # the name of the thread that steps, and of those that it starts
TOLD_S = 1.0  # how long a step waits for the replica to say that it knows of a doubted request's beginning
# Kinds of the engine's own errors, by class name: their module imports torch, and replicas import this one.
KINDS: dict[str, FailureKind] = {"PeerLostError": "lost", "OutOfStepError": "out_of_step"}


class Samples(Protocol):
    """Anything that serialises a metrics registry; usable from any thread."""

    def serialize(self) -> bytes:
        """One registry sample, see `cluster.observability.metrics`."""
        ...


class StepOutputs(Protocol):
    """What the loop reads of a step's result."""

    @property
    def outputs(self) -> Sequence[SequenceOutput]:
        """What the step gave each request."""
        ...


class StepEngine(Protocol):
    """What the loop needs of `cluster.engine.Engine`. Members not marked "Any thread" are for the loop thread only."""

    @property
    def metrics(self) -> Samples:
        """The rank's instruments."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether this rank has anything to do."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether no rank of the gang had work in the last step; for a single rank, not `has_work`."""
        ...

    @property
    def left(self) -> bool:
        """Whether the last step ended the gang, because some rank had called `leave`."""
        ...

    @property
    def position(self) -> tuple[int, str]:
        """(step, phase) where this rank is now. Any thread."""
        ...

    @property
    def progress(self) -> tuple[int, bool]:
        """(a number that grows as a step makes progress, whether this rank waits for its peers). Any thread."""
        ...

    def on_begun(self, call: Callable[[tuple[str, ...]], None]) -> None:
        """Have `call` called before each step runs, with the ids of the requests that it admits."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; ValueError if it can never be served."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown ids are fine."""
        ...

    def step(self) -> StepOutputs:
        """Run one step with the other ranks; raises, with rank, step and phase, if a peer is gone or out of step."""
        ...

    def sleep(self) -> None:
        """When quiet: wait without using the CPU until a rank rings. A ring just before the call counts."""
        ...

    def ring(self) -> None:
        """Wake every rank that sleeps. Any thread."""
        ...

    def leave(self) -> None:
        """Have the next step end the gang on every rank."""
        ...

    def prepare_grammars(self) -> None:
        """Do beforehand what the first request with a grammar would wait for; raises `ConfigError` where no grammar can
        be matched. Any thread.
        """
        ...

    def read_grammar(self, grammar: str) -> None:
        """Do beforehand what takes long when a request with this compiled grammar is admitted; raises ValueError for
        one that is of no use here. Any thread.
        """
        ...

    def close(self, reason: str = "") -> None:
        """Disconnect this rank, so that its peers' steps raise, and tell them why. Any thread."""
        ...

    def status(self) -> EngineStatus:
        """Counters after the last step."""
        ...

    def info(self) -> RankInfo:
        """What the rank runs with."""
        ...


class EngineLoop:
    """Runs an engine in its own thread and tracks its progress.

    A step that raises ends the loop for good and disconnects the engine, so that the other ranks end as well; `failure`
    says why. Requests get no error here: the owner of their streams resubmits them elsewhere or gives them up.
    """

    def __init__(self, engine: StepEngine, rank: int = 0, world: int = 1) -> None:
        self.engine = engine
        self.rank = rank
        self.world = world
        self.failure: Failure | None = None
        self._wake = threading.Lock()
        self._inbox: deque[Commands] = deque()
        self._outbox: deque[StepItem] = deque()
        self._filled = threading.Condition()
        self._told = threading.Condition()
        self._doubted: set[str] = set()  # ids whose beginning the replica has to know before the step that admits them
        self._over = threading.Event()
        self._asleep = self._rung = False
        self._busy = False
        self._stopping = False
        self._steps = self._turns = 0
        self._effort = Effort(STEP_THREADS)
        self._pulse = Pulse(self._effort)
        engine.on_begun(self._begin)
        self._status = engine.status()
        self._thread = threading.Thread(target=self._run, name=f"engine-loop-{rank}", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End this loop and those of all other ranks after a step; False when it did not end in time."""
        with self._wake:
            self._stopping = True
            ring = self._must_ring()
        if ring:
            self.engine.ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def over(self) -> bool:
        """Whether the loop has ended; items may still lie in the outbox."""
        return self._over.is_set()

    def wait(self) -> Failure | None:
        """Block until the loop has ended; returns the failure that ended it, None if it was stopped."""
        self._over.wait()
        return self.failure

    def put(self, commands: Commands) -> None:
        """Leave submits and aborts for the next step, and wake the gang for submits. A loop that is over drops them."""
        with self._told:
            self._doubted.update(commands.doubted)
            self._doubted.difference_update(commands.heard, commands.aborts)
            self._told.notify_all()
        with self._wake:
            self._inbox.append(commands)
            if commands.submits and not self._busy:  # from now on a sleeping rank has to make progress
                self._busy = True
                self._pulse.beat()
            ring = bool(commands.submits) and self._must_ring()
        if ring:
            self.engine.ring()

    def drain(self, timeout_s: float | None = None) -> list[StepItem]:
        """The items of all steps since the last call, waiting for one if there are none.

        An empty list means that the wait timed out or that the loop is over.
        """
        with self._filled:
            if not self._outbox and not self.over:
                self._filled.wait_for(lambda: bool(self._outbox) or self.over, timeout_s)
            items = list(self._outbox)
            self._outbox.clear()
        return items

    def heartbeat(self) -> Heartbeat:
        """The heartbeat now; never waits for a step. Only this call notices progress, so call it often."""
        position, (marks, waits) = self.engine.position, self.engine.progress
        self._pulse.look((self._turns, position, marks), waits)
        with self._wake:
            return Heartbeat(
                self.rank,
                self._steps,
                self._busy and not self.over,
                self._pulse.age_s,
                *position,
                self._pulse.unmarked_s,
                waits,
                self._status,
            )

    def _must_ring(self) -> bool:
        """Whether the caller, which holds `_wake`, has to ring because the loop sleeps; true once per sleep."""
        ring = self._asleep and not self._rung
        self._rung |= ring
        return ring

    def _run(self) -> None:
        try:
            self._effort.begin()
            while not self.engine.left:
                self._turn()
        except Exception as error:
            logger.exception("rank %d: the loop failed after %d steps", self.rank, self._steps)
            self._fail(error)
        finally:
            with self._filled:
                self._over.set()
                self._filled.notify_all()

    def _turn(self) -> None:
        """Sleep while no rank has work, pass the inbox to the engine, and step."""
        self._note()
        if self.engine.quiet:
            self._sleep()
        with self._wake:
            stopping = self._stopping
            batch = list(self._inbox)
            self._inbox.clear()
        refused = self._apply(batch)
        if stopping:
            self.engine.leave()
        outputs: tuple[SequenceOutput, ...] = ()
        if self.world > 1 or stopping or self.engine.has_work:
            outputs = tuple(self.engine.step().outputs)
            self._steps += 1
        self._publish(outputs, refused)

    def _note(self) -> None:
        """A turn of the loop is over: count it as progress, and note the engine's new counters."""
        status = self.engine.status()
        with self._wake:
            self._status = status
            self._turns += 1

    def _sleep(self) -> None:
        """Sleep until a rank rings. All ranks come here after a quiet step; one that has work by then rings first."""
        with self._wake:
            self._asleep = True
            self._busy = self._rung = self._stopping or any(commands.submits for commands in self._inbox)
            ring = self._rung
        if ring:
            self.engine.ring()
        self.engine.sleep()
        with self._wake:
            self._asleep = False
            if not self._busy:
                self._busy = True
                self._pulse.beat()

    def _apply(self, batch: list[Commands]) -> tuple[tuple[str, str], ...]:
        """Pass the inbox to the engine; returns the refused requests as (request id, message)."""
        refused = []
        for commands in batch:
            for request in commands.submits:
                try:
                    self.engine.submit(request)
                except ValueError as error:
                    refused.append((request.request_id, str(error)))
            for request_id in commands.aborts:
                self.engine.abort(request_id)
        return tuple(refused)

    def _publish(self, outputs: tuple[SequenceOutput, ...], refused: tuple[tuple[str, str], ...]) -> None:
        if outputs or refused:
            self._put_out(StepItem(self.rank, self._steps, outputs, refused))

    def _begin(self, ids: tuple[str, ...]) -> None:
        """Before a step runs, report the requests that it admits: if it kills the process, they are the suspects.

        A process that dies at once takes the report with it. So where one of them is in doubt already, the step waits
        until the replica has said that it knows.
        """
        self._put_out(StepItem(self.rank, self._steps, begun=ids))
        with self._told:
            self._told.wait_for(lambda: self._doubted.isdisjoint(ids), TOLD_S)
            self._doubted.difference_update(ids)

    def _put_out(self, item: StepItem) -> None:
        with self._filled:
            self._outbox.append(item)
            self._filled.notify()

    def _fail(self, error: Exception) -> None:
        """Note the failure, and disconnect from the peers, telling them why."""
        self.failure = failure_of(error, self.rank, self.engine.position)
        try:
            self.engine.close(self.failure.reason)
        except Exception:
            logger.exception("rank %d: could not disconnect the engine", self.rank)


def kind_of(error: BaseException) -> FailureKind:
    """What an error says about the gang: a lost peer, ranks out of step, or a fault of this rank's own."""
    return next((KINDS[base.__name__] for base in type(error).__mro__ if base.__name__ in KINDS), "failed")


def failure_of(error: Exception, by: int, position: tuple[int, str]) -> Failure:
    """The failure that an error of rank `by` means; its own `position` is used where the error names none."""
    kind = kind_of(error)
    step, phase = position
    if kind != "failed":
        step, phase = getattr(error, "step", step), getattr(error, "phase", phase)
        return Failure(by, kind, getattr(error, "rank", None), step, phase, str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return Failure(by, kind, by, step, phase, reason)
