"""Merges the outputs of the requests of one call; a request that finds the queue full waits for the others."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.actors.messages import EngineClient, Overloaded, Unavailable
from cluster.api.core.errors import ApiError, overloaded, unavailable
from cluster.request import Request, SequenceOutput


async def merged(engine: EngineClient, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
    """Yield (index of the request, output). Closing the generator, or a failure of one request, aborts all of them.

    A request that finds the queue full is tried again when another request of the call gets its first output or ends.
    A queue full of the call's own requests is no reason to refuse the call: a retry would fill it again. The call is
    refused only when none of its requests is with the engine.

    Raises:
        ApiError: 503 when the queue is full or the engine ends, 400 when it refuses a request.
    """
    turns = _Turns(len(requests))
    if len(requests) == 1:  # no task and no queue between the engine and the client
        async with aclosing(_outputs(engine, requests[0], turns)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, SequenceOutput | Exception | None]] = asyncio.Queue()

    async def pump(at: int) -> None:
        try:
            async with aclosing(_outputs(engine, requests[at], turns)) as outputs:
                async for output in outputs:
                    queue.put_nowait((at, output))
            queue.put_nowait((at, None))
        except Exception as error:
            queue.put_nowait((at, error))

    tasks = [asyncio.create_task(pump(at)) for at in range(len(requests))]
    try:
        running = len(tasks)
        while running:
            at, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield at, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Turns:
    """Requests of a call that found the queue full; one is woken when another gets its first output or ends."""

    def __init__(self, count: int) -> None:
        self._there = count  # requests that are with the engine, or are being submitted
        self._waiting: deque[asyncio.Event] = deque()

    async def wait(self, refusal: ApiError) -> None:
        """Wait until another request of the call gets its first output or ends.

        Raises:
            ApiError: the refusal, where no other request of the call is with the engine, so that nothing would wake it.
        """
        self._there -= 1
        if not self._there:
            raise refusal
        turn = asyncio.Event()
        self._waiting.append(turn)
        await turn.wait()

    def moved(self) -> None:
        """Wake one waiting request: another one got its first output or ended, so the queue may have a place."""
        if self._waiting:
            self._there += 1
            self._waiting.popleft().set()

    def ended(self) -> None:
        """Call when a request has ended: it wakes a waiting one, and counts one less."""
        self.moved()
        self._there -= 1


async def _outputs(engine: EngineClient, request: Request, turns: _Turns) -> AsyncGenerator[SequenceOutput, None]:
    """Yield one request's outputs. The engine's iterator is always closed, which aborts a request that still runs."""
    begun = False
    while True:
        stream = engine.generate(request)
        try:
            async for output in stream:
                if not begun:
                    begun = True
                    turns.moved()
                yield output
            turns.ended()
            return
        except Overloaded as error:
            refusal = overloaded(error)
        except Unavailable as error:
            raise unavailable(str(error), error.retry_after_s) from None
        except ValueError as error:
            name, colon, _ = str(error).partition(": ")  # "FIELD: MESSAGE" blames a field
            blamed = name if colon and name.isidentifier() else None
            raise ApiError(str(error), param=blamed, code="invalid_value") from None
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        await turns.wait(refusal)
