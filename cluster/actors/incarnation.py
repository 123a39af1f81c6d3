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
from cluster.actors.grammar_transfer import name_of
from cluster.actors.messages import Failure, Heartbeat, LoadError
from cluster.actors.placement import Placement
from cluster.actors.shard import ACTOR_OPTIONS, FACTORY, ShardActor
from cluster.arch.hub import is_pinned
from cluster.config import ConfigError, EngineConfig
from cluster.observability.logs import LogSettings, first_line
from cluster.status import EngineStatus, RankInfo

logger = logging.getLogger(__name__)

NAMESPACE = "aerie"
CONTROL_TIMEOUT_S = 0.5  # a control call that takes longer counts as unanswered
LOOK_S = 1.0  # between two checks of shards that are loading
REASON_TIMEOUT_S = 0.5  # after the first load error: how long to wait for errors that are closer to the cause
OUTPUTS_AHEAD = 4  # the most unread stream items at the replica; beyond that a shard puts several steps into one item


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
    decided: Mapping[str, str] = field(default_factory=dict)  # facts settled before the start, for /server_info
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

    Times are those of this process's monotonic clock ("our clock").
    """

    def __init__(self, spec: GangSpec, placement: Placement, epoch: int) -> None:
        self.spec = spec
        self.epoch = epoch
        self.shards: list[Any] = []
        self.infos: list[RankInfo] = []
        self.beats: list[Heartbeat | None] = [None] * spec.world
        self.alarm = asyncio.Event()  # set by every piece of evidence that this incarnation is over
        self.fetched_s = 0.0
        self.last_item = 0.0  # when a step item last came from any rank; 0.0 before the first
        self.fruitful = False  # whether any request got tokens beyond its first one, or ended normally
        self._placement = placement
        self._deaths = [""] * spec.world
        self._failures: list[Failure | None] = [None] * spec.world
        self._answered: list[float] = []  # when each rank last answered
        self._asking: list[asyncio.Task[None] | None] = [None] * spec.world
        self._following: list[asyncio.Task[None]] = []
        self._context = contextvars.Context()

    async def begin(self, timeout_s: float, still_s: float = math.inf) -> None:
        """Create the shards and load them in parallel. After an error the caller must call `kill`. Before loading, one
        shard of each node downloads the hub's models that the node lacks; `fetched_s` is the time of these downloads,
        which does not count against the limits.

        Raises:
            ConfigError: the engine refused its config or a checkpoint.
            GangStartError: a shard died or failed while loading, loading took longer than `timeout_s`, or no rank made
                progress for `still_s`.
        """
        self._context = contextvars.copy_context()
        self.shards = [self._create(rank) for rank in range(self.spec.world)]
        self._answered = [time.monotonic()] * self.spec.world
        if is_pinned(self.spec.config):
            began = time.monotonic()
            await self._fetch()
            self.fetched_s = time.monotonic() - began
        until = time.monotonic() + timeout_s
        meeting = None
        if self.spec.world > 1:
            meeting = (await self._loaded([_named(0, self.shards[0].open_store.remote())], until, still_s))[0]
        loads = [_named(rank, shard.load.remote(self.spec.config, meeting)) for rank, shard in enumerate(self.shards)]
        self.infos = await self._loaded(loads, until, still_s)
        self._unask()  # forget the heartbeats of the loading, those in flight included
        self.beats = [None] * self.spec.world
        self._deaths, self._failures = [""] * self.spec.world, [None] * self.spec.world
        self.alarm.clear()
        self._answered = [time.monotonic()] * self.spec.world
        self._following = [asyncio.create_task(self._follow(rank)) for rank in range(self.spec.world)]

    async def _fetch(self) -> None:
        """Have the first rank of each node download the models for all ranks of that node.

        Raises:
            ConfigError, GangStartError: a node could not download them.
        """
        nodes = self._placement.nodes
        first = [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]
        fetching = [_named(rank, self.shards[rank].fetch.remote(self.spec.config)) for rank in first]
        await self._loaded(fetching, math.inf, math.inf)

    async def _loaded(self, loads: Sequence[Any], until: float, still_s: float) -> list[Any]:
        """Wait for all calls in `loads` and return their answers, until the time `until` or `still_s` without progress.

        Raises:
            ConfigError, GangStartError: if several ranks fail, the error that is closest to the cause.
        """
        tasks = [asyncio.ensure_future(load) for load in loads]
        try:
            return await self._all_of(tasks, until, still_s)
        finally:
            for task in tasks:
                task.cancel()

    async def _all_of(self, tasks: Sequence[asyncio.Task[Any]], until: float, still_s: float) -> list[Any]:
        """Do the waiting of `_loaded`, which afterwards cancels the tasks that have not ended."""
        began = time.monotonic()
        late, why = set(tasks), ""
        while late and not why and not any(task.exception() for task in tasks if task.done()):
            self.ask()
            wait_s = min(LOOK_S, max(0.0, until - time.monotonic()))
            _, late = await asyncio.wait(late, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
            if late and time.monotonic() > until:
                setting = "restart_timeout_s" if self.epoch else "start_timeout_s"
                why = f"did not load within {time.monotonic() - began:.0f} s; raise {setting} if its disk is slow"
            elif late and (still := time.monotonic() - self._last_progress()) > still_s:
                why = f"did not load: no rank has done anything for {still:.0f} s"
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if errors and late:  # peers may fail before the rank at fault has reported its error
            more, late = await asyncio.wait(late, timeout=REASON_TIMEOUT_S)
            errors += [error for task in more if (error := task.exception()) is not None]
        if errors:
            raise min(errors, key=_says_little)
        if late:
            ranks = ", ".join(str(rank) for rank, task in enumerate(tasks) if task in late)
            raise GangStartError(f"rank {ranks} {why}")
        return [task.result() for task in tasks]

    def _last_progress(self) -> float:
        """The time of the latest progress of any rank, by the heartbeats."""
        heard = zip(self._answered, self.beats, strict=True)
        return max(at - (0.0 if beat is None else beat.age_s) for at, beat in heard)

    def _create(self, rank: int) -> Any:
        options = self._placement.options(rank)
        neighbours = self._placement.nodes.count(self._placement.nodes[rank])
        remote: Any = ray.remote  # its type overloads lack concurrency groups
        actor = remote(**ACTOR_OPTIONS)(ShardActor)
        name = f"{self.spec.name}#{rank}.{self.epoch}"
        return actor.options(name=name, namespace=NAMESPACE, **options).remote(
            rank, self.spec.world, neighbours, self.spec.factory, self.epoch, self.spec.log
        )

    def open_stream(self, rank: int) -> Any:
        """Return the stream of a leader's step items. Reading the stream raises RayActorError if the shard dies."""
        outputs = self.shards[rank].outputs
        return outputs.options(num_returns="streaming", _generator_backpressure_num_objects=OUTPUTS_AHEAD).remote()

    def read_grammar(self, leader: int, grammar: str) -> asyncio.Task[tuple[str, str]]:
        """Have the ranks of a leader's group read a compiled grammar. The task returns the name under which the ranks
        keep the grammar, and why a rank cannot use it (empty if all ranks can).
        """
        group = range(leader, leader + self.spec.world // len(self.spec.leaders))
        # In the owner's context, not a request's: see `ask`.
        return asyncio.create_task(self._read_grammar(group, grammar), context=self._context)

    async def _read_grammar(self, group: Sequence[int], grammar: str) -> tuple[str, str]:
        try:  # hashing and storing megabytes must not block the event loop
            name, put = await asyncio.to_thread(lambda: (name_of(grammar), ray.put(grammar)))
        except Exception as error:
            return "", f"a grammar of {len(grammar)} characters cannot be sent: {first_line(error)}"
        asked = [self.shards[rank].read_grammar.remote(name, put) for rank in group]
        for rank, ref in zip(group, asked, strict=True):
            try:
                if reason := await ref:
                    return name, f"rank {rank}: {reason}"
            except RayActorError as error:
                self.mark_dead(rank, error)
            except Exception as error:
                self.mark_failed(rank, f"reading a grammar failed: {first_line(error)}")
        return name, ""

    async def pulse(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Ask every rank for its heartbeat, and wait for the answers for at most `timeout_s`."""
        if waiting := self.ask():
            await asyncio.wait(waiting, timeout=timeout_s)

    def ask(self) -> list[asyncio.Task[None]]:
        """Ask each rank for its heartbeat unless an earlier call is unanswered; return all unanswered calls."""
        if not self.shards:
            return []
        for rank, task in enumerate(self._asking):
            if task is None or task.done():
                # In the owner's context: Serve cancels actor calls made in the context of a request that ends.
                self._asking[rank] = asyncio.create_task(self._ask(rank), context=self._context)
        return [task for task in self._asking if task is not None]

    async def _ask(self, rank: int) -> None:
        try:
            self.beats[rank] = await self.shards[rank].heartbeat.remote()
            self._answered[rank] = time.monotonic()
        except RayActorError as error:
            self.mark_dead(rank, error)
        except Exception as error:
            self.mark_failed(rank, f"its heartbeat failed: {first_line(error)}")

    async def _follow(self, rank: int) -> None:
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
        """Note that Ray has reported a shard dead."""
        self._deaths[rank] = self._deaths[rank] or f"the process died ({first_line(error)})"
        self.alarm.set()

    def mark_failed(self, rank: int, reason: str) -> None:
        """Note that a shard no longer works, unless a failure is already noted."""
        if self._failures[rank] is None:
            beat = self.beats[rank]
            where = (0, "start") if beat is None else (beat.step, beat.phase)
            self._failures[rank] = Failure(rank, "failed", rank, *where, reason)
        self.alarm.set()

    def mark_alive(self) -> None:
        """Note that a step item came from some rank: the ranks step together, so all ranks were alive."""
        self.last_item = time.monotonic()

    def heard(self, rank: int) -> tuple[float, EngineStatus] | None:
        """Return when a rank's last heartbeat arrived and the engine's status in it; None before the first one."""
        beat = self.beats[rank]
        return None if beat is None else (self._answered[rank], beat.status)

    def forgive(self, seconds: float) -> None:
        """Do not count `seconds` as silence: this process itself was stopped and could not hear the ranks."""
        self._answered = [at + seconds for at in self._answered]

    def last_sign(self, rank: int) -> float:
        """The time when a rank was last known to be alive."""
        return max(self._answered[rank], self.last_item) if self._answered else time.monotonic()

    def signs(self) -> list[RankEvidence]:
        """Return the present evidence of every rank."""
        now = time.monotonic()
        found = []
        for rank, asking in enumerate(self._asking):
            silence = now - self._answered[rank] if asking is not None and not asking.done() else 0.0
            found.append(RankEvidence(self.beats[rank], max(0.0, silence), self._deaths[rank], self._failures[rank]))
        return found

    async def stop(self, timeout_s: float) -> None:
        """End all loops together after their present step; wait for at most `timeout_s`."""
        self._unfollow()
        if stops := [asyncio.ensure_future(_settled(shard.stop.remote())) for shard in self.shards]:
            _, late = await asyncio.wait(stops, timeout=timeout_s)
            for task in late:
                task.cancel()

    def kill(self) -> None:
        """End the shards now. Safe to call twice."""
        self._unfollow()
        for shard in self.shards:
            ray.kill(shard, no_restart=True)
        self.shards = []

    def _unfollow(self) -> None:
        self._unask()
        for task in self._following:
            task.cancel()
        self._following = []

    def _unask(self) -> None:
        for task in self._asking:
            if task is not None:
                task.cancel()
        self._asking = [None] * self.spec.world


def _says_little(error: BaseException) -> int:
    """Sort key of load errors; the smallest is closest to the cause: 0 for a ConfigError, 1 for a rank's own error, 2
    for the report of a lost peer. `_named` marks the last kind by `raise ... from cause`, and all others by `from
    None`; so only reports of lost peers have a LoadError as `__cause__`.
    """
    return 0 if isinstance(error, ConfigError) else 2 if isinstance(error.__cause__, LoadError) else 1


async def _named(rank: int, ref: Any) -> Any:
    """Await an actor call made while the gang starts. Raise a ConfigError with its own message, and any other error as
    a GangStartError that names the rank. `_says_little` relies on `from cause` and `from None` below.
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


async def _settled(ref: Any) -> None:
    """Await an answer and ignore Ray's errors."""
    try:
        await ref
    except RayError:
        return
