"""The engine half of a resilient stream: what an engine replica sends to an ingress replica while that exists.

An ingress that ends in order closes its streams; a killed ingress cannot. Ray does not stop a call whose caller is
dead, because a call through a Serve handle has no backpressure. So the requests of a killed ingress would run to their
last token. To prevent this, the engine replica asks Ray regularly whether each ingress with open streams still exists.
A slow or busy ingress still exists, and its streams go on.
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
from cluster.api.serve.resilient_client import Item, Leaving, Refused, StreamSign
from cluster.request import Request, SequenceOutput


async def feed(
    engine: EngineClient,
    request: Request,
    sign: StreamSign,
    period_s: float,
    leaving: Callable[[], str],
    gone: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Item, None]:
    """Yield `sign`, then the outputs of a request, and `sign` again whenever there is no output for `period_s`.

    A full queue yields `Refused` without a sign before it; an invalid request yields `Refused` after a sign.
    `leaving()` returns why this replica gives up its streams, or an empty string. If it returns a reason and the
    engine has ended the stream, `Leaving` is yielded, and the ingress may resume the stream elsewhere. A replica that
    is leaving at the start yields `Leaving` at once and does not take the request. Closing this generator aborts the
    request. The generator also ends when `gone()` returns True, which means that the ingress no longer exists;
    `gone()` is called every `period_s` seconds and before each output.
    """
    if reason := leaving():
        yield Leaving(reason)
        return
    async with aclosing(_outputs(engine, request)) as outputs:
        coming: asyncio.Task[SequenceOutput | None] | None = None
        try:
            coming = asyncio.ensure_future(_next(outputs))
            await asyncio.sleep(0)  # the engine admits or refuses a request in its first turn of the event loop
            if coming.done() and isinstance(error := coming.exception(), Overloaded):
                yield Refused(str(error), error.retry_after_s)
                return
            if coming.done() and isinstance(error := coming.exception(), Unavailable):
                yield Leaving(str(error))
                return
            yield sign
            while not gone():
                done, _ = await asyncio.wait((coming,), timeout=period_s)
                if not done:
                    yield sign
                    continue
                try:
                    output = coming.result()
                except ValueError as error:
                    yield Refused(str(error))
                    return
                if output is None:
                    yield Leaving(leaving() or "its stream ended without a reason")
                    return
                if output.finish_reason in ("error", "abort") and (reason := leaving()):
                    yield Leaving(reason)
                    return
                yield output
                if output.finish_reason is not None:
                    return
                coming = asyncio.ensure_future(_next(outputs))
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


async def _outputs(engine: EngineClient, request: Request) -> AsyncGenerator[SequenceOutput, None]:
    stream: Any = engine.generate(request)
    async with aclosing(stream):
        async for output in stream:
            yield output


async def _next(outputs: AsyncGenerator[SequenceOutput, None]) -> SequenceOutput | None:
    return await anext(outputs, None)


logger = logging.getLogger(__name__)

PERIOD_S = 2.0


def exists(name: str) -> bool:
    """Return whether a Serve replica of this full name exists.

    Raises:
        Exception: Ray does not answer, so the state is unknown.
    """
    try:
        ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except ValueError:  # Serve's own controller treats this error as the end of a replica
        return False
    return True


class Callers:
    """The ingress replicas with open streams, by full replica name, and which of them are gone."""

    def __init__(self, alive: Callable[[str], bool] = exists, period_s: float = PERIOD_S) -> None:
        """Construct this object outside any request: the watch task runs in the context of the construction, and Serve
        cancels tasks in the context of a request.
        """
        self._alive, self._period_s = alive, period_s
        self._open, self._gone = Counter[str](), set[str]()
        self._context = contextvars.copy_context()
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def stream(self, name: str) -> Iterator[Callable[[], bool]]:
        """Count a stream of the caller `name` as open inside the block. Yield a function that returns whether the
        caller is gone; for an empty name it always returns False.
        """
        if not name:
            yield lambda: False
            return
        self._open[name] += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._watch(), context=self._context)
        try:
            yield lambda: name in self._gone
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]
                self._gone.discard(name)

    async def _watch(self) -> None:
        while self._open:
            await asyncio.sleep(self._period_s)
            for name in [*self._open]:
                try:
                    there = await asyncio.to_thread(self._alive, name)
                except Exception as error:  # no answer from Ray is no evidence that the caller is gone
                    logger.warning("whether %s exists is not known: %s", name, error)
                    continue
                if not there and name in self._open and name not in self._gone:
                    self._gone.add(name)
                    logger.warning("%s is gone: its %d open streams end", name, self._open[name])
