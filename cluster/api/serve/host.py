"""The gang and the router of one Serve replica, whether it is the ingress itself or stands behind one."""

import asyncio
import logging
import time

from ray import serve

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.messages import Loss
from cluster.actors.peer_gangs import gang_name, publish
from cluster.actors.placement import cluster_gpus
from cluster.actors.router import Router
from cluster.api.serve.model_sources import facts_of_sources
from cluster.api.serve.settings import AppSettings, resolve_engine_paths
from cluster.arch.hub import describe, hub_models, outlined, pin
from cluster.arch.resolve import check_models, resolve_models
from cluster.config import EngineConfig
from cluster.observability.metrics import ServingMetrics

logger = logging.getLogger(__name__)

PUBLISH_PERIOD_S = 0.5  # how old this replica's metrics may be when another replica reads them


class GangHost:
    """Starts and ends the gang of a replica and publishes `metrics`, which also count its losses and restarts.

    `config` are the settings that the ranks get. Models of a hub are named in it by their commit, since the folder of
    each node is that node's own; `config_here` has the folders of this node, which hold all but the weights.
    """

    def __init__(self, settings: AppSettings, factory: str) -> None:
        """`factory` is the import path of what builds an engine.

        Raises:
            ConfigError: the draft is not what the settings say, or a model cannot be read.
        """
        context = serve.get_replica_context()
        llm = settings.llm
        device, why = llm.device(cluster_gpus())
        logger.info("the ranks run on %s (%s)", device, why)
        self.config = _settled(resolve_engine_paths(llm.engine_config()).model_copy(update={"device": device}))
        self.config_here = describe(self.config)
        replica = context.replica_id.unique_id
        self.metrics = ServingMetrics(model_name=llm.model_loading_config.model_id, replica=replica)
        self.metrics.expect_ranks(self.config.tp_size)
        self.leaving = False
        name = gang_name(f"{context.app_name}/{context.deployment}", replica)
        if sources := facts_of_sources(self.config):
            logger.info("models of a hub: %s", ", ".join(f"{fact} {value}" for fact, value in sources.items()))
        decided, log = {"device_chosen_by": why, **sources}, settings.log(context.app_name)
        spec = GangSpec(self.config, llm.layout(device), name, factory, decided=decided, log=log)
        self.gang = Gang(spec, on_loss=self._note)
        self.router = Router(self.gang, on_resumed=self.metrics.on_resumed, replica_rank=context.rank.rank)
        self._publishing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the gang, and begin to serve.

        Raises:
            ConfigError, PlacementError, GangStartError: it cannot be started; none of its processes is left.
        """
        started = time.monotonic()
        await self.gang.start()
        self.router.start()
        self._publishing = asyncio.create_task(self._publish())
        logger.info(
            "gang %s is ready after %.1f s: %s", self.gang.spec.name, time.monotonic() - started, self.gang.infos[0]
        )

    def check_health(self) -> None:
        """Fail once the gang could not be brought back, so that Serve replaces the replica.

        A gang that restarts is unhealthy, and /health says so, but its streams wait for it here.

        Raises:
            RuntimeError: with the reason.
        """
        if reason := self.router.lost:
            raise RuntimeError(reason)

    def leave(self) -> None:
        """Serve will soon kill this replica: end its streams while clients can be told, or an ingress resume them."""
        self.leaving = True
        self.router.end_streams()

    async def close(self) -> None:
        """End the streams, the shards and the placement group."""
        self.leaving = True
        if self._publishing is not None:
            self._publishing.cancel()
            await self.router.close()
        await self.gang.stop()

    def _note(self, loss: Loss) -> None:
        if loss.restored_s is None:
            self.metrics.on_loss(loss.rank, loss.kind)
        else:
            self.metrics.on_restart(loss.restored_s)

    async def _publish(self) -> None:
        """Keep this replica's sample readable for the others, until cancelled."""
        said = b""
        while True:
            try:
                sample = self.metrics.serialize()
                if sample != said:
                    await publish(self.gang, sample)
                    said = sample
            except Exception:
                logger.exception("the replica's own metrics could not be published at rank 0; trying again")
            await asyncio.sleep(PUBLISH_PERIOD_S)


def _settled(config: EngineConfig) -> EngineConfig:
    """The settings with commits for names of a hub, and with what the draft's folder decides. Models of a hub are
    checked here, before any rank downloads their weights.

    Raises:
        ConfigError: a model cannot be had or served, or the draft is not what the settings say.
    """
    if hub_models(config):
        config = pin(config)
        with outlined(config) as seen:
            settled = check_models(seen).config
    elif config.speculative_draft_model_path is not None:
        return resolve_models(config).config
    else:
        return config
    return settled.model_copy(update={name: getattr(config, name) for name in hub_models(config)})
