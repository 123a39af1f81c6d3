"""The Serve application: one deployment, whose replica owns a gang and is itself the ASGI ingress.

A replica runs no model: it tokenizes, routes to a rank, turns tokens into text and streams. `build_openai_app` is the
`import_path` of a Serve config.
"""

import asyncio
import importlib
import logging
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.messages import EngineClient
from cluster.actors.peers import gang_name, publish
from cluster.actors.router import Router
from cluster.actors.shard import FACTORY
from cluster.api.settings import AppSettings, parse, resolve_engine_paths
from cluster.config import EngineConfig
from cluster.metrics import ServingMetrics, merge

logger = logging.getLogger(__name__)

PUBLISH_PERIOD_S = 0.5  # how old the sample may be that other replicas read of this one
# Admission is the router's, in tokens, so Serve's own limits stay out of the way; a stream may run for minutes, so a
# replica that leaves gets the time to finish it.
DEPLOYMENT_DEFAULTS: dict[str, Any] = {
    "max_ongoing_requests": 10_000,
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": 600.0,
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 10.0,
    "max_constructor_retry_count": 3,
    "ray_actor_options": {"num_cpus": 0.5},
}


class GangService:
    """What the routes of a replica use (`cluster.api.service.Service`)."""

    def __init__(self, router: Router, gang: Gang, model: Any, tokenizer: Any) -> None:
        self.engine: EngineClient = router
        self.model = model
        self.tokenizer = tokenizer
        self.metrics = ServingMetrics(model_name=model.model_id)
        self._gang = gang

    async def metrics_page(self) -> bytes:
        """The Prometheus text of all replicas and ranks, whichever replica is asked."""
        samples = await self.engine.metrics()
        return await asyncio.to_thread(merge, [self.metrics.serialize(), *samples])

    async def publish(self) -> None:
        """Keep this replica's sample readable for the others, until cancelled."""
        said = b""
        while True:
            sample = self.metrics.serialize()
            if sample != said:
                await publish(self._gang, sample)
                said = sample
            await asyncio.sleep(PUBLISH_PERIOD_S)


class Replica:
    """One Serve replica: a gang, and the REST routes in front of it."""

    async def __init__(self, settings: AppSettings, factory: str = FACTORY) -> None:  # type: ignore[misc]
        """Start the gang and, meanwhile, load what REST needs; returns when requests can be served."""
        _bind_to_node_only()
        context = serve.get_replica_context()
        llm = settings.llm
        config = resolve_engine_paths(llm.engine_config())
        name = gang_name(f"{context.app_name}/{context.deployment}", context.replica_id.unique_id)
        self._gang = Gang(GangSpec(config, llm.layout(), name, factory))
        rest = asyncio.create_task(asyncio.to_thread(_load_rest, config))
        started = time.monotonic()
        try:
            await self._gang.start()
            self._make_app, tokenizer, model_info = await rest
        except BaseException:
            rest.cancel()
            self._gang.kill()
            raise
        info = self._gang.infos[0]
        model = model_info(
            model_id=llm.model_loading_config.model_id,
            context_length=info["context_length"],
            vocab_size=info["vocab_size"],
            created=int(time.time()),
        )
        self._router = Router(self._gang)
        self._router.start()
        self._service = GangService(self._router, self._gang, model, tokenizer)
        self._publishing = asyncio.create_task(self._service.publish())
        logger.info("gang %s is ready after %.1f s: %s", name, time.monotonic() - started, info)

    def __serve_build_asgi_app__(self) -> Any:
        """The FastAPI app; Serve calls this once, after the constructor."""
        return self._make_app(self._service)

    async def check_health(self) -> None:
        """Fail while any rank is dead or stalled, so that Serve replaces the replica and its gang."""
        if reason := self._gang.trouble():
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        """Serve awaits this when the replica leaves: end the streams, the shards and the placement group."""
        if hasattr(self, "_publishing"):
            self._publishing.cancel()
            await self._router.close()
        if hasattr(self, "_gang"):
            await self._gang.stop()


def _bind_to_node_only() -> None:
    """Keep Serve's gRPC server of this replica off the addresses of other networks.

    Serve 2.60 opens one in every replica, on all addresses, without a token, and unpickles what arrives. Nothing here
    uses it. Bound to the node's own address it is as open as the rest of Ray: not at all on a Ray of `aerie serve`,
    whose node is loopback. A version of Serve that has another inner name is left as it is.
    """
    replica = importlib.import_module("ray.serve._private.replica")
    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        logger.warning("Serve's replica has no add_port_to_grpc_server; its gRPC server may listen on all addresses")
        return
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    host = f"[{node}]" if ":" in node else node
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", host))  # type: ignore[attr-defined]


def _load_rest(config: EngineConfig) -> tuple[Any, Any, Any]:
    """The REST routes, the tokenizer and the model card's type. Imported here, off the loop: it takes seconds."""
    ingress = importlib.import_module("cluster.api.ingress")
    service = importlib.import_module("cluster.api.service")
    tokenizer = importlib.import_module("cluster.api.tokenizer").ChatTokenizer
    folder = config.tokenizer_path or config.model_path
    has_tokenizer = config.tokenizer_path is not None or (Path(folder) / "tokenizer.json").is_file()
    return ingress.make_app, tokenizer.load(folder) if has_tokenizer else None, service.ModelInfo


def build_app(settings: AppSettings, factory: str = FACTORY) -> Application:
    """The application of validated settings; `factory` names what builds an engine, for tests."""
    llm = settings.llm
    name = "aerie-" + llm.model_loading_config.model_id.replace("/", "--").replace(".", "_").replace("#", "_")
    options = {**DEPLOYMENT_DEFAULTS, **llm.deployment_config}
    options["ray_actor_options"] = {
        **DEPLOYMENT_DEFAULTS["ray_actor_options"],
        **({"runtime_env": llm.runtime_env} if llm.runtime_env else {}),
        **llm.deployment_config.get("ray_actor_options", {}),
    }
    ingress: Any = serve.ingress()(Replica)
    deployment: Any = serve.deployment(ingress)
    application: Application = deployment.options(name=name, **options).bind(settings, factory)
    return application


def build_openai_app(args: dict[str, Any]) -> Application:
    """Serve's application builder: `args` of a Serve config in, application out.

    Raises:
        ConfigError: an argument is unknown, missing or wrong; one line for each.
    """
    return build_app(parse(args))
