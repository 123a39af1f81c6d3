"""Requests in, outputs back: the client side of a gang, living on the event loop of its replica.

One actor call carries all the submits and aborts that gathered while the call before was on its way; one stream per
leader brings step items back and is dealt out to a queue per request. Admission is decided here, before a shard hears
of a request. While the gang restarts, streams and new requests wait here; then all are submitted, those that were
already given tokens with these tokens.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from ray.exceptions import RayActorError, RayError

from cluster.actors.balance import Balancer
from cluster.actors.gang import Gang
from cluster.actors.life import Life, first_line
from cluster.actors.messages import Commands, GangStatus, Loss, Overloaded, StepItem
from cluster.actors.peers import deployment_samples
from cluster.actors.streams import Recovery, Refusal, Stream, end_culprits, with_seed
from cluster.request import Request, RequestOutput

logger = logging.getLogger(__name__)

FIRST_GUESS = 128.0  # expected new tokens of a request before any has ended
MEMORY = 0.05  # weight of the latest ended request in the running mean


@dataclass(slots=True)
class Line:
    """What gathers for one leader until the next actor call."""

    submits: list[Request] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> Commands:
        """All of it; the line is empty then."""
        commands = Commands(tuple(self.submits), tuple(self.aborts))
        self.submits.clear()
        self.aborts.clear()
        self.filled.clear()
        return commands


class Router:
    """Implements `EngineClient` for one gang, and `Owner`: it is told when the gang goes down and comes back."""

    def __init__(self, gang: Gang, on_resumed: Callable[[], None] | None = None) -> None:
        """`on_resumed` is called for every stream that a new life of the gang is given."""
        config = gang.spec.config
        self._on_resumed = on_resumed
        self._gang = gang
        self._streams: dict[str, Stream] = {}
        self._balancer = Balancer.of(config, gang.infos[0].get("kv_pages") if gang.infos else None)
        self._queued = 0.0  # expected tokens of the requests that have not given any
        self._mean_new = FIRST_GUESS
        self._seeds = random.Random(config.random_seed)
        self._life: Life | None = None  # the life that requests go to; None while they wait
        self._lines: dict[int, Line] = {}  # by leader
        self._recovery = Recovery()
        self._serving: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._down = ""
        self._down_as: Literal["error", "abort"] = "error"

    @property
    def lost(self) -> str:
        """Why the gang will not come back; empty while it serves or restarts."""
        return self._gang.lost

    def start(self) -> None:
        """Begin to read the leaders' streams and to watch the gang; call on the replica's event loop.

        No actor call may be made from a request's own task: when its client leaves, Serve cancels everything that the
        task has called, and a call that carries commands carries those of other requests too.
        """
        self.on_up()
        self._watch = asyncio.create_task(self._gang.watch(self), name="gang-watch")

    def end_streams(self) -> None:
        """Every open stream ends as aborted, and so does every later one: the server has no more time for them."""
        self._end_all("the server is shutting down", "abort")

    async def close(self) -> None:
        """End the open streams and stop reading; the gang itself is left to its owner."""
        self.end_streams()
        tasks = [*self._serving, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_up(self) -> None:
        """The gang serves, from a first life or a new one: give it every stream that is open."""
        life = self._gang.life
        assert life is not None
        self._life = life
        self._lines = {rank: Line() for rank in life.spec.leaders}
        self._balancer.restarted()
        for rank in self._lines:
            self._serving.append(asyncio.create_task(self._read(life, rank), name=f"outputs-{rank}"))
            self._serving.append(asyncio.create_task(self._send(life, rank), name=f"commands-{rank}"))
        for stream in self._recovery.begin([s for s in self._streams.values() if not s.ended]):
            self._submit(stream)

    def on_down(self, loss: Loss) -> None:
        """The life is over: nothing of it is dealt out any more, and the streams wait."""
        self._life = None
        for task in self._serving:
            task.cancel()
        self._serving = []
        nodes = int(self._gang.infos[0].get("speculative_num_draft_tokens", 1)) - 1
        open_streams = [stream for stream in self._streams.values() if not stream.ended]
        for stream in open_streams:
            stream.lose(nodes)
        end_culprits(open_streams, loss)

    def on_lost(self, reason: str) -> None:
        """The gang will not come back: every stream ends with the reason."""
        self._end_all(reason)

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Stream one output per step that gave the request tokens; see `EngineClient.generate`."""
        if self._down:
            yield RequestOutput(request.request_id, (), finish_reason=self._down_as, error=self._down)
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
        info = dict(self._gang.infos[0]) if self._gang.infos else {}
        info |= self._gang.facts()
        info["ranks"] = [
            {
                "rank": beat.rank,
                "pid": self._gang.infos[beat.rank].get("pid"),
                "steps": beat.steps,
                "busy": beat.busy,
                "step": beat.step,
                "phase": beat.phase,
                **beat.status,
            }
            for beat in self._gang.beats
            if beat is not None
        ]
        started = sum(stream.started for stream in self._streams.values())
        return GangStatus(not reason, reason, round(self._queued), started, info)

    async def metrics(self) -> list[bytes]:
        """Registry samples of all ranks of the deployment and of the other replicas; see `EngineClient.metrics`."""
        return await deployment_samples(self._gang)

    def _new_tokens(self, request: Request) -> float:
        """The likely number of new ones."""
        return min(float(request.params.max_tokens), self._mean_new)

    def _admit(self, request: Request) -> Stream:
        expected = len(request.prompt_token_ids) + self._new_tokens(request)
        limit = self._gang.spec.config.max_queued_tokens
        if self._queued and self._queued + expected > limit:
            raise Overloaded(f"the queue holds {self._queued:.0f} tokens (max_queued_tokens is {limit})")
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is already being served")
        stream = Stream(with_seed(request, self._seeds), expected)
        self._choose(stream, stream.request)  # refuses a routed_dp_rank that does not exist
        self._streams[request.request_id] = stream
        self._queued += expected
        if self._life is not None:
            self._submit(stream)
        return stream

    def _choose(self, stream: Stream, request: Request) -> None:
        leaders = self._gang.spec.leaders
        stream.rank = leaders[self._balancer.choose(request, self._new_tokens(request))]

    def _submit(self, stream: Stream) -> None:
        """Give a stream's request to the present life."""
        again = stream.submissions > 0
        request = stream.submission()
        if again:  # the caches are gone, and others may be open now
            self._choose(stream, request)
            if self._on_resumed is not None:
                self._on_resumed()
        line = self._lines[stream.rank]
        line.submits.append(request)
        line.filled.set()

    def _forget(self, stream: Stream) -> None:
        """The stream is over for its reader; unless it had ended, the shard is told to drop it."""
        if self._streams.pop(stream.name, None) is None:
            return
        self._balancer.ended(stream.name, stream.dealt)
        self._leave_queue(stream)
        if not stream.ended:
            stream.ended = True
            if stream.submitted and self._life is not None:
                line = self._lines[stream.rank]
                line.aborts.append(stream.name)
                line.filled.set()
            self._settle(stream)
        if not self._streams:  # sums of floats drift; an empty gang is a good moment to say so
            self._queued = 0.0

    def _leave_queue(self, stream: Stream) -> None:
        if not stream.started:
            stream.started = True
            self._queued = max(0.0, self._queued - stream.expected)

    def _settle(self, stream: Stream) -> None:
        """A stream has a token of this life or is over: it may be another's turn to come back."""
        if self._life is not None:
            for following in self._recovery.settled(stream.name):
                self._submit(following)

    async def _send(self, life: Life, rank: int) -> None:
        """Pass on what gathered for a leader, one call at a time."""
        line = self._lines[rank]
        while True:
            await line.filled.wait()
            try:
                await life.shards[rank].put.remote(line.take())
            except RayActorError as error:
                life.mark_dead(rank, error)
                return
            except RayError as error:
                life.mark_failed(rank, f"it took no commands: {first_line(error)}")
                return

    async def _read(self, life: Life, rank: int) -> None:
        """Deal a leader's step items out to the streams until its shard ends."""
        try:
            async for ref in life.open_stream(rank):
                for item in await ref:
                    life.mark_alive()
                    self._deal(item)
        except RayActorError as error:
            life.mark_dead(rank, error)
        except RayError as error:
            life.mark_failed(rank, f"its outputs cannot be read: {first_line(error)}")

    def _deal(self, item: StepItem) -> None:
        for request_id, message in item.refused:
            if (stream := self._streams.get(request_id)) and not stream.ended:
                if stream.dealt:
                    stream.end(f"the engine would not resume it: {message}")
                else:
                    stream.ended = True
                    stream.queue.put_nowait(Refusal(message))
                self._settle(stream)
        for output in item.outputs:
            if (stream := self._streams.get(output.request_id)) and not stream.ended:
                self._take(stream, output)

    def _take(self, stream: Stream, output: RequestOutput) -> None:
        first = not stream.fruitful
        if first:
            self._balancer.started(stream.name, output.cached_tokens)
        self._balancer.progressed(stream.name, len(output.token_ids), 0 if first else 1)
        if not stream.started:
            self._leave_queue(stream)
            stream.cached_tokens = output.cached_tokens
        stream.queue.put_nowait(stream.take(output))
        if output.finish_reason in ("stop", "length"):
            self._mean_new += MEMORY * (len(stream.dealt) - self._mean_new)
        if first or stream.ended:
            self._settle(stream)

    def _end_all(self, reason: str, finish_reason: Literal["error", "abort"] = "error") -> None:
        """Every open stream ends with the reason, and so does every later one."""
        if not self._down:
            self._down, self._down_as = reason, finish_reason
        for stream in self._streams.values():
            stream.end(self._down, self._down_as)
