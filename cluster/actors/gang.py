"""A gang: the shards of one engine, started together, watched together, ended together.

The replica that made a gang owns it. Should the replica die without a word, Ray ends the shards (their owner is gone)
and the placement group (its creator is gone), so nothing is left behind either way.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from cluster.actors.messages import Heartbeat
from cluster.actors.placement import Layout, Placement, reserve
from cluster.actors.shard import ACTOR_OPTIONS, FACTORY, ShardActor
from cluster.config import ConfigError, EngineConfig

logger = logging.getLogger(__name__)

NAMESPACE = "aerie"
CONTROL_TIMEOUT_S = 0.5  # a control call that takes longer counts as unanswered
GIVE_UP = 3.0  # a stall of this many watchdog limits is for good
OUTPUTS_AHEAD = 4  # stream items that may lie unread at the replica before a shard collects several steps in one


class GangError(RuntimeError):
    """A shard could not be started; the message names the rank."""


@dataclass(frozen=True, slots=True)
class GangSpec:
    """What to start: the engine's config, where its ranks go, and the name under which its shards are found."""

    config: EngineConfig
    layout: Layout
    name: str
    factory: str = FACTORY
    load_timeout_s: float = 3600.0


class Gang:
    """The handles of the shards, by rank, and what is known of their health."""

    def __init__(self, spec: GangSpec) -> None:
        self.spec = spec
        self.shards: list[Any] = []
        self.infos: list[dict[str, Any]] = []
        self.beats: list[Heartbeat | None] = []
        self._placement: Placement | None = None
        self._answered: list[float] = []  # when each rank last answered, on our clock
        self._asking: list[asyncio.Task[None] | None] = []
        self._failed = ""
        self._context = contextvars.Context()

    @property
    def world(self) -> int:
        """How many ranks."""
        return self.spec.layout.world

    async def start(self) -> None:
        """Reserve the bundles, create the shards and load them side by side.

        Raises:
            PlacementError: no room.
            ConfigError: the engine refused its config or a checkpoint.
            GangError: a shard died or failed while loading.
        """
        try:
            self._placement = await reserve(self.spec.layout, self.spec.name)
            self.shards = [self._create(rank) for rank in range(self.world)]
            loads = [_named(rank, shard.load.remote(self.spec.config)) for rank, shard in enumerate(self.shards)]
            self.infos = await asyncio.wait_for(asyncio.gather(*loads), self.spec.load_timeout_s)
        except BaseException:
            self.kill()
            raise
        self._context = contextvars.copy_context()
        self.beats = [None] * self.world
        self._answered = [time.monotonic()] * self.world
        self._asking = [None] * self.world

    def _create(self, rank: int) -> Any:
        assert self._placement is not None
        options = self._placement.options(rank)
        neighbours = self._placement.nodes.count(self._placement.nodes[rank])
        remote: Any = ray.remote  # its overloads know no concurrency groups
        actor = remote(**ACTOR_OPTIONS)(ShardActor)
        return actor.options(name=f"{self.spec.name}#{rank}", namespace=NAMESPACE, **options).remote(
            rank, self.world, neighbours, self.spec.factory
        )

    def open_stream(self, rank: int) -> Any:
        """The stream of a rank's step items; it raises RayActorError when the shard dies."""
        outputs = self.shards[rank].outputs
        return outputs.options(num_returns="streaming", _generator_backpressure_num_objects=OUTPUTS_AHEAD).remote()

    async def pulse(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Ask every rank for its heartbeat; those that answer within the time are brought up to date."""
        for rank in range(len(self.beats)):
            task = self._asking[rank]
            if task is None or task.done():  # at most one question open per rank, however long it hangs
                # in the owner's context, not the caller's: Serve cancels what the task of a request has called
                self._asking[rank] = asyncio.create_task(self._ask(rank), context=self._context)
        waiting = [task for task in self._asking if task is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)

    async def _ask(self, rank: int) -> None:
        try:
            self.beats[rank] = await self.shards[rank].heartbeat.remote()
            self._answered[rank] = time.monotonic()
        except RayActorError as error:
            self.mark_dead(rank, error)

    def mark_dead(self, rank: int, error: Exception) -> str:
        """A shard is gone; the gang is unhealthy from now on. Returns the reason."""
        if not self._failed:
            first = str(error).strip().splitlines()
            self._failed = f"rank {rank}: the shard died ({first[0] if first else type(error).__name__})"
            logger.error("gang %s: %s", self.spec.name, self._failed)
        return self._failed

    def trouble(self) -> str:
        """Why the gang is unhealthy now, naming the rank; empty when it is well. A rank that stalls may come back."""
        return self._trouble(self.spec.config.watchdog_timeout_s)

    def _trouble(self, limit: float) -> str:
        if self._failed:
            return self._failed
        now = time.monotonic()
        for rank, beat in enumerate(self.beats):
            if beat is not None and beat.failed:
                return beat.failed
            asking = self._asking[rank]
            silence = now - self._answered[rank] if asking is not None and not asking.done() else 0.0
            if silence > limit:
                return f"rank {rank}: no heartbeat for {silence:.1f} s (the limit is {limit:g} s)"
            if beat is not None and beat.busy and beat.age_s > limit:
                return f"rank {rank}: busy without a step for {beat.age_s:.1f} s (the limit is {limit:g} s)"
        return ""

    async def watch(self, on_lost: Callable[[str], None]) -> None:
        """Keep the pulse until the gang is lost, report that once, and end.

        Lost is a dead shard, a failed step, or a stall of `GIVE_UP` times the watchdog's limit.
        """
        limit = self.spec.config.watchdog_timeout_s
        period = min(1.0, limit / 4)
        said = ""
        while True:
            await self.pulse(timeout_s=period)
            if reason := self._trouble(limit * GIVE_UP):
                logger.error("gang %s is lost: %s", self.spec.name, reason)
                on_lost(reason)
                return
            reason = self.trouble()
            if bool(reason) != bool(said):
                logger.warning("gang %s: %s", self.spec.name, reason or "well again")
            said = reason
            await asyncio.sleep(period)

    async def stop(self, timeout_s: float = 3.0) -> None:
        """End the loops after their step, then the shards and the placement group."""
        stops = [shard.stop.remote() for shard in self.shards]
        if stops:
            waits = [asyncio.ensure_future(_settled(ref)) for ref in stops]
            await asyncio.wait(waits, timeout=timeout_s)
        self.kill()

    def kill(self) -> None:
        """End everything now. Safe to call twice."""
        for task in self._asking:
            if task is not None:
                task.cancel()
        for shard in self.shards:
            ray.kill(shard, no_restart=True)
        self.shards, self.beats = [], []
        if self._placement is not None:
            self._placement.remove()
            self._placement = None


async def _named(rank: int, ref: Any) -> Any:
    """Await a load; a refusal of the config comes through as itself, everything else names the rank."""
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigError):
            raise ConfigError(str(cause)) from None
        raise GangError(f"rank {rank} could not load: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise GangError(f"rank {rank} died while loading: {error}") from error


async def _settled(ref: Any) -> None:
    """Await an answer, whatever it is."""
    try:
        await ref
    except (RayActorError, RayTaskError):
        return
