"""The gang (the ranks) and the router of one Serve replica, which is a direct replica or an engine replica."""

import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

from ray import serve

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.messages import Loss
from cluster.actors.peer_gangs import gang_name, publish
from cluster.actors.placement import cluster_gpus
from cluster.actors.router import Router
from cluster.api.serve.model_sources import hub_source_facts
from cluster.api.serve.settings import AppSettings, resolve_engine_paths
from cluster.arch.hub import fetch_configs, header_folders, hub_models, pin
from cluster.arch.resolve import check_models, resolve_models
from cluster.config import EngineConfig
from cluster.observability.metrics import ServingMetrics

logger = logging.getLogger(__name__)

PUBLISH_PERIOD_S = 0.5  # how old this replica's metrics may be when another replica reads them


class GangHost:
    """Starts and stops the gang of a replica, and publishes `metrics` to the other replicas. `metrics` also count the
    gang's losses and restarts.

    `config` holds the settings that the ranks get. It names hub models by their commits, since each node has its own
    download folder. `local_config` has the same settings, but names the folders of hub models on this node. These
    folders hold all files but the weights.
    """

    def __init__(self, settings: AppSettings, factory: str) -> None:
        """`factory` is the import path of the function that builds an engine.

        Raises:
            ConfigError: the draft does not match the settings, or a model cannot be read.
        """
        context = serve.get_replica_context()
        llm = settings.llm
        device, reason = llm.device(cluster_gpus())
        logger.info("the ranks run on %s (%s)", device, reason)
        self.config = _resolve_config(resolve_engine_paths(llm.engine_config()).model_copy(update={"device": device}))
        self.local_config = fetch_configs(self.config)
        replica = context.replica_id.unique_id
        self.metrics = ServingMetrics(model_name=llm.model_loading_config.model_id, replica=replica)
        self.metrics.expect_ranks(self.config.tp_size)
        self.shutting_down = False
        name = gang_name(f"{context.app_name}/{context.deployment}", replica)
        if sources := hub_source_facts(self.config):
            logger.info("models of a hub: %s", ", ".join(f"{fact} {value}" for fact, value in sources.items()))
        decided, log = {"device_chosen_by": reason, **sources}, settings.log(context.app_name)
        spec = GangSpec(self.config, llm.layout(device), name, factory, decided=decided, log=log)
        self.gang = Gang(spec, on_loss=self._count_loss)
        self.router = Router(self.gang, on_resumed=self.metrics.on_resumed, replica_rank=context.rank.rank)
        self._publish_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the gang, the router and the publishing of metrics.

        Raises:
            ConfigError, PlacementError, GangStartError: the gang cannot start; no process of it is left.
        """
        started_at = time.monotonic()
        await self.gang.start()
        self.router.start()
        self._publish_task = asyncio.create_task(self._publish_metrics())
        logger.info(
            "gang %s is ready after %.1f s: %s", self.gang.spec.name, time.monotonic() - started_at, self.gang.infos[0]
        )

    def check_health(self) -> None:
        """Raise once the gang cannot be brought back, so that Serve replaces the replica.

        While the gang restarts, /health answers 503 but this check passes, because the streams wait in this replica.

        Raises:
            RuntimeError: the gang is lost for good; the message is the reason.
        """
        if reason := self.router.lost_reason:
            raise RuntimeError(reason)

    def begin_shutdown(self) -> None:
        """End all streams, because Serve will soon kill this replica. The clients of a direct replica still get an
        error event. An ingress replica can still resume its streams on another engine replica.
        """
        self.shutting_down = True
        self.router.end_streams()

    async def close(self) -> None:
        """End the streams, the shards (one actor per rank) and the placement group."""
        self.shutting_down = True
        if self._publish_task is not None:
            self._publish_task.cancel()
            await self.router.close()
        await self.gang.stop()

    def _count_loss(self, loss: Loss) -> None:
        if loss.restored_s is None:
            self.metrics.on_loss(loss.rank, loss.kind)
        else:
            self.metrics.on_restart(loss.restored_s)

    async def _publish_metrics(self) -> None:
        """Whenever the metrics of this replica change, store them on rank 0 of the gang, from which other replicas read
        them.
        """
        published = b""
        while True:
            try:
                sample = self.metrics.serialize()
                if sample != published:
                    await publish(self.gang, sample)
                    published = sample
            except Exception:
                logger.exception("the replica's own metrics could not be published at rank 0; trying again")
            await asyncio.sleep(PUBLISH_PERIOD_S)


def _resolve_config(config: EngineConfig) -> EngineConfig:
    """Return the settings with hub names resolved to commits, and with the values that follow from the draft's folder.
    Hub models are checked here, before any rank downloads their weights.

    Raises:
        ConfigError: a model cannot be found or served, or the draft does not match the settings.
    """
    if not hub_models(config):
        return config if config.speculative_draft_model_path is None else resolve_models(config).settings
    config = pin(config)
    with header_folders(config) as outlined_config:
        resolved = check_models(outlined_config).settings
    # `resolved` names folders of this node; ranks on other nodes need the commits.
    return resolved.model_copy(update={name: getattr(config, name) for name in hub_models(config)})


# Open streams are ended min(END_MARGIN_S, END_SHARE * graceful_shutdown_timeout_s) seconds before Serve kills the
# replica, so that their error events can still be sent.
END_MARGIN_S = 1.5
END_SHARE = 0.5


def call_before_kill(callback: Callable[[], None]) -> None:
    """Arrange that `callback` is called on this event loop shortly before Serve kills this replica.

    On a redeploy or scale-down Serve gives a replica `graceful_shutdown_timeout_s` for its open requests and then kills
    it, without notice to the replica's code. So this function wraps a private method of Serve's replica. A version of
    Serve without that method is not patched; its open streams are cut at the end.
    """
    replica: Any = getattr(importlib.import_module("ray.serve._private.replica"), "Replica", None)
    original_shutdown = getattr(replica, "_perform_graceful_shutdown", None)
    if original_shutdown is None:
        logger.warning("Serve's replica has no _perform_graceful_shutdown; streams open when it ends will be cut")
        return
    loop = asyncio.get_running_loop()

    async def shutdown_with_callback(self: Any) -> None:
        graceful_timeout_s = float(self._deployment_config.graceful_shutdown_timeout_s)
        delay_s = graceful_timeout_s - min(END_MARGIN_S, END_SHARE * graceful_timeout_s)
        loop.call_soon_threadsafe(lambda: loop.call_later(delay_s, callback))
        await original_shutdown(self)

    replica._perform_graceful_shutdown = shutdown_with_callback
