"""Requests in, outputs back: the client side of a gang, living on the event loop of its replica.

One actor call carries all the submits and aborts that gathered while the call before was on its way; one stream per
rank brings step items back and is dealt out to a queue per request. Admission is decided here, before a shard hears of
a request.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ray.exceptions import RayError

from cluster.actors.gang import Gang
from cluster.actors.messages import Commands, GangStatus, Overloaded, StepItem
from cluster.actors.peers import deployment_samples
from cluster.request import Request, RequestOutput

logger = logging.getLogger(__name__)

FIRST_GUESS = 128.0  # expected new tokens of a request before any has ended
MEMORY = 0.05  # weight of the latest ended request in the running mean


@dataclass(frozen=True, slots=True)
class Refusal:
    """In a request's queue: the engine would not take it."""

    message: str


@dataclass(slots=True)
class Stream:
    """One request that is open here."""

    request: Request
    rank: int
    expected: float
    queue: asyncio.Queue[RequestOutput | Refusal] = field(default_factory=asyncio.Queue)
    tokens: int = 0
    started: bool = False
    ended: bool = False


class Router:
    """Implements `EngineClient` for one gang."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._streams: dict[str, Stream] = {}
        self._load = [0.0] * gang.world  # expected tokens of the open requests of each rank
        self._queued = 0.0  # expected tokens of the requests that have not given any
        self._mean_new = FIRST_GUESS
        self._submits: list[list[Request]] = [[] for _ in range(gang.world)]
        self._aborts: list[list[str]] = [[] for _ in range(gang.world)]
        self._filled = [asyncio.Event() for _ in range(gang.world)]
        self._tasks: list[asyncio.Task[None]] = []
        self._down = ""

    def start(self) -> None:
        """Begin to read the shards' streams and to watch the gang; call on the replica's event loop.

        No actor call may be made from a request's own task: when its client leaves, Serve cancels everything that the
        task has called, and a call that carries commands carries those of other requests too.
        """
        for rank in range(self._gang.world):
            self._tasks.append(asyncio.create_task(self._read(rank), name=f"outputs-{rank}"))
            self._tasks.append(asyncio.create_task(self._send(rank), name=f"commands-{rank}"))
        self._tasks.append(asyncio.create_task(self._gang.watch(self._fail_all), name="gang-watch"))

    async def close(self) -> None:
        """End the open streams with an error and stop reading; the gang itself is left to its owner."""
        self._fail_all("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Stream one output per step that gave the request tokens; see `EngineClient.generate`."""
        if self._down:
            yield RequestOutput(request.request_id, (), finish_reason="error", error=self._down)
            return
        stream = self._admit(request)
        try:
            while True:
                output = await stream.queue.get()
                if isinstance(output, Refusal):
                    raise ValueError(output.message)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._forget(stream)

    async def status(self) -> GangStatus:
        """Health and load now; see `EngineClient.status`."""
        if not self._down:
            await self._gang.pulse()
        reason = self._down or self._gang.trouble()
        beats = [beat for beat in self._gang.beats if beat is not None]
        info = dict(self._gang.infos[0]) if self._gang.infos else {}
        info["ranks"] = [{"rank": beat.rank, "steps": beat.steps, "busy": beat.busy, **beat.status} for beat in beats]
        started = sum(stream.started for stream in self._streams.values())
        return GangStatus(not reason, reason, round(self._queued), started, info)

    async def metrics(self) -> list[bytes]:
        """Registry samples of all ranks of the deployment and of the other replicas; see `EngineClient.metrics`."""
        return await deployment_samples(self._gang)

    def _expected(self, request: Request) -> float:
        """Prompt tokens and the likely number of new ones."""
        return len(request.prompt_token_ids) + min(float(request.params.max_tokens), self._mean_new)

    def _admit(self, request: Request) -> Stream:
        expected = self._expected(request)
        limit = self._gang.spec.config.max_queued_tokens
        if self._queued and self._queued + expected > limit:
            raise Overloaded(f"the queue holds {self._queued:.0f} tokens (max_queued_tokens is {limit})")
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is already being served")
        rank = min(range(len(self._load)), key=self._load.__getitem__)
        stream = Stream(request, rank, expected)
        self._streams[request.request_id] = stream
        self._load[rank] += expected
        self._queued += expected
        self._submits[rank].append(request)
        self._filled[rank].set()
        return stream

    def _forget(self, stream: Stream) -> None:
        """The stream is over for its reader; unless it had ended, the shard is told to drop it."""
        if self._streams.pop(stream.request.request_id, None) is None:
            return
        self._load[stream.rank] = max(0.0, self._load[stream.rank] - stream.expected)
        self._leave_queue(stream)
        if not stream.ended and not self._down:
            self._aborts[stream.rank].append(stream.request.request_id)
            self._filled[stream.rank].set()
        if not self._streams:  # sums of floats drift; an empty gang is a good moment to say so
            self._load = [0.0] * len(self._load)
            self._queued = 0.0

    def _leave_queue(self, stream: Stream) -> None:
        if not stream.started:
            stream.started = True
            self._queued = max(0.0, self._queued - stream.expected)

    async def _send(self, rank: int) -> None:
        """Pass on what gathered for a rank, one call at a time."""
        while True:
            await self._filled[rank].wait()
            self._filled[rank].clear()
            commands = Commands(tuple(self._submits[rank]), tuple(self._aborts[rank]))
            self._submits[rank].clear()
            self._aborts[rank].clear()
            try:
                await self._gang.shards[rank].put.remote(commands)
            except RayError as error:
                self._fail_all(self._gang.mark_dead(rank, error))
                return

    async def _read(self, rank: int) -> None:
        """Deal a rank's step items out to the streams until its shard ends."""
        try:
            async for ref in self._gang.open_stream(rank):
                for item in await ref:
                    self._deal(item)
            self._fail_all(f"rank {rank}: the shard stopped")
        except RayError as error:
            self._fail_all(self._gang.mark_dead(rank, error))

    def _deal(self, item: StepItem) -> None:
        for request_id, message in item.refused:
            if stream := self._streams.get(request_id):
                stream.ended = True
                stream.queue.put_nowait(Refusal(message))
        for output in item.outputs:
            if stream := self._streams.get(output.request_id):
                self._leave_queue(stream)
                stream.tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    stream.ended = True
                    if output.finish_reason in ("stop", "length"):
                        self._mean_new += MEMORY * (stream.tokens - self._mean_new)
                stream.queue.put_nowait(output)

    def _fail_all(self, reason: str) -> None:
        """The gang is done for: every open stream ends with the reason, and so does every later one."""
        if self._down:
            return
        self._down = reason
        for request_id, stream in self._streams.items():
            if not stream.ended:
                stream.ended = True
                stream.queue.put_nowait(RequestOutput(request_id, (), finish_reason="error", error=reason))
