"""The loop of one rank's engine: one thread owns the engine; all other threads leave commands in the loop's inbox.

This module uses neither Ray nor tensors. All ranks of a gang (the ranks of one replica) run each step together,
including ranks without work. When no rank has work, all ranks sleep. When a request is submitted to one rank, all ranks
wake.
"""

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.actors.messages import Commands, Failure, FailureKind, Heartbeat, StepItem
from cluster.distributed.cpu_progress import ProgressTracker, ThreadCpuTime
from cluster.request import Request, SequenceOutput
from cluster.status import EngineStatus, RankInfo

logger = logging.getLogger(__name__)

STEP_THREADS = "aerie-step"  # the name of the thread that steps, and of the threads that it starts
CONFIRMATION_TIMEOUT_S = 1.0  # how long a step waits at most until the replica confirms the report of a suspect
# Failure kinds of the engine's errors. The classes are given by name: their module imports torch, which replicas must
# not load.
FAILURE_KINDS: dict[str, FailureKind] = {"PeerLostError": "lost", "OutOfStepError": "out_of_step"}


class MetricsRegistry(Protocol):
    """A metrics registry that can be serialised, from any thread."""

    def serialize(self) -> bytes:
        """Return the present values of all metrics as JSON; see `cluster.observability.metrics`."""
        ...


class StepOutputs(Protocol):
    """The part of a step's result that the loop reads."""

    @property
    def outputs(self) -> Sequence[SequenceOutput]:
        """The outputs of the step's requests."""
        ...


class StepEngine(Protocol):
    """The part of `cluster.engine.Engine` that the loop uses. Only members marked "Any thread" are thread-safe."""

    @property
    def metrics(self) -> MetricsRegistry:
        """The rank's metrics."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether this rank itself has work."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no rank of the gang had work in the last step, and this rank has got no work since then."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the last step was the gang's last one, because a rank had called `leave` before it."""
        ...

    @property
    def position(self) -> tuple[int, str]:
        """The present (step, phase) of this rank. Any thread."""
        ...

    @property
    def progress(self) -> tuple[int, bool]:
        """A pair: a number that grows while a step makes progress, and True if this rank is in a collective or waits
        for its device. Any thread.
        """
        ...

    def on_admitted(self, call: Callable[[tuple[str, ...]], None]) -> None:
        """Register `call`, which is called before each step that admits requests, with their ids."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError if the request can never be served."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request: it gets no more outputs. Unknown ids are ignored."""
        ...

    def step(self) -> StepOutputs:
        """Run one step together with the other ranks. If a peer is gone or out of step, raise an error that names the
        peer's rank, the step and the phase.
        """
        ...

    def sleep(self) -> None:
        """Wait without using the CPU until a rank calls `wake_ranks`; return at once if a rank has done so since the
        last step. Call this only when `is_idle`.
        """
        ...

    def wake_ranks(self) -> None:
        """Wake every rank that sleeps. Any thread."""
        ...

    def leave(self) -> None:
        """Make the next step the last one of every rank of the gang."""
        ...

    def prepare_grammars(self) -> None:
        """Do in advance the work that the first request with a grammar would wait for. Raises `ConfigError` if grammars
        cannot be matched over the model's tokens. Any thread.
        """
        ...

    def read_grammar(self, grammar: str) -> None:
        """Do in advance the slow work of admitting a request with this compiled grammar. Raises ValueError if the
        grammar cannot be used with this model. Any thread.
        """
        ...

    def close(self, reason: str = "") -> None:
        """Disconnect this rank. The steps of the other ranks then raise an error that has `reason`. Any thread."""
        ...

    def status(self) -> EngineStatus:
        """Return the counters after the last step."""
        ...

    def info(self) -> RankInfo:
        """Return the settings and hardware of the rank."""
        ...


class EngineLoop:
    """Runs an engine in a thread of its own, and tracks its progress.

    A step that raises ends the loop for good and disconnects the engine, so that the other ranks end as well; `failure`
    says why. Requests get no error here: the router resubmits them to the next incarnation, or ends their streams.
    """

    def __init__(self, engine: StepEngine, rank: int = 0, world: int = 1) -> None:
        self.engine = engine
        self.rank = rank
        self.world = world
        self.failure: Failure | None = None
        self._wake = threading.Lock()
        self._inbox: deque[Commands] = deque()
        self._outbox: deque[StepItem] = deque()
        self._outbox_changed = threading.Condition()
        self._confirmed = threading.Condition()
        # Ids of suspects (see `Commands`) that the replica has not confirmed.
        self._unconfirmed_suspects: set[str] = set()
        self._ended = threading.Event()
        self._asleep = self._was_woken = False
        self._busy = False
        self._stopping = False
        self._steps = self._iterations = 0
        self._cpu_time = ThreadCpuTime(STEP_THREADS)
        self._progress = ProgressTracker(self._cpu_time)
        engine.on_admitted(self._report_admitted)
        self._status = engine.status()
        self._thread = threading.Thread(target=self._run, name=f"engine-loop-{rank}", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the loops of all ranks after a step. Return whether this rank's loop ended within `timeout_s`."""
        with self._wake:
            self._stopping = True
            must_wake = self._needs_wake()
        if must_wake:
            self.engine.wake_ranks()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether the loop has ended; items may still lie in the outbox."""
        return self._ended.is_set()

    def wait(self) -> Failure | None:
        """Block until the loop has ended. Return the failure that ended the loop, or None if the loop was stopped."""
        self._ended.wait()
        return self.failure

    def put(self, commands: Commands) -> None:
        """Leave commands for the next step. If they submit requests, wake the sleeping ranks. If the loop has ended,
        the commands have no effect.
        """
        with self._confirmed:
            self._unconfirmed_suspects.update(commands.suspects)
            self._unconfirmed_suspects.difference_update(commands.confirmed, commands.aborts)
            self._confirmed.notify_all()
        with self._wake:
            self._inbox.append(commands)
            if commands.submits and not self._busy:  # time asleep must not count as time without progress
                self._busy = True
                self._progress.note_progress()
            must_wake = bool(commands.submits) and self._needs_wake()
        if must_wake:
            self.engine.wake_ranks()

    def drain(self, timeout_s: float | None = None) -> list[StepItem]:
        """Return the items since the last call. If there are none, wait for one, for at most `timeout_s` seconds (None:
        without limit).

        An empty list means that the wait timed out or that the loop has ended.
        """
        with self._outbox_changed:
            if not self._outbox and not self.has_ended:
                self._outbox_changed.wait_for(lambda: bool(self._outbox) or self.has_ended, timeout_s)
            items = list(self._outbox)
            self._outbox.clear()
        return items

    def heartbeat(self) -> Heartbeat:
        """Return the present heartbeat; never wait for a step. Progress is detected only during this call, so call it
        often.
        """
        position, (progress_count, is_waiting) = self.engine.position, self.engine.progress
        self._progress.update((self._iterations, position, progress_count), is_waiting)
        with self._wake:
            return Heartbeat(
                self.rank,
                self._steps,
                self._busy and not self.has_ended,
                self._progress.idle_s,
                *position,
                self._progress.since_mark_s,
                is_waiting,
                self._status,
            )

    def _needs_wake(self) -> bool:
        """Return whether the caller must call `wake_ranks`: True at the first call while the loop sleeps, False
        otherwise. The caller must hold the lock `_wake`.
        """
        must_wake = self._asleep and not self._was_woken
        self._was_woken |= must_wake
        return must_wake

    def _run(self) -> None:
        try:
            self._cpu_time.use_current_thread()
            while not self.engine.has_ended:
                self._run_iteration()
        except Exception as error:
            logger.exception("rank %d: the loop failed after %d steps", self.rank, self._steps)
            self._fail(error)
        finally:
            with self._outbox_changed:
                self._ended.set()
                self._outbox_changed.notify_all()

    def _run_iteration(self) -> None:
        """Run one iteration: sleep while no rank has work, pass the commands in the inbox to the engine, run a step."""
        self._record_status()
        if self.engine.is_idle:
            self._sleep()
        with self._wake:
            stopping = self._stopping
            batch = list(self._inbox)
            self._inbox.clear()
        refused = self._apply(batch)
        if stopping:
            self.engine.leave()
        outputs: tuple[SequenceOutput, ...] = ()
        if self.world > 1 or stopping or self.engine.has_work:  # in a gang every rank steps, with work or without
            outputs = tuple(self.engine.step().outputs)
            self._steps += 1
        self._publish(outputs, refused)

    def _record_status(self) -> None:
        """Count an iteration of the loop, which is progress, and store the engine's status."""
        status = self.engine.status()
        with self._wake:
            self._status = status
            self._iterations += 1

    def _sleep(self) -> None:
        """Sleep until a rank calls `wake_ranks`. All ranks come here after a step in which no rank had work. If this
        rank has got requests since then, or must stop, it calls `wake_ranks` before it sleeps, so that all ranks wake
        at once.
        """
        # `put` sees `_asleep` and wakes the ranks, or this block sees its commands: no wake-up is lost.
        with self._wake:
            self._asleep = True
            self._busy = self._was_woken = self._stopping or any(commands.submits for commands in self._inbox)
            must_wake = self._was_woken
        if must_wake:
            self.engine.wake_ranks()
        self.engine.sleep()
        with self._wake:
            self._asleep = False
            if not self._busy:
                self._busy = True
                self._progress.note_progress()

    def _apply(self, batch: list[Commands]) -> tuple[tuple[str, str], ...]:
        """Pass commands to the engine; return the refused requests as (request id, message)."""
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
            self._put_item(StepItem(self.rank, self._steps, outputs, refused))

    def _report_admitted(self, ids: tuple[str, ...]) -> None:
        """Report to the replica the requests `ids`, which the next step admits. If this step kills the process, these
        requests are the suspects.

        If the process dies at once, the report may be lost. So if a request is already a suspect
        (`Commands.suspects`), wait for at most `CONFIRMATION_TIMEOUT_S` until the replica confirms the report.
        """
        self._put_item(StepItem(self.rank, self._steps, admitted=ids))
        with self._confirmed:
            self._confirmed.wait_for(lambda: self._unconfirmed_suspects.isdisjoint(ids), CONFIRMATION_TIMEOUT_S)
            self._unconfirmed_suspects.difference_update(ids)

    def _put_item(self, item: StepItem) -> None:
        with self._outbox_changed:
            self._outbox.append(item)
            self._outbox_changed.notify()

    def _fail(self, error: Exception) -> None:
        """Set `failure`, and disconnect the engine from the other ranks, which get the reason."""
        self.failure = failure_of(error, self.rank, self.engine.position)
        try:
            self.engine.close(self.failure.reason)
        except Exception:
            logger.exception("rank %d: could not disconnect the engine", self.rank)


def failure_kind_of(error: BaseException) -> FailureKind:
    """Return the kind of an error: a lost peer, ranks out of step, or a failure of this rank itself."""
    return next(
        (FAILURE_KINDS[base.__name__] for base in type(error).__mro__ if base.__name__ in FAILURE_KINDS), "failed"
    )


def failure_of(error: Exception, reported_by: int, position: tuple[int, str]) -> Failure:
    """Return the `Failure` for an error on rank `reported_by`. If the error does not name a step and a phase, use those
    of `position`.
    """
    kind = failure_kind_of(error)
    step, phase = position
    if kind != "failed":
        step, phase = getattr(error, "step", step), getattr(error, "phase", phase)
        return Failure(reported_by, kind, getattr(error, "rank", None), step, phase, str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {error} ({frame.name}, line {frame.lineno})"
    return Failure(reported_by, kind, reported_by, step, phase, reason)
