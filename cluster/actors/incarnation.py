"""One incarnation of a gang: the shards (actors, one per rank) from their creation to their end. A gang that loses a
rank gets a new incarnation.
"""

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.actors.blame import RankEvidence
from cluster.actors.cluster_capacity import Layout
from cluster.actors.grammar_transfer import grammar_name
from cluster.actors.messages import Failure, Heartbeat, LoadError
from cluster.actors.placement import Placement
from cluster.actors.shard import ACTOR_OPTIONS, FACTORY, ShardActor
from cluster.arch.hub import is_pinned
from cluster.config import ConfigError, EngineConfig
from cluster.observability.logs import LogSettings, first_line
from cluster.status import EngineStatus, RankInfo

logger = logging.getLogger(__name__)

NAMESPACE = "aerie"
CONTROL_TIMEOUT_S = 0.5  # by default, how long to wait for the answers to heartbeat calls
LOAD_CHECK_PERIOD_S = 1.0  # between two checks of shards that are loading
REASON_TIMEOUT_S = 0.5  # after the first load error: how long to wait for errors that are closer to the cause
# A shard's stream waits while the replica has this many unread objects. The next object then holds the items of several
# steps.
MAX_UNREAD_ITEMS = 4


class GangStartError(RuntimeError):
    """A shard could not be started; the message names the rank."""


@dataclass(frozen=True, slots=True)
class GangSpec:
    """What to start: the engine's config, the layout of its ranks, and the gang's `name`, with which the names of the
    shards and the placement group begin.
    """

    config: EngineConfig
    layout: Layout
    name: str
    factory: str = FACTORY
    decided: Mapping[str, str] = field(default_factory=dict)  # what was decided before the start, for /server_info
    log: LogSettings | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.layout.world

    @property
    def leaders(self) -> range:
        """The first rank of each attention group, by dp rank. These leaders take requests and return outputs."""
        return range(0, self.world, self.world // self.config.attn_dp_size)


class Incarnation:
    """The handles of an incarnation's shards, by rank, and the evidence of each rank's health.

    All times are times of this process's monotonic clock.
    """

    def __init__(self, spec: GangSpec, placement: Placement, epoch: int) -> None:
        self.spec = spec
        self.epoch = epoch
        self.shards: list[Any] = []
        self.infos: list[RankInfo] = []
        self.heartbeats: list[Heartbeat | None] = [None] * spec.world
        self.alarm = asyncio.Event()  # set by every piece of evidence that this incarnation is over
        self.download_s = 0.0
        self.last_item_at = 0.0  # when a step item last came from any rank; 0.0 before the first
        self.made_progress = False  # whether any request got tokens beyond its first one, or ended normally
        self._placement = placement
        self._deaths = [""] * spec.world
        self._failures: list[Failure | None] = [None] * spec.world
        self._answered_at: list[float] = []  # when each rank last answered
        self._heartbeat_calls: list[asyncio.Task[None] | None] = [None] * spec.world
        self._end_watchers: list[asyncio.Task[None]] = []
        self._context = contextvars.Context()

    async def begin(self, timeout_s: float, stall_timeout_s: float = math.inf) -> None:
        """Create the shards and load them in parallel. After an error the caller must call `kill`. Before loading, one
        shard of each node downloads the models from a hub that the node lacks. The time of these downloads does not
        count against the limits; it is stored in `download_s`.

        Raises:
            ConfigError: the engine refused its config or a checkpoint.
            GangStartError: a shard died or failed while loading, loading took longer than `timeout_s`, or no rank made
                progress for `stall_timeout_s`.
        """
        self._context = contextvars.copy_context()
        self.shards = [self._create(rank) for rank in range(self.spec.world)]
        self._answered_at = [time.monotonic()] * self.spec.world
        if is_pinned(self.spec.config):
            started_at = time.monotonic()
            await self._fetch()
            self.download_s = time.monotonic() - started_at
        deadline = time.monotonic() + timeout_s
        store_address = None
        if self.spec.world > 1:
            store_address = (
                await self._await_loads(
                    [_await_named(0, self.shards[0].open_store.remote())], deadline, stall_timeout_s
                )
            )[0]
        loads = [
            _await_named(rank, shard.load.remote(self.spec.config, store_address))
            for rank, shard in enumerate(self.shards)
        ]
        self.infos = await self._await_loads(loads, deadline, stall_timeout_s)
        self._cancel_heartbeat_calls()  # heartbeats that were requested during loading do not count
        self.heartbeats = [None] * self.spec.world
        self._deaths, self._failures = [""] * self.spec.world, [None] * self.spec.world
        self.alarm.clear()
        self._answered_at = [time.monotonic()] * self.spec.world
        self._end_watchers = [asyncio.create_task(self._watch_end(rank)) for rank in range(self.spec.world)]

    async def _fetch(self) -> None:
        """Have the first rank of each node download the models for all ranks of that node.

        Raises:
            ConfigError, GangStartError: a node could not download them.
        """
        nodes = self._placement.node_of_rank
        first_ranks = [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]
        downloads = [_await_named(rank, self.shards[rank].fetch.remote(self.spec.config)) for rank in first_ranks]
        await self._await_loads(downloads, math.inf, math.inf)

    async def _await_loads(self, loads: Sequence[Any], deadline: float, stall_timeout_s: float) -> list[Any]:
        """Wait for all calls in `loads` and return their answers. Give up at the time `deadline`, or after
        `stall_timeout_s` seconds in which no rank made progress.

        Raises:
            ConfigError, GangStartError: a rank failed, or the wait was given up. If several ranks failed, this is the
                error that is closest to the cause.
        """
        tasks = [asyncio.ensure_future(load) for load in loads]
        try:
            return await self._await_all(tasks, deadline, stall_timeout_s)
        finally:
            for task in tasks:
                task.cancel()

    async def _await_all(
        self, tasks: Sequence[asyncio.Task[Any]], deadline: float, stall_timeout_s: float
    ) -> list[Any]:
        """Wait as `_await_loads` does, but do not cancel the tasks that have not ended; `_await_loads` cancels them."""
        started_at = time.monotonic()
        pending, problem = set(tasks), ""
        while pending and not problem and not any(task.exception() for task in tasks if task.done()):
            self.request_heartbeats()
            wait_s = min(LOAD_CHECK_PERIOD_S, max(0.0, deadline - time.monotonic()))
            _, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
            if pending and time.monotonic() > deadline:
                setting = "restart_timeout_s" if self.epoch else "start_timeout_s"
                problem = (
                    f"did not load within {time.monotonic() - started_at:.0f} s; raise {setting} if its disk is slow"
                )
            elif pending and (idle_s := time.monotonic() - self._last_progress()) > stall_timeout_s:
                problem = f"did not load: no rank has done anything for {idle_s:.0f} s"
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if errors and pending:  # peers may fail before the rank at fault has reported its error
            finished, pending = await asyncio.wait(pending, timeout=REASON_TIMEOUT_S)
            errors += [error for task in finished if (error := task.exception()) is not None]
        if errors:
            raise min(errors, key=_distance_from_cause)
        if pending:
            ranks = ", ".join(str(rank) for rank, task in enumerate(tasks) if task in pending)
            raise GangStartError(f"rank {ranks} {problem}")
        return [task.result() for task in tasks]

    def _last_progress(self) -> float:
        """Return the time of the latest progress of any rank, by the heartbeats."""
        answers = zip(self._answered_at, self.heartbeats, strict=True)
        return max(answered_at - (0.0 if heartbeat is None else heartbeat.idle_s) for answered_at, heartbeat in answers)

    def _create(self, rank: int) -> Any:
        options = self._placement.actor_options(rank)
        ranks_on_node = self._placement.node_of_rank.count(self._placement.node_of_rank[rank])
        remote: Any = ray.remote  # Any, because the types of `ray.remote` lack concurrency groups
        actor = remote(**ACTOR_OPTIONS)(ShardActor)
        name = f"{self.spec.name}#{rank}.{self.epoch}"
        return actor.options(name=name, namespace=NAMESPACE, **options).remote(
            rank, self.spec.world, ranks_on_node, self.spec.factory, self.epoch, self.spec.log
        )

    def open_stream(self, rank: int) -> Any:
        """Return the stream of a leader's step items. Reading the stream raises RayActorError if the shard dies."""
        outputs = self.shards[rank].outputs
        return outputs.options(num_returns="streaming", _generator_backpressure_num_objects=MAX_UNREAD_ITEMS).remote()

    def read_grammar(self, leader: int, grammar: str) -> asyncio.Task[tuple[str, str]]:
        """Have the ranks of a leader's attention group read a compiled grammar. The task returns the name under which
        the ranks keep the grammar, and why a rank cannot use it. The reason is empty if all ranks can use the grammar.
        It is also empty if a rank is lost meanwhile, because then the gang restarts.
        """
        group = range(leader, leader + self.spec.world // len(self.spec.leaders))
        # Run the task in the context of the gang's owner, not of a request; see the comment in `request_heartbeats`.
        return asyncio.create_task(self._read_grammar(group, grammar), context=self._context)

    async def _read_grammar(self, group: Sequence[int], grammar: str) -> tuple[str, str]:
        try:  # hashing and storing megabytes must not block the event loop
            name, grammar_ref = await asyncio.to_thread(lambda: (grammar_name(grammar), ray.put(grammar)))
        except Exception as error:
            return "", f"a grammar of {len(grammar)} characters cannot be sent: {first_line(error)}"
        calls = [self.shards[rank].read_grammar.remote(name, grammar_ref) for rank in group]
        for rank, ref in zip(group, calls, strict=True):
            try:
                if reason := await ref:
                    return name, f"rank {rank}: {reason}"
            except RayActorError as error:
                self.mark_dead(rank, error)
            except Exception as error:
                self.mark_failed(rank, f"reading a grammar failed: {first_line(error)}")
        return name, ""

    async def await_heartbeats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Ask every rank for its heartbeat, and wait for the answers for at most `timeout_s`."""
        if waiting := self.request_heartbeats():
            await asyncio.wait(waiting, timeout=timeout_s)

    def request_heartbeats(self) -> list[asyncio.Task[None]]:
        """Ask each rank for its heartbeat, unless an earlier call to this rank is still unanswered. Return all
        unanswered calls, the earlier ones included.
        """
        if not self.shards:
            return []
        for rank, task in enumerate(self._heartbeat_calls):
            if task is None or task.done():
                # The task runs in the context of the gang's owner. When a request ends, Serve cancels all actor calls
                # that were made in the context of this request.
                self._heartbeat_calls[rank] = asyncio.create_task(self._request_heartbeat(rank), context=self._context)
        return [task for task in self._heartbeat_calls if task is not None]

    async def _request_heartbeat(self, rank: int) -> None:
        try:
            self.heartbeats[rank] = await self.shards[rank].heartbeat.remote()
            self._answered_at[rank] = time.monotonic()
        except RayActorError as error:
            self.mark_dead(rank, error)
        except Exception as error:
            self.mark_failed(rank, f"its heartbeat failed: {first_line(error)}")

    async def _watch_end(self, rank: int) -> None:
        """Wait for the end of a rank, and note the reason. Ray reports the death of the rank's process; the rank itself
        reports the end of its loop.
        """
        try:
            failure: Failure | None = await self.shards[rank].end.remote()
        except RayActorError as error:
            self.mark_dead(rank, error)
        except Exception as error:
            self.mark_failed(rank, f"waiting for its end failed: {first_line(error)}")
        else:
            if failure is None:
                self.mark_failed(rank, "its loop ended")
            else:
                self._failures[rank] = failure
                self.alarm.set()

    def mark_dead(self, rank: int, error: Exception) -> None:
        """Record that Ray has reported a shard dead."""
        self._deaths[rank] = self._deaths[rank] or f"the process died ({first_line(error)})"
        self.alarm.set()

    def mark_failed(self, rank: int, reason: str) -> None:
        """Record that a shard does not work, with the reason, unless a failure of this rank is already recorded."""
        if self._failures[rank] is None:
            heartbeat = self.heartbeats[rank]
            position = (0, "start") if heartbeat is None else (heartbeat.step, heartbeat.phase)
            self._failures[rank] = Failure(rank, "failed", rank, *position, reason)
        self.alarm.set()

    def mark_alive(self) -> None:
        """Record that a step item came from some rank: the ranks step together, so all ranks were alive."""
        self.last_item_at = time.monotonic()

    def last_status(self, rank: int) -> tuple[float, EngineStatus] | None:
        """Return when a rank's last heartbeat arrived, and the engine's status in it; None before the first one."""
        heartbeat = self.heartbeats[rank]
        return None if heartbeat is None else (self._answered_at[rank], heartbeat.status)

    def exclude_delay(self, seconds: float) -> None:
        """Take `seconds` off the silence of the ranks: for so long this process was stopped, and read no answers."""
        self._answered_at = [at + seconds for at in self._answered_at]

    def last_alive_at(self, rank: int) -> float:
        """Return the time when a rank was last known to be alive, or the present time before loading begins."""
        return max(self._answered_at[rank], self.last_item_at) if self._answered_at else time.monotonic()

    def evidence(self) -> list[RankEvidence]:
        """Return the present evidence of every rank."""
        now = time.monotonic()
        evidence_of_ranks = []
        for rank, call in enumerate(self._heartbeat_calls):
            silence_s = now - self._answered_at[rank] if call is not None and not call.done() else 0.0
            evidence_of_ranks.append(
                RankEvidence(self.heartbeats[rank], max(0.0, silence_s), self._deaths[rank], self._failures[rank])
            )
        return evidence_of_ranks

    async def stop(self, timeout_s: float) -> None:
        """End all loops together after their present step; wait for at most `timeout_s`."""
        self._cancel_watchers()
        if calls := [asyncio.ensure_future(_ignoring_ray_errors(shard.stop.remote())) for shard in self.shards]:
            _, unfinished = await asyncio.wait(calls, timeout=timeout_s)
            for task in unfinished:
                task.cancel()

    def kill(self) -> None:
        """End the shards now. Safe to call twice."""
        self._cancel_watchers()
        for shard in self.shards:
            ray.kill(shard, no_restart=True)
        self.shards = []

    def _cancel_watchers(self) -> None:
        self._cancel_heartbeat_calls()
        for task in self._end_watchers:
            task.cancel()
        self._end_watchers = []

    def _cancel_heartbeat_calls(self) -> None:
        for task in self._heartbeat_calls:
            if task is not None:
                task.cancel()
        self._heartbeat_calls = [None] * self.spec.world


def _distance_from_cause(error: BaseException) -> int:
    """Return the sort key of a load error; the error with the smallest key is closest to the cause. It is 0 for a
    ConfigError, 1 for a rank's own error, and 2 for a report that a peer is lost or out of step. `_await_named` raises
    an error of the last kind with `from cause`, and all others with `from None`. So only errors of the last kind have
    a LoadError as `__cause__`.
    """
    return 0 if isinstance(error, ConfigError) else 2 if isinstance(error.__cause__, LoadError) else 1


async def _await_named(rank: int, ref: Any) -> Any:
    """Await an actor call made while the gang starts. Raise a ConfigError with its own message, and any other error as
    a GangStartError that names the rank. `_distance_from_cause` relies on `from cause` and `from None` below.
    """
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigError):
            raise ConfigError(str(cause)) from None
        if isinstance(cause, LoadError) and cause.kind != "failed":
            raise GangStartError(f"rank {rank} could not load: {cause}") from cause
        raise GangStartError(f"rank {rank} could not load: {cause}") from None
    except RayActorError as error:
        raise GangStartError(f"rank {rank} died while loading: {first_line(error)}") from None


async def _ignoring_ray_errors(ref: Any) -> None:
    """Await an answer and ignore Ray's errors."""
    try:
        await ref
    except RayError:
        return
