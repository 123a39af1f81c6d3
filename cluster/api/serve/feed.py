"""The engine half of a resilient stream: the items that an engine replica sends to the calling ingress replica."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

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
    request. It ends by itself once `gone()`, checked every `period_s` and before each output, says that the ingress
    no longer exists.
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
