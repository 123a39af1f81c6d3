"""Starts the ranks of one engine (a gang), watches them, and kills and restarts all of them if one is lost.

A shard is the actor of one rank. An incarnation is one run of the gang, from the creation of the shards to their end; a
restart begins a new incarnation. The replica that made a gang owns the gang: if the replica is killed, Ray ends the
shards (their owner died) and the placement group (its creator died).
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from ray.exceptions import RayError

from cluster.actors.blame import Verdict, judge
from cluster.actors.incarnation import CONTROL_TIMEOUT_S, NAMESPACE, GangSpec, GangStartError, Incarnation
from cluster.actors.messages import GangHistory, Heartbeat, Loss
from cluster.actors.placement import Placement, reserve
from cluster.config import KV_SIZES, ConfigError
from cluster.status import RankInfo

__all__ = ["NAMESPACE", "Gang", "GangSpec", "GangStartError", "Owner"]

logger = logging.getLogger(__name__)

GRACE_S = 1.0  # after the first evidence of a loss: how long to wait for evidence that names the rank at fault
FRUITLESS = 16
"""The gang is given up after this many incarnations in a row that ended early and served no request. The number must
exceed what one fatal request costs: among 1,024 requests that began in the fatal step, bisection finds the fatal one in
ten incarnations, and then tries that request alone three times.
"""
RETRY_S = 0.5  # between two attempts to restart
PATIENCE_SHARE = 4.0  # limit of a whole restart, as a multiple of the first start, unless restart_timeout_s is set
PATIENCE_FLOOR_S = 60.0
STILL_SHARE = 2.0  # limit of the time without progress of any rank in one attempt, as a multiple of the first start
STILL_FLOOR_S = 30.0
LOSSES_SHOWN = 32


class Owner(Protocol):
    """Callbacks for the losses and restarts of a gang, called on the event loop that watches it."""

    async def on_down(self, loss: Loss) -> None:
        """An incarnation is over and its shards are killed; step items already sent may be read until this returns."""
        ...

    def on_up(self) -> None:
        """The gang serves again; its new incarnation has no requests yet."""
        ...

    def on_lost(self, reason: str) -> None:
        """The gang will not come back."""
        ...


class Gang:
    """The present incarnation of a gang, and the losses that ended the earlier incarnations."""

    def __init__(self, spec: GangSpec, on_loss: Callable[[Loss], None] | None = None) -> None:
        """`on_loss` is called when a loss is noticed, and a second time if the gang serves again after that loss."""
        self.spec = spec
        self.losses: list[Loss] = []
        self.lost = ""  # why the gang will not come back
        self.epoch = 0
        self._sample: bytes | None = None  # the replica's latest registry sample, kept by rank 0 of each incarnation
        self._on_loss = on_loss
        self._life: Incarnation | None = None
        self._infos: list[RankInfo] = []
        self._placement: Placement | None = None
        self._restarting = ""
        self._start_s = 0.0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.spec.world

    @property
    def life(self) -> Incarnation | None:
        """The incarnation that serves; None before the start, during a restart and after the end."""
        return None if self._restarting else self._life

    @property
    def shards(self) -> list[Any]:
        """The handles of the shards by rank; empty while the gang does not serve."""
        return self.life.shards if self.life else []

    @property
    def infos(self) -> list[RankInfo]:
        """The settings and hardware of each rank of the latest incarnation."""
        return self._infos

    @property
    def beats(self) -> list[Heartbeat | None]:
        """The last heartbeat of every rank of the incarnation that serves."""
        return self.life.beats if self.life else []

    async def start(self) -> None:
        """Reserve the bundles, create the shards and load them in parallel.

        Raises:
            PlacementError: the cluster has too few free resources.
            ConfigError: the engine refused its config or a checkpoint, or the number of bundles is not `tp_size`.
            GangStartError: a shard died or failed while loading.
        """
        if self.world != self.spec.config.tp_size:
            raise ConfigError(
                f"tp_size {self.spec.config.tp_size} needs as many bundles, and placement_group_config has {self.world}"
            )
        try:
            self._placement = await reserve(self.spec.layout, self.spec.name)
            began = time.monotonic()
            life = await self._begin(self.spec.config.start_timeout_s)
        except BaseException:
            self.kill()
            raise
        self._start_s = time.monotonic() - began - life.fetched_s

    @property
    def patience_s(self) -> float:
        """Seconds that streams wait for a restart: `restart_timeout_s`, or by default a multiple of the first start."""
        given = self.spec.config.restart_timeout_s
        return max(PATIENCE_FLOOR_S, PATIENCE_SHARE * self._start_s) if given is None else given

    @property
    def start_s(self) -> float:
        """Seconds that the first start took, without downloads; 0.0 until the gang has started."""
        return self._start_s

    async def _begin(self, timeout_s: float, still_s: float = math.inf) -> Incarnation:
        """Start an incarnation by `Incarnation.begin` and return it. Every later incarnation gets a KV cache of the
        same size as the first, however much memory is free, because open streams were admitted for that size.
        """
        assert self._placement is not None
        held = self._infos[0] if self._infos else None
        spec = self.spec if held is None else _with_kv(self.spec, held.kv_tokens)
        life = self._life = Incarnation(spec, self._placement, self.epoch)
        await life.begin(timeout_s, still_s)
        self._infos = [replace(info, kv_sized_by=(held or info).kv_sized_by) for info in life.infos]
        if self._sample is not None:
            with suppress(RayError):
                await life.shards[0].keep_serving_sample.remote(self._sample)
        return life

    def keep(self, sample: bytes) -> None:
        """Set the replica's latest registry sample; each later incarnation gives it to its rank 0 to keep."""
        self._sample = sample

    async def pulse(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Ask every rank for its heartbeat, and wait for the answers for at most `timeout_s`."""
        if self.life:
            await self.life.pulse(timeout_s)

    def trouble(self) -> str:
        """Return why the gang is unhealthy now, naming the rank; empty if healthy. A stalled rank may still recover."""
        if self.lost or self._restarting:
            return self.lost or self._restarting
        verdict = self._verdict(self.life) if self.life else None
        return "" if verdict is None else str(verdict)

    def history(self) -> GangHistory:
        """Return the facts decided before the start, the number of earlier incarnations, and the latest losses."""
        start_s, patience_s = round(self._start_s, 1), round(self.patience_s, 1)
        latest = tuple(self.losses[-LOSSES_SHOWN:])
        return GangHistory(self.spec.decided, start_s, patience_s, self.epoch, latest, self.spec.name)

    def _verdict(self, life: Incarnation) -> Verdict | None:
        return judge(life.signs(), self.spec.config.watchdog_timeout_s)

    async def watch(self, owner: Owner) -> None:
        """Watch the gang, and kill and restart all ranks whenever a rank is lost. Return when a restart has failed for
        good or the gang was killed.
        """
        fruitless = 0
        try:
            while self._life is not None:
                life, served_from = self._life, time.monotonic()
                loss, noticed = await self._loss(life)
                self._restarting = f"{loss} (restarting)"
                self.losses.append(loss)
                logger.error("gang %s, life %d: %s", self.spec.name, life.epoch, loss)
                life.kill()
                await owner.on_down(loss)
                self._tell(loss)
                # An incarnation that served for long is no evidence of a crash loop.
                old = time.monotonic() - served_from > self.patience_s
                fruitless = 0 if life.fruitful or old else fruitless + 1
                if fruitless >= FRUITLESS:
                    self.lost = f"{loss} (given up: {fruitless} lives in a row served no request)"
                else:
                    await self._restart(loss, noticed)
                if self.lost:
                    break
                self._restarting = ""
                owner.on_up()
        except Exception as error:
            logger.exception("gang %s: the watch failed", self.spec.name)
            self.lost = f"the watch over the gang failed: {type(error).__name__}: {error}"
        logger.error("gang %s is lost: %s", self.spec.name, self.lost)
        try:
            owner.on_lost(self.lost)
        finally:
            self.kill()

    async def _loss(self, life: Incarnation) -> tuple[Loss, float]:
        """Wait until an incarnation is over. Return the loss, which names the rank at fault, and the time of noticing
        (monotonic clock).
        """
        limit = self.spec.config.watchdog_timeout_s
        period, said = min(1.0, limit / 4), ""
        while True:
            life.ask()
            asked = time.monotonic()
            await _within(period, life.alarm)
            late = time.monotonic() - asked - period
            if late > period:  # this process itself was stopped, so the silence of the ranks is no evidence
                life.forgive(late)
            verdict = self._verdict(life)
            if verdict is not None and verdict.final:
                break
            if (verdict is None) == bool(said):
                said = "" if verdict is None else str(verdict)
                logger.warning("gang %s: %s", self.spec.name, said or "healthy again")
        noticed = time.monotonic()
        # The first evidence may come from a rank that only lost a peer: wait a moment for evidence of the cause.
        while not verdict.certain and (left := noticed + GRACE_S - time.monotonic()) > 0:
            life.alarm.clear()
            await _within(left, life.alarm)
            verdict = self._verdict(life) or verdict
        silence = noticed - life.last_sign(verdict.rank)
        where = (verdict.rank, verdict.kind, verdict.step, verdict.phase, verdict.reason)
        return Loss(*where, epoch=life.epoch, at=time.time(), noticed_s=max(0.0, silence)), noticed

    async def _restart(self, loss: Loss, noticed: float) -> None:
        """Start new incarnations in the same placement group until one serves. If none serves within `patience_s` of
        `noticed`, set `lost`.
        """
        until = noticed + self.patience_s
        still_s = max(STILL_FLOOR_S, STILL_SHARE * self._start_s)
        attempts, why = 0, ""
        while (left := until - time.monotonic()) > 0:
            attempts += 1
            if self._life is not None:
                self._life.kill()
            self.epoch += 1
            try:
                if self._placement is not None:
                    self._placement = await self._placement.renew(left)
                left = until - time.monotonic()
                await asyncio.wait_for(self._begin(left, still_s), left)
            except Exception as error:
                why = str(error) or why or type(error).__name__  # a timeout has no message: keep the earlier cause
                self._restarting = f"{loss} (restarting; attempt {attempts} failed: {why})"
                logger.error("gang %s: attempt %d to restart failed: %s", self.spec.name, attempts, why)
                await asyncio.sleep(min(RETRY_S, max(0.0, until - time.monotonic())))
                continue
            back = replace(loss, restored_s=time.monotonic() - noticed, attempts=attempts)
            self.losses[-1] = back
            logger.warning("gang %s: serves again after %.1f s, life %d", self.spec.name, back.restored_s, self.epoch)
            self._tell(back)
            return
        self.lost = (
            f"{loss} (not back within restart_timeout_s {self.patience_s:.3g}: {attempts} attempt(s), "
            f"the last failed: {why})"
        )

    def _tell(self, loss: Loss) -> None:
        if self._on_loss is None:
            return
        try:
            self._on_loss(loss)
        except Exception:
            logger.exception("gang %s: on_loss failed", self.spec.name)

    async def stop(self, timeout_s: float = 3.0) -> None:
        """End the engine loops after their present step, then the shards and the placement group."""
        if self.life:
            await self.life.stop(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the shards and remove the placement group now. Safe to call twice."""
        if self._life is not None:
            self._life.kill()
            self._life = None
        if self._placement is not None:
            self._placement.remove()
            self._placement = None


def _with_kv(spec: GangSpec, tokens: int) -> GangSpec:
    """Return the spec with a KV cache of `tokens` tokens per rank."""
    sizes = {**dict.fromkeys(KV_SIZES), "max_total_tokens": tokens}
    return replace(spec, config=spec.config.model_copy(update=sizes))


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for an event, for at most `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
