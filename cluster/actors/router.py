"""The client side of a gang, on the event loop of its replica: sends requests to the leaders, distributes the outputs.

One actor call per leader carries all submits and aborts that gathered during the previous call. One stream per leader
brings step items back; their outputs go to one queue per request. Admission is decided here, before a shard gets a
request. While the gang restarts, streams and new requests wait here. When the gang serves again, all are submitted; a
stream that already had tokens continues after its last token.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from cluster.actors.admission import Admission
from cluster.actors.balance import Balancer, RankChoice
from cluster.actors.coalesced_call import CoalescedCall
from cluster.actors.gang import Gang
from cluster.actors.grammar_transfer import named
from cluster.actors.incarnation import Incarnation
from cluster.actors.messages import Commands, GangStatus, Loss, Overloaded, StepItem, Unavailable
from cluster.actors.open_requests import QueueReport
from cluster.actors.peer_gangs import deployment_samples
from cluster.actors.prefill_speed import Drift
from cluster.actors.streams import OpenStream, Recovery, StreamRefusal
from cluster.config.resolved import ResolvedSettings
from cluster.observability.logs import first_line
from cluster.observability.step_times import StepTimes
from cluster.request import Request, Seeds, SequenceOutput
from cluster.status import RankInfo

logger = logging.getLogger(__name__)

LAST_WORDS_S = 0.5  # how long to read items that killed shards had already sent


Work = Callable[[Incarnation, int], Coroutine[Any, Any, None]]  # (incarnation, leader's rank): a task for one leader


@dataclass(slots=True)
class CommandQueue:
    """Commands that gather for one leader until the next actor call; see `Commands` for the fields."""

    submits: list[Request] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    doubted: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> Commands:
        """Return everything that gathered, and empty the queue."""
        commands = Commands(tuple(self.submits), tuple(self.aborts), tuple(self.doubted), tuple(self.heard))
        for gathered in (self.submits, self.aborts, self.doubted, self.heard):
            gathered.clear()
        self.filled.clear()
        return commands


class Router:
    """Implements `EngineClient` for one gang, and `Owner`: the gang calls it when it goes down and comes back."""

    def __init__(self, gang: Gang, on_resumed: Callable[[], None] | None = None, replica_rank: int = 0) -> None:
        """`on_resumed` is called for every stream that is submitted again to a new incarnation of the gang.

        A request without a seed gets the next seed of a generator, in the order of admission. The generator is seeded
        with `random_seed` and `replica_rank`, the replica's rank in its deployment. So after a restart the same
        requests in the same order get the same seeds, and no two requests share a seed.
        """
        resolved = ResolvedSettings.of(gang.spec.config)
        self._on_resumed = on_resumed
        self._gang = gang
        self._streams: dict[str, OpenStream] = {}
        self._balancer = Balancer.of(resolved)
        self._samples = CoalescedCall(lambda: deployment_samples(gang))
        self._admission = Admission(resolved, report=self._report)
        self._seeds = Seeds(f"{gang.spec.config.random_seed}/{replica_rank}")
        self._life: Incarnation | None = None  # the incarnation that requests go to; None while they wait
        self._lines: dict[int, CommandQueue] = {}  # by leader
        self._recovery = Recovery()
        self._reading: list[asyncio.Task[None]] = []
        self._sending: list[asyncio.Task[None]] = []
        self._grammars: set[asyncio.Task[tuple[str, str]]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._down = ""

    @property
    def lost(self) -> str:
        """Why the gang will not come back; empty while it serves or restarts."""
        return self._gang.lost

    def start(self) -> None:
        """Begin to read the leaders' streams and to watch the gang; call this on the replica's event loop.

        No actor call may be made from a request's own task: when the client leaves, Serve cancels all calls of that
        task, and an actor call with commands also carries commands of other requests.
        """
        self.on_up()
        self._watch = asyncio.create_task(self._gang.watch(self), name="gang-watch")

    def end_streams(self) -> None:
        """End every open stream as aborted, and refuse later requests: the server is shutting down."""
        self._end_all("the server is shutting down")

    async def close(self) -> None:
        """End the open streams, stop reading, and stop watching the gang. The caller ends the gang itself."""
        self.end_streams()
        tasks = [*self._reading, *self._sending, *self._grammars, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_up(self) -> None:
        """Note that the first or a later incarnation serves: submit the open streams that `Recovery` releases."""
        life = self._gang.life
        assert life is not None
        self._life = life
        self._lines = {rank: CommandQueue() for rank in life.spec.leaders}
        info = self._gang.infos[0]
        self._balancer.restarted(info.kv_pages)
        self._admission.started(info.kv_tokens, _pace_of(info))
        self._reading = [self._task(life, rank, "outputs", self._read) for rank in self._lines]
        self._sending = [self._task(life, rank, "commands", self._send) for rank in self._lines]
        for stream in self._recovery.begin([s for s in self._streams.values() if not s.ended]):
            self._submit(stream)

    async def on_down(self, loss: Loss) -> None:
        """Note that the incarnation is over. Distribute the items that its shards had sent; then the streams wait."""
        await asyncio.wait(self._reading, timeout=LAST_WORDS_S)
        self._life = None
        self._admission.stopped()
        for task in (*self._reading, *self._sending):
            task.cancel()
        self._reading, self._sending = [], []
        nodes = self._gang.infos[0].speculative_num_draft_tokens - 1
        open_streams = [stream for stream in self._streams.values() if not stream.ended]
        for stream in open_streams:
            stream.lose(nodes)
        self._recovery.lost(open_streams, loss)

    def on_lost(self, reason: str) -> None:
        """Note that the gang will not come back: end every stream with the reason."""
        self._end_all(reason)

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        """Stream one output per step that produced tokens of the request; see `EngineClient.generate`."""
        if self._down:
            raise Unavailable(self._down, max(1, math.ceil(self._gang.start_s)))
        stream = self._admit(request)
        try:
            while True:
                output = await stream.queue.get()
                if isinstance(output, StreamRefusal):
                    raise ValueError(output.message)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._forget(stream)

    def full(self) -> Overloaded | None:
        """Return why even a short request would be refused now; see `EngineClient.full`."""
        return None if self._down else self._admission.full()

    async def status(self) -> GangStatus:
        """Return health and load now; see `EngineClient.status`."""
        if not self._down:
            await self._gang.pulse()
        reason = self._down or self._gang.trouble()
        started = sum(stream.started for stream in self._streams.values())
        return GangStatus(
            healthy=not reason,
            reason=reason,
            queued_tokens=round(self._admission.queued_tokens),
            running=started,
            history=self._gang.history(),
            ranks=tuple(self._gang.infos),
            beats=tuple(beat for beat in self._gang.beats if beat is not None),
        )

    async def metrics(self) -> list[bytes]:
        """Return registry samples of all ranks of the deployment and of the other replicas."""
        return await self._samples.get()

    def _admit(self, request: Request) -> OpenStream:
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is already being served")
        place = self._balancer.place(request, self._admission.new_tokens(request))  # raises for an unknown rank
        if not request.resumed_tokens:  # a request with resumed tokens was admitted before, by another replica
            self._admission.check(request, place)
        stream = OpenStream(self._seeds.fill(request))
        self._choose(stream, stream.request, place)
        self._streams[request.request_id] = stream
        self._admission.entered(request, place)
        if self._life is not None and self._recovery.arrived(stream):
            self._submit(stream)
        return stream

    def _choose(self, stream: OpenStream, request: Request, place: RankChoice) -> None:
        self._balancer.choose(request, self._admission.new_tokens(request), place)
        stream.place(self._gang.spec.leaders[place.rank])

    def _report(self, dp_rank: int) -> QueueReport | None:
        """Return a rank's last report of its queue and its step times, or None if there was none yet."""
        heard = None if self._life is None else self._life.heard(self._gang.spec.leaders[dp_rank])
        if heard is None:
            return None
        at, status = heard
        drift = Drift(status.decode_drift, status.prompt_drift, status.prefill_drift)
        return QueueReport(at, status.queued_tokens, status.submitted, drift)

    def _submit(self, stream: OpenStream) -> None:
        """Submit a stream's request to the present incarnation."""
        again = stream.submissions > 0
        request = stream.submission()
        if again:  # choose the rank anew: the caches are empty, and the load may have changed
            place = self._balancer.place(request, self._admission.new_tokens(request))
            self._choose(stream, request, place)
            self._admission.moved(stream.name, len(request.prompt_token_ids), place)
            if self._on_resumed is not None:
                self._on_resumed()
        grammar = request.params.grammar
        if grammar is None:
            self._send_on(stream, request)
            return
        assert self._life is not None
        read, epoch = self._life.read_grammar(stream.rank, grammar), self._life.epoch
        self._grammars.add(read)
        read.add_done_callback(lambda task: self._grammar_read(task, stream, request, epoch))

    def _grammar_read(
        self, task: asyncio.Task[tuple[str, str]], stream: OpenStream, request: Request, epoch: int
    ) -> None:
        """Send a stream's request on, or refuse it: the ranks of its group have read its grammar."""
        self._grammars.discard(task)
        if stream.ended or task.cancelled() or self._life is None or self._life.epoch != epoch:
            return  # the next incarnation reads the grammar again
        name, reason = task.result()
        if reason:
            self._refuse(stream, reason)
        else:
            self._send_on(stream, named(request, name))

    def _refuse(self, stream: OpenStream, reason: str) -> None:
        """Refuse a stream that the engine will not serve. If tokens were already sent, end it with an error instead."""
        if stream.dealt:
            stream.end(f"the engine would not resume it: {reason}")
        else:
            stream.refuse(reason)
        self._settle(stream)

    def _send_on(self, stream: OpenStream, request: Request) -> None:
        """Submit a stream's request with the next call to its leader."""
        line = self._lines[stream.rank]
        line.submits.append(request)
        self._admission.sent(stream.name)
        if stream.unserved:
            line.doubted.append(stream.name)
        line.filled.set()

    def _forget(self, stream: OpenStream) -> None:
        """Forget a stream whose reader is gone; if the stream had not ended, abort its request."""
        if self._streams.pop(stream.name, None) is None:
            return
        self._balancer.ended(stream.name, stream.dealt)
        self._admission.left(stream.name, stopped=False)
        if not stream.ended:
            stream.leave()
            if stream.submitted and self._life is not None:
                line = self._lines[stream.rank]
                line.aborts.append(stream.name)
                line.filled.set()
            self._settle(stream)

    def _settle(self, stream: OpenStream) -> None:
        """Note that a stream went on in this incarnation or is over. Submit the streams that `Recovery` releases."""
        if self._life is not None:
            for following in self._recovery.settled(stream.name):
                self._submit(following)

    def _task(self, life: Incarnation, rank: int, name: str, work: Work) -> asyncio.Task[None]:
        """Start a task that sends to a leader or reads from it. If the task fails, the incarnation is over."""

        async def watched() -> None:
            try:
                await work(life, rank)
            except RayActorError as error:
                life.mark_dead(rank, error)
            except Exception as error:
                logger.exception("rank %d: its %s failed", rank, name)
                life.mark_failed(rank, f"its {name} failed: {first_line(error)}")

        return asyncio.create_task(watched(), name=f"{name}-{rank}")

    async def _send(self, life: Incarnation, rank: int) -> None:
        """Send a leader the commands that gathered for it, one call at a time."""
        line, shard = self._lines[rank], life.shards[rank]
        while True:
            await line.filled.wait()
            await shard.put.remote(line.take())

    async def _read(self, life: Incarnation, rank: int) -> None:
        """Distribute a leader's step items to the streams until its shard ends."""
        async for ref in life.open_stream(rank):
            for item in await ref:
                life.mark_alive()
                self._deal(life, item)

    def _deal(self, life: Incarnation, item: StepItem) -> None:
        """Pass each part of a step item to its stream."""
        for request_id in item.begun:
            if stream := self._streams.get(request_id):
                stream.begin()
                if stream.unserved:  # the step of a doubted request waits for this confirmation
                    line = self._lines[stream.rank]
                    line.heard.append(stream.name)
                    line.filled.set()
        for request_id, message in item.refused:
            if (stream := self._streams.get(request_id)) and not stream.ended:
                self._refuse(stream, message)
        for output in item.outputs:
            if (stream := self._streams.get(output.request_id)) and not stream.ended:
                self._take(stream, output)
                life.fruitful = life.fruitful or stream.fruitful or output.finish_reason in ("stop", "length")

    def _take(self, stream: OpenStream, output: SequenceOutput) -> None:
        first, before = not stream.answered, stream.fruitful
        if first:
            # A request for prompt logprobs computes its whole prompt, so its cached tokens say nothing of the cache.
            scored = stream.request.params.prompt_logprobs is not None
            self._balancer.started(stream.name, None if scored else output.cached_tokens)
        self._balancer.progressed(stream.name, len(output.token_ids), 0 if first else 1)
        self._admission.progressed(stream.name, len(output.token_ids))
        stream.queue.put_nowait(stream.take(output))
        if stream.ended:
            self._admission.left(stream.name, stopped=output.finish_reason == "stop")
        if (stream.fruitful and not before) or stream.ended:
            self._settle(stream)

    def _end_all(self, reason: str) -> None:
        """End every open stream with the reason, and refuse later requests with it."""
        self._down = self._down or reason
        for stream in self._streams.values():
            stream.end(self._down, "abort")


def _pace_of(info: RankInfo) -> StepTimes | None:
    """Return the measured step times of a rank; None if they were not measured."""
    if info.step_costs is None:
        return None
    config = info.config
    return StepTimes.reported(
        info.step_costs, config.prefill_share, info.speculative_num_draft_tokens, config.attn_dp_size
    )
