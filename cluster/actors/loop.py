"""The step loop of one rank: one thread owns the engine, everyone else leaves notes in its inbox.

Knows no Ray and no tensors. An idle loop sleeps on a condition; a submit or an abort wakes it.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

from cluster.actors.messages import Commands, Heartbeat, StepItem
from cluster.request import Request, RequestOutput

logger = logging.getLogger(__name__)


class Samples(Protocol):
    """Anything that serialises a registry; any thread may ask."""

    def serialize(self) -> bytes:
        """One registry sample, see `cluster.metrics`."""
        ...


class StepOutputs(Protocol):
    """What the loop reads of a step's result."""

    @property
    def outputs(self) -> Sequence[RequestOutput]:
        """What the step gave each request."""
        ...


class StepEngine(Protocol):
    """What the loop needs of `cluster.engine.Engine`. Not thread-safe: the loop thread alone calls it."""

    @property
    def metrics(self) -> Samples:
        """The rank's instruments."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; ValueError if it can never be served."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown ids are fine."""
        ...

    def step(self) -> StepOutputs:
        """Run one step."""
        ...

    def status(self) -> Any:
        """Counters after the last step, a dataclass."""
        ...

    def info(self) -> dict[str, Any]:
        """The resolved config, JSON-ready."""
        ...


class EngineLoop:
    """Runs an engine in its own thread and keeps its pulse.

    A step that raises ends the loop for good: every request of the rank ends with finish_reason "error", later submits
    do so at once, and `heartbeat().failed` tells why. Whoever owns the gang decides what happens then.
    """

    def __init__(self, engine: StepEngine, rank: int = 0) -> None:
        self.engine = engine
        self.rank = rank
        self._wake = threading.Condition()
        self._inbox: deque[Commands] = deque()
        self._outbox: deque[StepItem] = deque()
        self._filled = threading.Condition()
        self._active: set[str] = set()  # requests that have not ended; the loop thread's own
        self._busy = False
        self._stopping = False
        self._failed = ""
        self._steps = 0
        self._progress = time.monotonic()
        self._status = _plain(engine.status())
        self._thread = threading.Thread(target=self._run, name=f"engine-loop-{rank}", daemon=True)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End after the step in progress; False when it did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        with self._filled:
            self._filled.notify_all()
        return not self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def put(self, commands: Commands) -> None:
        """Leave submits and aborts for the next step, and wake the loop."""
        with self._wake:
            self._inbox.append(commands)
            if not self._busy:  # the pulse of an idle rank starts to count now
                self._busy = True
                self._progress = time.monotonic()
            self._wake.notify()

    def drain(self, timeout_s: float | None = None) -> list[StepItem]:
        """The items of all steps since the last call, waiting for one if there are none.

        An empty list means that the wait timed out or that the loop is stopping.
        """
        with self._filled:
            if not self._outbox and not self._stopping:
                self._filled.wait_for(lambda: bool(self._outbox) or self._stopping, timeout_s)
            items = list(self._outbox)
            self._outbox.clear()
        return items

    def heartbeat(self) -> Heartbeat:
        """The pulse now; never waits for a step."""
        with self._wake:
            busy = self._busy and not self._failed
            age = time.monotonic() - self._progress if busy else 0.0
            return Heartbeat(self.rank, self._steps, busy, age, self._failed, self._status)

    def _run(self) -> None:
        try:
            while (batch := self._next_commands()) is not None:
                refused = self._apply(batch)
                outputs: tuple[RequestOutput, ...] = ()
                if self.engine.has_work:
                    outputs = tuple(self.engine.step().outputs)
                    self._active.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
                    self._steps += 1
                self._publish(outputs, refused)
        except Exception as error:
            logger.exception("rank %d: a step failed after %d steps", self.rank, self._steps)
            self._fail(error)

    def _next_commands(self) -> list[Commands] | None:
        """Everything in the inbox, sleeping while there is neither that nor work; None when stopping."""
        status = _plain(self.engine.status())
        has_work = self.engine.has_work
        with self._wake:
            self._status = status
            self._progress = time.monotonic()
            while not (self._inbox or has_work or self._stopping):
                self._busy = False
                self._wake.wait()
            if self._stopping:
                return None
            self._busy = True
            batch = list(self._inbox)
            self._inbox.clear()
            return batch

    def _apply(self, batch: list[Commands]) -> tuple[tuple[str, str], ...]:
        """Hand the inbox to the engine; what it would not take comes back as (request id, message)."""
        refused = []
        for commands in batch:
            for request in commands.submits:
                self._active.add(request.request_id)
                try:
                    self.engine.submit(request)
                except ValueError as error:
                    self._active.discard(request.request_id)
                    refused.append((request.request_id, str(error)))
            for request_id in commands.aborts:
                self._active.discard(request_id)
                self.engine.abort(request_id)
        return tuple(refused)

    def _publish(self, outputs: tuple[RequestOutput, ...], refused: tuple[tuple[str, str], ...] = ()) -> None:
        if outputs or refused:
            with self._filled:
                self._outbox.append(StepItem(self.rank, self._steps, outputs, refused))
                self._filled.notify()

    def _fail(self, error: Exception) -> None:
        """End every request with the error, and go on ending those that still arrive until stopped."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"rank {self.rank}: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        with self._wake:
            self._failed = reason
        ended = sorted(self._active)
        while True:
            self._publish(tuple(RequestOutput(name, (), finish_reason="error", error=reason) for name in ended))
            with self._wake:
                while not (self._inbox or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
                ended = [request.request_id for commands in self._inbox for request in commands.submits]
                self._inbox.clear()


def _plain(status: Any) -> dict[str, Any]:
    """Counters as a dict that crosses processes."""
    if is_dataclass(status) and not isinstance(status, type):
        return asdict(status)
    return dict(status)
