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
from cluster.config import KV_SIZE_SETTINGS, ConfigError
from cluster.status import RankInfo

__all__ = ["NAMESPACE", "Gang", "GangSpec", "GangStartError", "Owner"]

logger = logging.getLogger(__name__)

EVIDENCE_GRACE_S = 1.0  # after the first evidence of a loss, wait this long for evidence that names the rank at fault
MAX_FRUITLESS_INCARNATIONS = 16
"""The gang is given up after this many incarnations in a row that ended early and served no request. One request that
kills the gang must not use up this number. If 1,024 requests began in the step that killed the gang, the next
incarnation runs all of them again, and bisection then needs at most ten incarnations to find that request.
"""
RETRY_DELAY_S = 0.5  # between two attempts to restart
# If restart_timeout_s is not set, a restart may take this many times as long as the first start.
RESTART_TIMEOUT_FACTOR = 4.0
MIN_RESTART_TIMEOUT_S = 60.0
# An attempt to restart fails if no rank makes progress for this many times as long as the first start.
STALL_TIMEOUT_FACTOR = 2.0
MIN_STALL_TIMEOUT_S = 30.0
LOSSES_REPORTED = 32


class Owner(Protocol):
    """Callbacks for the losses and restarts of a gang. They are called on the event loop that runs `Gang.watch`."""

    async def on_down(self, loss: Loss) -> None:
        """An incarnation is over and its shards are killed. The step items that they sent before may be read until this
        method returns.
        """
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
        self.gang_errors: list[Loss] = []
        self.lost_reason = ""  # why the gang will not come back
        self.epoch = 0
        self._sample: bytes | None = None  # the replica's metrics, serialised; rank 0 of each incarnation keeps a copy
        self._on_loss = on_loss
        self._incarnation: Incarnation | None = None
        self._infos: list[RankInfo] = []
        self._placement: Placement | None = None
        self._restart_status = ""
        self._start_s = 0.0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.spec.world

    @property
    def incarnation(self) -> Incarnation | None:
        """The incarnation that serves; None before the start, during a restart and after the end."""
        return None if self._restart_status else self._incarnation

    @property
    def shards(self) -> list[Any]:
        """The handles of the shards by rank; empty while the gang does not serve."""
        return self.incarnation.shards if self.incarnation else []

    @property
    def infos(self) -> list[RankInfo]:
        """The settings and hardware of each rank of the latest incarnation that has loaded; empty before the first."""
        return self._infos

    @property
    def heartbeats(self) -> list[Heartbeat | None]:
        """The last heartbeat of every rank of the incarnation that serves, None before its first heartbeat. The list is
        empty while the gang does not serve.
        """
        return self.incarnation.heartbeats if self.incarnation else []

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
            started_at = time.monotonic()
            incarnation = await self._begin(self.spec.config.start_timeout_s)
        except BaseException:
            self.kill()
            raise
        self._start_s = time.monotonic() - started_at - incarnation.download_s

    @property
    def restart_timeout_s(self) -> float:
        """How many seconds streams wait for a restart. It is the setting `restart_timeout_s`. The default is a multiple
        of the time of the first start, at least `MIN_RESTART_TIMEOUT_S`.
        """
        configured_timeout_s = self.spec.config.restart_timeout_s
        return (
            max(MIN_RESTART_TIMEOUT_S, RESTART_TIMEOUT_FACTOR * self._start_s)
            if configured_timeout_s is None
            else configured_timeout_s
        )

    @property
    def start_s(self) -> float:
        """Seconds that the first start took, without downloads; 0.0 until the gang has started."""
        return self._start_s

    async def _begin(self, timeout_s: float, stall_timeout_s: float = math.inf) -> Incarnation:
        """Start an incarnation by `Incarnation.begin` and return it. Every later incarnation gets a KV cache of the
        same size as the first, however much memory is free, because open streams were admitted for that size.
        """
        assert self._placement is not None
        earlier_info = self._infos[0] if self._infos else None
        spec = self.spec if earlier_info is None else _with_kv_tokens(self.spec, earlier_info.kv_tokens)
        incarnation = self._incarnation = Incarnation(spec, self._placement, self.epoch)
        await incarnation.begin(timeout_s, stall_timeout_s)
        self._infos = [replace(info, kv_sized_by=(earlier_info or info).kv_sized_by) for info in incarnation.infos]
        if self._sample is not None:
            with suppress(RayError):
                await incarnation.shards[0].keep_serving_sample.remote(self._sample)
        return incarnation

    def keep_sample(self, sample: bytes) -> None:
        """Store the replica's latest registry sample (its metrics, serialised). After each restart the new rank 0 gets
        this sample.
        """
        self._sample = sample

    async def request_heartbeats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Ask every rank for its heartbeat, and wait for the answers for at most `timeout_s`."""
        if self.incarnation:
            await self.incarnation.await_heartbeats(timeout_s)

    def unhealthy_reason(self) -> str:
        """Return why the gang is unhealthy now, or an empty string if it is healthy. If a rank is at fault, the reason
        names it. A rank that only does not answer or makes no progress may recover.
        """
        if self.lost_reason or self._restart_status:
            return self.lost_reason or self._restart_status
        verdict = self._verdict(self.incarnation) if self.incarnation else None
        return "" if verdict is None else str(verdict)

    def history(self) -> GangHistory:
        """Return what was decided before the start, the start time, the number of earlier incarnations, and the latest
        losses.
        """
        start_seconds, restart_timeout_s = round(self._start_s, 1), round(self.restart_timeout_s, 1)
        latest = tuple(self.gang_errors[-LOSSES_REPORTED:])
        return GangHistory(self.spec.decided, start_seconds, restart_timeout_s, self.epoch, latest, self.spec.name)

    def _verdict(self, incarnation: Incarnation) -> Verdict | None:
        return judge(incarnation.evidence(), self.spec.config.watchdog_timeout_s)

    async def watch(self, owner: Owner) -> None:
        """Watch the gang, and kill and restart all ranks whenever a rank is lost. Return when the gang is given up
        (`lost_reason` says why) or was killed.
        """
        fruitless_incarnations = 0
        try:
            while self._incarnation is not None:
                incarnation, serving_since = self._incarnation, time.monotonic()
                loss, noticed_at = await self._wait_for_loss(incarnation)
                self._restart_status = f"{loss} (restarting)"
                self.gang_errors.append(loss)
                logger.error("gang %s, incarnation %d: %s", self.spec.name, incarnation.epoch, loss)
                incarnation.kill()
                await owner.on_down(loss)
                self._report_loss(loss)
                # An incarnation that served for long is no evidence of a crash loop.
                served_long = time.monotonic() - serving_since > self.restart_timeout_s
                fruitless_incarnations = 0 if incarnation.made_progress or served_long else fruitless_incarnations + 1
                if fruitless_incarnations >= MAX_FRUITLESS_INCARNATIONS:
                    self.lost_reason = (
                        f"{loss} (given up: {fruitless_incarnations} incarnations in a row served no request)"
                    )
                else:
                    await self._restart(loss, noticed_at)
                if self.lost_reason:
                    break
                self._restart_status = ""
                owner.on_up()
        except Exception as error:
            logger.exception("gang %s: the watch failed", self.spec.name)
            self.lost_reason = f"the watch over the gang failed: {type(error).__name__}: {error}"
        logger.error("gang %s is lost: %s", self.spec.name, self.lost_reason)
        try:
            owner.on_lost(self.lost_reason)
        finally:
            self.kill()

    async def _wait_for_loss(self, incarnation: Incarnation) -> tuple[Loss, float]:
        """Wait until an incarnation is over. Return the loss, which names the rank at fault, and the time of noticing
        (monotonic clock).
        """
        limit_s = self.spec.config.watchdog_timeout_s
        period, warning = min(1.0, limit_s / 4), ""
        while True:
            incarnation.request_heartbeats()
            requested_at = time.monotonic()
            await _wait_at_most(period, incarnation.alarm)
            delay_s = time.monotonic() - requested_at - period
            if delay_s > period:  # this process itself was stopped: that it heard nothing of the ranks is no evidence
                incarnation.exclude_delay(delay_s)
            verdict = self._verdict(incarnation)
            if verdict is not None and verdict.final:
                break
            if (verdict is None) == bool(warning):
                warning = "" if verdict is None else str(verdict)
                logger.warning("gang %s: %s", self.spec.name, warning or "healthy again")
        noticed_at = time.monotonic()
        # The first evidence may come from a rank that only lost a peer. Wait a moment for evidence of the cause.
        while not verdict.certain and (remaining_s := noticed_at + EVIDENCE_GRACE_S - time.monotonic()) > 0:
            incarnation.alarm.clear()
            await _wait_at_most(remaining_s, incarnation.alarm)
            verdict = self._verdict(incarnation) or verdict
        silence_s = noticed_at - incarnation.last_alive_at(verdict.rank)
        blame = (verdict.rank, verdict.kind, verdict.step, verdict.phase, verdict.reason)
        return Loss(*blame, epoch=incarnation.epoch, at=time.time(), noticed_s=max(0.0, silence_s)), noticed_at

    async def _restart(self, loss: Loss, noticed_at: float) -> None:
        """Start new incarnations in the same placement group until one serves. If none serves within
        `restart_timeout_s` of `noticed_at`, set `lost_reason`.
        """
        deadline = noticed_at + self.restart_timeout_s
        stall_timeout_s = max(MIN_STALL_TIMEOUT_S, STALL_TIMEOUT_FACTOR * self._start_s)
        attempts, reason = 0, ""
        while (remaining_s := deadline - time.monotonic()) > 0:
            attempts += 1
            if self._incarnation is not None:
                self._incarnation.kill()
            self.epoch += 1
            try:
                if self._placement is not None:
                    self._placement = await self._placement.renew(remaining_s)
                remaining_s = deadline - time.monotonic()
                await asyncio.wait_for(self._begin(remaining_s, stall_timeout_s), remaining_s)
            except Exception as error:
                # If the error has no message (a timeout has none), keep the reason of the attempt before.
                reason = str(error) or reason or type(error).__name__
                self._restart_status = f"{loss} (restarting; attempt {attempts} failed: {reason})"
                logger.error("gang %s: attempt %d to restart failed: %s", self.spec.name, attempts, reason)
                await asyncio.sleep(min(RETRY_DELAY_S, max(0.0, deadline - time.monotonic())))
                continue
            restored = replace(loss, restored_s=time.monotonic() - noticed_at, attempts=attempts)
            self.gang_errors[-1] = restored
            logger.warning(
                "gang %s: serves again after %.1f s, incarnation %d", self.spec.name, restored.restored_s, self.epoch
            )
            self._report_loss(restored)
            return
        self.lost_reason = (
            f"{loss} (not back within restart_timeout_s {self.restart_timeout_s:.3g}: {attempts} attempt(s), "
            f"the last failed: {reason})"
        )

    def _report_loss(self, loss: Loss) -> None:
        if self._on_loss is None:
            return
        try:
            self._on_loss(loss)
        except Exception:
            logger.exception("gang %s: on_loss failed", self.spec.name)

    async def stop(self, timeout_s: float = 3.0) -> None:
        """End the engine loops after their present step, then the shards and the placement group."""
        if self.incarnation:
            await self.incarnation.stop(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the shards and remove the placement group now. Safe to call twice."""
        if self._incarnation is not None:
            self._incarnation.kill()
            self._incarnation = None
        if self._placement is not None:
            self._placement.remove()
            self._placement = None


def _with_kv_tokens(spec: GangSpec, tokens: int) -> GangSpec:
    """Return the spec, changed so that the KV cache of each rank has exactly `tokens` tokens."""
    sizes = {**dict.fromkeys(KV_SIZE_SETTINGS), "max_total_tokens": tokens}
    return replace(spec, config=spec.config.model_copy(update=sizes))


async def _wait_at_most(seconds: float, event: asyncio.Event) -> None:
    """Wait for an event, for at most `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
