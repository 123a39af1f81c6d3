"""The client side of a gang, on the event loop of its replica: sends requests to the leaders, distributes the outputs.

A leader is the first rank of an attention group. One actor call per leader carries all submits and aborts that gathered
during the previous call. One stream per leader brings back the items of its steps (`StepItem`); their outputs go to one
queue per request. Admission is decided here, before a shard gets a request. While the gang restarts, streams and new
requests wait here. When the gang serves again, all are submitted; a stream that already had tokens continues after its
last token.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from cluster.actors.admission import Admission
from cluster.actors.balance import Balancer
from cluster.actors.coalesced_call import CoalescedCall
from cluster.actors.gang import Gang
from cluster.actors.grammar_transfer import with_grammar
from cluster.actors.incarnation import Incarnation
from cluster.actors.messages import Commands, GangStatus, Loss, Overloaded, StepItem, Unavailable
from cluster.actors.open_requests import OpenRequest, QueueReport
from cluster.actors.peer_gangs import deployment_samples
from cluster.actors.prefill_speed import Drift
from cluster.actors.streams import Recovery, StreamRefusal
from cluster.config.resolved import ResolvedSettings
from cluster.observability.logs import first_line
from cluster.observability.step_times import StepTimes
from cluster.request import Request, Seeds, SequenceOutput
from cluster.status import RankInfo

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 0.5  # after a loss: the longest time to read items that the killed shards had already sent


# A coroutine function that sends to one leader or reads from it; it takes the incarnation and the leader's rank.
LeaderTask = Callable[[Incarnation, int], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class CommandQueue:
    """Commands that gather for one leader until the next actor call; see `Commands` for the fields. `filled` is set
    while there are commands.
    """

    submits: list[Request] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> Commands:
        """Return everything that gathered, and empty the queue."""
        commands = Commands(tuple(self.submits), tuple(self.aborts), tuple(self.suspects), tuple(self.confirmed))
        for commands_of_kind in (self.submits, self.aborts, self.suspects, self.confirmed):
            commands_of_kind.clear()
        self.filled.clear()
        return commands


class Router:
    """Implements two interfaces for one gang: `EngineClient`, which the REST layer calls, and `Owner`, which the gang
    calls when it goes down, when it serves again and when it is given up.
    """

    def __init__(self, gang: Gang, on_resumed: Callable[[], None] | None = None, replica_rank: int = 0) -> None:
        """`on_resumed` is called for every stream that is submitted again to a new incarnation of the gang.

        A request without a seed gets the next seed of a generator, in the order of admission. The generator is seeded
        with `random_seed` and `replica_rank`, the replica's rank in its deployment. So after a restart of the server
        the same requests in the same order get the same seeds. The generator draws 62 bits for each seed, so it is
        very unlikely that two requests share one.
        """
        resolved = ResolvedSettings.from_settings(gang.spec.config)
        self._on_resumed = on_resumed
        self._gang = gang
        self._streams: dict[str, OpenRequest] = {}
        self._balancer = Balancer.of(resolved)
        self._samples = CoalescedCall(lambda: deployment_samples(gang))
        self._admission = Admission(resolved, queue_report=self._queue_report)
        self._seeds = Seeds(f"{gang.spec.config.random_seed}/{replica_rank}")
        self._incarnation: Incarnation | None = None  # the incarnation that requests go to; None while they wait
        self._command_queues: dict[int, CommandQueue] = {}  # by leader
        self._recovery = Recovery[OpenRequest]()
        self._reader_tasks: list[asyncio.Task[None]] = []
        self._sender_tasks: list[asyncio.Task[None]] = []
        self._grammar_tasks: set[asyncio.Task[tuple[str, str]]] = set()
        self._watch_task: asyncio.Task[None] | None = None
        self._closed_reason = ""

    @property
    def lost_reason(self) -> str:
        """Why the gang is given up; empty while it serves or restarts."""
        return self._gang.lost_reason

    def start(self) -> None:
        """Begin to read the leaders' streams and to watch the gang; call this on the replica's event loop.

        A request's own task must never make an actor call: when the client leaves, Serve cancels the actor calls of
        that task, and would also cancel the commands of other requests in the same call. So the tasks that this method
        starts send the commands.
        """
        self.on_up()
        self._watch_task = asyncio.create_task(self._gang.watch(self), name="gang-watch")

    def end_streams(self) -> None:
        """End every open stream as aborted, and refuse later requests: the server is shutting down."""
        self._end_all("the server is shutting down")

    async def close(self) -> None:
        """End the open streams, stop reading, and stop watching the gang. Ending the gang is left to the caller."""
        self.end_streams()
        tasks = [
            *self._reader_tasks,
            *self._sender_tasks,
            *self._grammar_tasks,
            *([self._watch_task] if self._watch_task else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_up(self) -> None:
        """Begin to use the gang's present incarnation, which serves now: read from its leaders, send to them, and
        submit the open streams that `Recovery` allows now.
        """
        incarnation = self._gang.incarnation
        assert incarnation is not None
        self._incarnation = incarnation
        self._command_queues = {rank: CommandQueue() for rank in incarnation.spec.leaders}
        info = self._gang.infos[0]
        self._balancer.on_restart(info.kv_pages)
        self._admission.on_gang_up(info.kv_tokens, _step_times_of(info))
        self._reader_tasks = [
            self._start_task(incarnation, rank, "outputs", self._read) for rank in self._command_queues
        ]
        self._sender_tasks = [
            self._start_task(incarnation, rank, "commands", self._send) for rank in self._command_queues
        ]
        for stream in self._recovery.begin([s for s in self._streams.values() if not s.ended]):
            self._submit(stream)

    async def on_down(self, loss: Loss) -> None:
        """Record that the incarnation is over. For up to `DRAIN_TIMEOUT_S`, items that its shards had already sent
        still go to their streams; then the streams wait for the next incarnation.
        """
        await asyncio.wait(self._reader_tasks, timeout=DRAIN_TIMEOUT_S)
        self._incarnation = None
        self._admission.on_gang_down()
        for task in (*self._reader_tasks, *self._sender_tasks):
            task.cancel()
        self._reader_tasks, self._sender_tasks = [], []
        nodes = self._gang.infos[0].speculative_num_draft_tokens - 1
        open_streams = [stream for stream in self._streams.values() if not stream.ended]
        for stream in open_streams:
            stream.on_incarnation_lost(nodes)
        self._recovery.on_loss(open_streams, loss)

    def on_lost(self, reason: str) -> None:
        """Record that the gang is given up: end every stream with the reason."""
        self._end_all(reason)

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        """Stream one output per step that produced tokens of the request; see `EngineClient.generate`."""
        if self._closed_reason:
            raise Unavailable(self._closed_reason, max(1, math.ceil(self._gang.start_s)))
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

    def overload(self) -> Overloaded | None:
        """Return why even a short request would be refused now; see `EngineClient.overload`."""
        return None if self._closed_reason else self._admission.overload()

    async def status(self) -> GangStatus:
        """Return health and load now; see `EngineClient.status`."""
        if not self._closed_reason:
            await self._gang.request_heartbeats()
        reason = self._closed_reason or self._gang.unhealthy_reason()
        started = sum(stream.started for stream in self._streams.values())
        return GangStatus(
            healthy=not reason,
            reason=reason,
            queued_tokens=round(self._admission.queued_tokens),
            running=started,
            history=self._gang.history(),
            ranks=tuple(self._gang.infos),
            heartbeats=tuple(beat for beat in self._gang.heartbeats if beat is not None),
        )

    async def metrics(self) -> list[bytes]:
        """Return the metrics of all ranks of the deployment and of the other replicas, as serialised registries."""
        return await self._samples.get()

    def _admit(self, request: Request) -> OpenRequest:
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is already being served")
        # `propose` below raises if the request names a rank that does not exist.
        expected_new_tokens = self._admission.expected_new_tokens(request)
        choice = self._balancer.propose(request, expected_new_tokens)
        if not request.resumed_tokens:  # a request with resumed tokens was admitted before, by another replica
            self._admission.check(request, choice)
        stream = OpenRequest(self._seeds.fill(request))
        self._balancer.choose(stream, expected_new_tokens, choice)
        self._streams[request.request_id] = stream
        self._admission.on_admitted(stream)
        if self._incarnation is not None and self._recovery.on_arrival(stream):
            self._submit(stream)
        return stream

    def _leader(self, stream: OpenRequest) -> int:
        return self._gang.spec.leaders[stream.choice.rank]

    def _queue_report(self, dp_rank: int) -> QueueReport | None:
        """Return a rank's last report of its queue and its step times. Return None if there was none yet, or while the
        gang does not serve.
        """
        last_status = (
            None if self._incarnation is None else self._incarnation.last_status(self._gang.spec.leaders[dp_rank])
        )
        if last_status is None:
            return None
        received_at, status = last_status
        drift = Drift(status.decode_drift, status.prompt_drift, status.prefill_drift)
        return QueueReport(received_at, status.queued_tokens, status.submitted, drift)

    def _submit(self, stream: OpenRequest) -> None:
        """Submit a stream's request to the present incarnation."""
        is_resubmission = stream.submissions > 0
        request = stream.submission()
        if is_resubmission:  # choose the rank again: the caches are empty, and the load may have changed
            self._balancer.choose(stream, self._admission.expected_new_tokens(request))
            self._admission.on_resubmitted(stream.name)
            if self._on_resumed is not None:
                self._on_resumed()
        grammar = request.params.grammar
        if grammar is None:
            self._enqueue_submit(stream, request)
            return
        assert self._incarnation is not None
        grammar_task, epoch = self._incarnation.read_grammar(self._leader(stream), grammar), self._incarnation.epoch
        self._grammar_tasks.add(grammar_task)
        grammar_task.add_done_callback(lambda task: self._on_grammar_read(task, stream, request, epoch))

    def _on_grammar_read(
        self, task: asyncio.Task[tuple[str, str]], stream: OpenRequest, request: Request, epoch: int
    ) -> None:
        """Submit a stream's request, or refuse it, after the ranks of its group have read its grammar."""
        self._grammar_tasks.discard(task)
        if stream.ended or task.cancelled() or self._incarnation is None or self._incarnation.epoch != epoch:
            return  # the next incarnation reads the grammar again
        name, reason = task.result()
        if reason:
            self._refuse(stream, reason)
        else:
            self._enqueue_submit(stream, with_grammar(request, name))

    def _refuse(self, stream: OpenRequest, reason: str) -> None:
        """End a stream whose request the engine refused: as refused, or with an error if tokens were already sent."""
        if stream.sent_tokens:
            stream.end(f"the engine would not resume it: {reason}")
        else:
            stream.refuse(reason)
        self._on_settled(stream)

    def _enqueue_submit(self, stream: OpenRequest, request: Request) -> None:
        """Submit a stream's request with the next call to its leader."""
        command_queue = self._command_queues[self._leader(stream)]
        command_queue.submits.append(request)
        self._admission.on_submitted(stream.name)
        if stream.submissions_without_progress:
            command_queue.suspects.append(stream.name)
        command_queue.filled.set()

    def _forget(self, stream: OpenRequest) -> None:
        """Forget a stream whose reader is gone; if the stream had not ended, abort its request."""
        if self._streams.pop(stream.name, None) is None:
            return
        self._balancer.on_ended(stream.name, stream.sent_tokens)
        self._admission.on_ended(stream.name, stopped=False)
        if not stream.ended:
            stream.on_reader_gone()
            if stream.submitted and self._incarnation is not None:
                command_queue = self._command_queues[self._leader(stream)]
                command_queue.aborts.append(stream.name)
                command_queue.filled.set()
            self._on_settled(stream)

    def _on_settled(self, stream: OpenRequest) -> None:
        """Record that a stream went on in this incarnation (it got more tokens than its first one) or ended. Submit the
        streams that `Recovery` has held back until now and allows now.
        """
        if self._incarnation is not None:
            for released_stream in self._recovery.on_settled(stream.name):
                self._submit(released_stream)

    def _start_task(self, incarnation: Incarnation, rank: int, name: str, work: LeaderTask) -> asyncio.Task[None]:
        """Start a task that sends to a leader or reads from it. If the task fails, the incarnation is over."""

        async def watched() -> None:
            try:
                await work(incarnation, rank)
            except RayActorError as error:
                incarnation.mark_dead(rank, error)
            except Exception as error:
                logger.exception("rank %d: its %s failed", rank, name)
                incarnation.mark_failed(rank, f"its {name} failed: {first_line(error)}")

        return asyncio.create_task(watched(), name=f"{name}-{rank}")

    async def _send(self, incarnation: Incarnation, rank: int) -> None:
        """Send a leader the commands that gathered for it, one call at a time."""
        command_queue, shard = self._command_queues[rank], incarnation.shards[rank]
        while True:
            await command_queue.filled.wait()
            await shard.put.remote(command_queue.take())

    async def _read(self, incarnation: Incarnation, rank: int) -> None:
        """Distribute a leader's step items to the streams until its shard ends."""
        async for ref in incarnation.open_stream(rank):
            for item in await ref:
                incarnation.mark_alive()
                self._distribute(incarnation, item)

    def _distribute(self, incarnation: Incarnation, item: StepItem) -> None:
        """Pass each part of a step item to its stream."""
        for request_id in item.admitted:
            if stream := self._streams.get(request_id):
                stream.on_admitted()
                if stream.submissions_without_progress:  # the step that admits a suspect waits for this confirmation
                    command_queue = self._command_queues[self._leader(stream)]
                    command_queue.confirmed.append(stream.name)
                    command_queue.filled.set()
        for request_id, message in item.refused:
            if (stream := self._streams.get(request_id)) and not stream.ended:
                self._refuse(stream, message)
        for output in item.outputs:
            if (stream := self._streams.get(output.request_id)) and not stream.ended:
                self._deliver(stream, output)
                incarnation.made_progress = (
                    incarnation.made_progress or stream.made_progress or output.finish_reason in ("stop", "length")
                )

    def _deliver(self, stream: OpenRequest, output: SequenceOutput) -> None:
        is_first_output, had_progress = not stream.has_first_token, stream.made_progress
        if is_first_output:
            # A request for prompt logprobs computes its whole prompt, even if the rank has cached a part of it. So the
            # number of its cached tokens says nothing about the rank's cache.
            has_prompt_logprobs = stream.request.params.prompt_logprobs is not None
            self._balancer.on_first_output(stream.name, None if has_prompt_logprobs else output.cached_tokens)
        stream.queue.put_nowait(stream.record(output))
        self._balancer.on_tokens(stream.name, len(output.token_ids), 0 if is_first_output else 1)
        self._admission.on_tokens(stream.name, len(output.token_ids))
        if stream.ended:
            self._admission.on_ended(stream.name, stopped=output.finish_reason == "stop")
        if (stream.made_progress and not had_progress) or stream.ended:
            self._on_settled(stream)

    def _end_all(self, reason: str) -> None:
        """End every open stream with the reason, and refuse later requests with it."""
        self._closed_reason = self._closed_reason or reason
        for stream in self._streams.values():
            stream.end(self._closed_reason, "abort")


def _step_times_of(info: RankInfo) -> StepTimes | None:
    """Return the measured step times of a rank; None if they were not measured."""
    if info.step_costs is None:
        return None
    config = info.config
    return StepTimes.from_costs(
        info.step_costs, config.prefill_share, info.speculative_num_draft_tokens, config.attn_dp_size
    )
