"""Merges the outputs of the requests of one call. A request that finds the engine's queue full waits for another."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.actors.messages import EngineClient, Overloaded, Unavailable
from cluster.api.core.errors import ApiError, overloaded, unavailable
from cluster.request import Request, SequenceOutput


async def merged(engine: EngineClient, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
    """Yield pairs (index of the request, output). If the generator is closed or a request fails, all are aborted.

    A request that finds the engine's queue full is submitted again when another request of the call gets its first
    output or ends. If the call's own requests fill the queue, refusing the call would not help: the client's retry
    would fill the queue again. So the call is refused only if none of its requests is with the engine.

    Raises:
        ApiError: 503 if the queue is full or the engine is unavailable, 400 if the engine refuses a request.
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
    """The requests of a call that wait because the queue was full. When another request of the call gets its first
    output or ends, the request that has waited longest is woken.
    """

    def __init__(self, count: int) -> None:
        self._there = count  # requests that are with the engine, or are being submitted
        self._waiting: deque[asyncio.Event] = deque()

    async def wait(self, refusal: ApiError) -> None:
        """Wait until another request of the call gets its first output or ends.

        Raises:
            ApiError: `refusal`, if no other request of the call is with the engine: nothing would end the wait.
        """
        self._there -= 1
        if not self._there:
            raise refusal
        turn = asyncio.Event()
        self._waiting.append(turn)
        await turn.wait()

    def moved(self) -> None:
        """Wake one waiting request. Another request got its first output or ended, so the queue may have a place."""
        if self._waiting:
            self._there += 1
            self._waiting.popleft().set()

    def ended(self) -> None:
        """Record that a request has ended: wake one waiting request, and count one request less with the engine."""
        self.moved()
        self._there -= 1


async def _outputs(engine: EngineClient, request: Request, turns: _Turns) -> AsyncGenerator[SequenceOutput, None]:
    """Yield one request's outputs. The engine's iterator is always closed at the end, which aborts an unfinished
    request.
    """
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
            name, colon, _ = str(error).partition(": ")  # a message "FIELD: ..." names the wrong field
            blamed = name if colon and name.isidentifier() else None
            raise ApiError(str(error), param=blamed, code="invalid_value") from None
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        await turns.wait(refusal)
