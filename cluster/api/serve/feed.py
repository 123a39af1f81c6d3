"""The engine's side of a resilient stream: an engine replica sends items to an ingress replica while the ingress
exists.

An ingress that shuts down normally closes its streams; a killed ingress cannot. Ray does not stop a call whose caller
is dead, because a call through a Serve handle has no backpressure. So the requests of a killed ingress would run to
their last token. To prevent this, the engine replica asks Ray regularly whether each ingress with open streams still
exists. A slow or busy ingress still exists, and its streams go on.
"""

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import ray
from ray.serve._private.constants import SERVE_NAMESPACE

from cluster.actors.messages import EngineClient, Overloaded, Unavailable
from cluster.api.serve.resilient_client import RequestRefused, StreamAbandoned, StreamHeartbeat, StreamItem
from cluster.request import Request, SequenceOutput


async def stream_items(
    engine: EngineClient,
    request: Request,
    heartbeat: StreamHeartbeat,
    heartbeat_period_s: float,
    abandon_reason: Callable[[], str],
    caller_gone: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[StreamItem, None]:
    """Yield `heartbeat`, then the outputs of a request, and `heartbeat` again whenever there is no output for
    `heartbeat_period_s` seconds.

    If the queue is full, `RequestRefused` is the only item. If the request is invalid, `RequestRefused` follows a
    heartbeat and is the last item.

    `abandon_reason()` returns why this replica gives up its streams, or an empty string. If it returns a reason at the
    start, the request is not submitted, and `StreamAbandoned` is the only item. `StreamAbandoned` is the last item if
    the engine is unavailable at the start, if it ends the stream without a last output, or if it ends the stream by an
    error or an abort and `abandon_reason()` returns a reason. The ingress may then resume the stream elsewhere.

    `caller_gone()` returns whether the ingress no longer exists. It is called before each wait for an output, at least
    every `heartbeat_period_s` seconds; if it returns True, the generator ends. When the generator ends or is closed, an
    unfinished request is aborted.
    """
    if reason := abandon_reason():
        yield StreamAbandoned(reason)
        return
    async with aclosing(_outputs(engine, request)) as outputs:
        output_task: asyncio.Task[SequenceOutput | None] | None = None
        try:
            output_task = asyncio.ensure_future(_next_output(outputs))
            await asyncio.sleep(0)  # the engine admits or refuses a request in its first iteration of the event loop
            if output_task.done() and isinstance(error := output_task.exception(), Overloaded):
                yield RequestRefused(str(error), error.retry_after_s)
                return
            if output_task.done() and isinstance(error := output_task.exception(), Unavailable):
                yield StreamAbandoned(str(error))
                return
            yield heartbeat
            while not caller_gone():
                done, _ = await asyncio.wait((output_task,), timeout=heartbeat_period_s)
                if not done:
                    yield heartbeat
                    continue
                try:
                    output = output_task.result()
                except ValueError as error:
                    yield RequestRefused(str(error))
                    return
                if output is None:
                    yield StreamAbandoned(abandon_reason() or "its stream ended without a reason")
                    return
                if output.finish_reason in ("error", "abort") and (reason := abandon_reason()):
                    yield StreamAbandoned(reason)
                    return
                yield output
                if output.finish_reason is not None:
                    return
                output_task = asyncio.ensure_future(_next_output(outputs))
        finally:
            if output_task is not None:
                output_task.cancel()
                await asyncio.gather(output_task, return_exceptions=True)


async def _outputs(engine: EngineClient, request: Request) -> AsyncGenerator[SequenceOutput, None]:
    stream: Any = engine.generate(request)
    async with aclosing(stream):
        async for output in stream:
            yield output


async def _next_output(outputs: AsyncGenerator[SequenceOutput, None]) -> SequenceOutput | None:
    return await anext(outputs, None)


logger = logging.getLogger(__name__)

CALLER_CHECK_S = 2.0


def replica_exists(name: str) -> bool:
    """Return whether a Serve replica of this full name exists.

    Raises:
        Exception: Ray does not answer, so the state is unknown.
    """
    try:
        ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except ValueError:  # Serve's own controller treats this error as the end of a replica
        return False
    return True


class CallerMonitor:
    """Checks regularly which of the ingress replicas with open streams no longer exist. An ingress replica is known by
    its full name in Serve.
    """

    def __init__(
        self, is_alive: Callable[[str], bool] = replica_exists, check_period_s: float = CALLER_CHECK_S
    ) -> None:
        """Create this object outside any request. The task that checks runs in the `contextvars` context in which this
        object was created, and Serve may cancel the tasks of a request's context.
        """
        self._is_alive, self._check_period_s = is_alive, check_period_s
        self._open_streams, self._gone_callers = Counter[str](), set[str]()
        self._context = contextvars.copy_context()
        self._watch_task: asyncio.Task[None] | None = None

    @contextmanager
    def open_stream(self, name: str) -> Iterator[Callable[[], bool]]:
        """Count a stream of the caller `name` as open inside the block. Yield a function that returns whether the
        caller is gone; for an empty name it always returns False.
        """
        if not name:
            yield lambda: False
            return
        self._open_streams[name] += 1
        if self._watch_task is None or self._watch_task.done():
            self._watch_task = asyncio.get_running_loop().create_task(self._check_callers(), context=self._context)
        try:
            yield lambda: name in self._gone_callers
        finally:
            self._open_streams[name] -= 1
            if not self._open_streams[name]:
                del self._open_streams[name]
                self._gone_callers.discard(name)

    async def _check_callers(self) -> None:
        while self._open_streams:
            await asyncio.sleep(self._check_period_s)
            for name in [*self._open_streams]:
                try:
                    is_alive = await asyncio.to_thread(self._is_alive, name)
                except Exception as error:  # no answer from Ray is no evidence that the caller is gone
                    logger.warning("whether %s exists is not known: %s", name, error)
                    continue
                if not is_alive and name in self._open_streams and name not in self._gone_callers:
                    self._gone_callers.add(name)
                    logger.warning("%s is gone: its %d open streams end", name, self._open_streams[name])
