"""The Serve application. `build_openai_app` is the `import_path` of a Serve config.

`ingress: direct` is one deployment: each replica owns a gang and is itself the ASGI ingress, so a request takes one
hop. `ingress: resilient` is two deployments: engine replicas own the gangs, and ingress replicas in front of them hold
the clients' streams. There a stream survives the loss of the engine replica that feeds it. In both layouts a replica
runs no model: it tokenizes, routes a request to a rank, detokenizes and streams.
"""

import asyncio
import importlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.context import _get_global_client

from cluster.actors.coalesced_call import CoalescedCall
from cluster.actors.messages import EngineClient, GangStatus
from cluster.actors.process_settings import settle
from cluster.actors.shard import FACTORY
from cluster.api.core.api_keys import ApiKeys, check_reach
from cluster.api.proxy.middleware import stands_before_serve
from cluster.api.proxy.refusals import AnnounceRefusals
from cluster.api.serve.engine_calls import HandleCalls
from cluster.api.serve.feed import Callers, feed
from cluster.api.serve.host import GangHost, when_leaving
from cluster.api.serve.model_sources import pinned
from cluster.api.serve.resilient_client import (
    RETRY_S,
    SIGN_SHARE,
    EngineCalls,
    GoneError,
    Item,
    ResilientClient,
    Rooms,
    StreamSign,
    folders_of,
)
from cluster.api.serve.rest_parts import Rest, load_rest, together
from cluster.api.serve.settings import DEPLOYMENT_DEFAULTS, AppSettings, parse, resolve_engine_paths
from cluster.arch.generation import sampling_defaults
from cluster.arch.hub import describe
from cluster.config import EngineConfig
from cluster.observability.logs import configure
from cluster.observability.metrics import ServingMetrics, merge
from cluster.request import Request
from cluster.status import RankInfo

logger = logging.getLogger(__name__)

PEERS_TIMEOUT_S = 0.8


class RestService:
    """Implements `cluster.api.core.service.Service` for a replica that owns a gang."""

    def __init__(self, engine: EngineClient, model: Any, rest: "Rest", metrics: ServingMetrics) -> None:
        self.engine, self.model, self.tokenizer, self.metrics = engine, model, rest.tokenizer, metrics
        self.grammars = rest.grammars(rest.tokenizer, model)
        self.grammars.start()
        self._samples, self._page = CoalescedCall(self._gather), CoalescedCall(self._make_page)

    async def samples(self) -> list[bytes]:
        """Return the registry samples of all replicas and ranks that answer. Every replica returns the same set."""
        return await self._samples.get()

    async def metrics_page(self) -> bytes:
        """Return the Prometheus text of all replicas and ranks that answer. Every replica returns the same page."""
        return await self._page.get()

    async def _gather(self) -> list[bytes]:
        ingresses, engines = await asyncio.gather(self._ingresses(), self.engine.metrics())
        return [*ingresses, *engines]

    async def _make_page(self) -> bytes:
        return await asyncio.to_thread(merge, await self._samples.get())

    async def _ingresses(self) -> list[bytes]:
        """Return the registry samples of the replicas with REST routes; here, of this replica alone."""
        return [self.metrics.serialize()]


class GangOwner:
    """Base of the Serve replicas that own a gang."""

    _host: GangHost

    async def end_streams(self) -> None:
        """End every open stream of this replica with an error: the server is shutting down."""
        self._host.router.end_streams()

    async def check_health(self) -> None:
        """Serve's health check: raise RuntimeError once the gang is lost for good (`GangHost.check_health`)."""
        self._host.check_health()

    async def __del__(self) -> None:
        """Close the gang; Serve awaits this method when it removes the replica."""
        if hasattr(self, "_host"):
            await self._host.close()


class Replica(GangOwner):
    """The one replica class of `ingress: direct`: a gang, and the REST routes in front of it."""

    async def __init__(self, settings: AppSettings, factory: str = FACTORY) -> None:  # type: ignore[misc]
        """Start the gang and load the REST routes at the same time; return when requests can be served."""
        _begin_process(settings)
        self._rest_options = await asyncio.to_thread(_rest_options, settings)
        self._host = GangHost(settings, factory)
        sampling = _sampling(settings, self._host.config_here)
        rest = asyncio.to_thread(load_rest, self._host.config_here, settings.parsers)
        try:
            _, loaded = await together(self._host.start(), rest)
        except BaseException:
            self._host.gang.kill()
            raise
        self._make_app = loaded.make_app
        model = loaded.model_info(
            created=int(time.time()), **_model_facts(settings, self._host.gang.infos[0], sampling)
        )
        self._service = RestService(self._host.router, model, loaded, self._host.metrics)
        self._drain = loaded.drain()
        self._replicas = settings.llm.fixed_replicas
        when_leaving(self._host.leave)
        settle()

    def __serve_build_asgi_app__(self) -> Any:
        """The FastAPI app; Serve calls this once, after the constructor."""
        app = self._make_app(self._service, drain=self._drain, **self._rest_options)
        replicas = self._replicas if stands_before_serve() else None
        return AnnounceRefusals(app, serve.get_replica_context().replica_tag, replicas, self._refused_before)

    def _refused_before(self, path: str, times: int) -> None:
        self._service.metrics.on_refused("overloaded", times)
        self._service.metrics.on_response(path, 503, times)

    async def drain(self) -> int:
        """Refuse new calls from now on; return how many calls are open."""
        open_calls: int = self._drain.begin()
        return open_calls


class EngineReplica(GangOwner):
    """The engine replica of `ingress: resilient`: a gang, which the ingress replicas call through a Serve handle."""

    async def __init__(self, settings: AppSettings, factory: str = FACTORY) -> None:  # type: ignore[misc]
        """Start the gang; return when requests can be served."""
        _begin_process(settings)
        self._host = GangHost(settings, factory)
        sampling = _sampling(settings, self._host.config_here)
        await self._host.start()
        info = self._host.gang.infos[0]
        self._facts = _model_facts(settings, info, sampling)
        self._made_of = _made_of(settings)
        config, computes = self._host.config, f"{info.dtype}, {info.kernels}, KV cache in {info.kv_cache_dtype}"
        nodes = info.speculative_num_draft_tokens - 1
        made = f"{config.model_path} ({computes})"
        self._sign = StreamSign(made, nodes, folders_of(config), info.max_request_tokens)
        self._period_s = SIGN_SHARE * config.watchdog_timeout_s
        self._callers = Callers()
        when_leaving(self._host.leave)
        settle()

    async def generate(self, request: Request, caller: str = "") -> AsyncGenerator[Item, None]:
        """Yield the items of `feed` for a request. Serve closes this generator when the ingress cancels its call.
        `caller` is the full name of the ingress replica.
        """
        with self._callers.stream(caller) as gone:
            items = feed(self._host.router, request, self._sign, self._period_s, self._leaving, gone)
            async with aclosing(items):
                async for item in items:
                    yield item

    def _leaving(self) -> str:
        return "the engine replica is shutting down" if self._host.leaving else self._host.router.lost

    async def model_facts(self) -> tuple[str, dict[str, Any]]:
        """Return the settings that decide the model (`_made_of`), and the fields of a `ModelInfo` except `created`."""
        return self._made_of, self._facts

    async def patience_s(self) -> float:
        """Return how many seconds streams wait for a gang, or for another engine replica (`Gang.patience_s`)."""
        return self._host.gang.patience_s

    async def status(self) -> GangStatus:
        """Return the health and load of this replica's gang (`EngineClient.status`)."""
        return await self._host.router.status()

    async def metrics(self) -> list[bytes]:
        """Return the registry samples of all engine replicas and of their ranks."""
        return [self._host.metrics.serialize(), *await self._host.router.metrics()]


class ResilientService(RestService):
    """Implements `Service` for an ingress replica; metrics also cover the other ingress replicas."""

    def __init__(self, engine: EngineClient, model: Any, rest: "Rest", metrics: ServingMetrics, peers: Any) -> None:
        """`peers` is the handle of the ingress deployment itself."""
        super().__init__(engine, model, rest, metrics)
        self._peers = peers

    async def _ingresses(self) -> list[bytes]:
        try:
            asked = self._peers.broadcast("sample")
            # In a thread, not by results_async: that drops all answers if one of them does not come in time.
            answers = await asyncio.to_thread(asked.results, timeout_s=PEERS_TIMEOUT_S, return_exceptions=True)
        except Exception:
            logger.exception("the metrics of the other ingress replicas cannot be read")
            answers = []
        return [sample for sample in answers if isinstance(sample, bytes)] or [self.metrics.serialize()]


class IngressReplica:
    """The ingress replica of `ingress: resilient`: the REST routes. It calls the gangs through a Serve handle."""

    async def __init__(self, settings: AppSettings, engine: Any) -> None:  # type: ignore[misc]
        """Load the REST routes and wait for an engine replica; return when requests can be served."""
        _begin_process(settings)
        self._rest_options = await asyncio.to_thread(_rest_options, settings)
        context = serve.get_replica_context()
        config = resolve_engine_paths(settings.llm.engine_config())
        calls = HandleCalls(engine, context.replica_id.to_full_id_str())
        rest = asyncio.to_thread(lambda: load_rest(describe(config), settings.parsers))
        facts, loaded = await together(_facts_of(calls, _made_of(settings)), rest)
        patience_s = await calls.call("patience_s")
        self._make_app = loaded.make_app
        model = loaded.model_info(created=int(time.time()), **facts)
        self._metrics = ServingMetrics(model_name=model.model_id, replica=context.replica_id.unique_id)
        rank, resumed = context.rank.rank, self._metrics.on_resumed
        self._client = ResilientClient(calls, config, rank, resumed, patience_s, self._heard_of_room)
        self._engine, self._rooms = engine, Rooms()
        peers = serve.get_deployment_handle(context.deployment, context.app_name)
        self._service = ResilientService(self._client, model, loaded, self._metrics, peers)
        self._drain = loaded.drain()
        settle()

    def __serve_build_asgi_app__(self) -> Any:
        """The FastAPI app; Serve calls this once, after the constructor."""
        return self._make_app(self._service, drain=self._drain, **self._rest_options)

    def _heard_of_room(self, room: int) -> None:
        """Note an engine replica's token limit, and advertise the smallest one, which fits every engine replica."""
        if (least := self._rooms.heard(room)) != self._service.model.kv_room:
            self._service.model = replace(self._service.model, kv_room=least)

    async def drain(self) -> int:
        """Refuse new calls from now on; return how many calls are open."""
        open_calls: int = self._drain.begin()
        return open_calls

    async def end_streams(self) -> None:
        """End every open stream of this and of the engine replicas with an error: the server is shutting down."""
        self._client.end_streams()
        asked = self._engine.broadcast("end_streams")
        await asked.results_async(timeout_s=PEERS_TIMEOUT_S, return_exceptions=True)

    async def sample(self) -> bytes:
        """Return this replica's registry sample; the other ingress replicas call this (`ResilientService`)."""
        return self._metrics.serialize()


def _begin_process(settings: AppSettings) -> None:
    """Set up this replica's log, and bind its gRPC server to the node's own address."""
    configure(settings.log(serve.get_replica_context().app_name))
    _bind_to_node_only()


def _rest_options(settings: AppSettings) -> dict[str, Any]:
    """Return the options of `make_app` that the settings decide: API keys, allowed origins, and the status page.

    Raises:
        ConfigError: the keys cannot be used; or there are none although other machines reach Serve's proxy.
    """
    keys = ApiKeys.load(settings.api_keys_file)
    if keys is None and not settings.allow_unauthenticated:
        client: Any = _get_global_client()
        check_reach(client.http_config.host, keys, allowed=False)
    return {"keys": keys, "origins": settings.allowed_origins, "page": settings.page}


def _bind_to_node_only() -> None:
    """Bind Serve's gRPC server of this replica to the node's own address only.

    Serve 2.60 opens a gRPC server in every replica, on all addresses and without a token, and unpickles the data that
    arrives. Aerie does not use it. Bound to the node's address, it is as reachable as the rest of Ray: from this
    machine alone if `aerie serve` started Ray. A version of Serve without `add_port_to_grpc_server` is not patched.
    """
    replica = importlib.import_module("ray.serve._private.replica")
    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        logger.warning("Serve's replica has no add_port_to_grpc_server; its gRPC server may listen on all addresses")
        return
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    host = f"[{node}]" if ":" in node else node
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", host))  # type: ignore[attr-defined]


def _sampling(settings: AppSettings, config: EngineConfig) -> dict[str, float]:
    """Return default sampling parameters from the model's generation_config.json; empty with `sampling_defaults:
    openai`. Called before the gang loads, so that a broken file raises its ConfigError at once.
    """
    return sampling_defaults(config.model_path) if settings.sampling_defaults == "model" else {}


def _model_facts(settings: AppSettings, info: RankInfo, sampling: dict[str, float]) -> dict[str, Any]:
    """Return the fields of a `ModelInfo` except `created`; `info` is the report of rank 0."""
    return {
        "model_id": settings.llm.model_loading_config.model_id,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "kv_room": info.max_request_tokens,
        "eos_token_ids": info.eos_token_ids,
        "sampling": sampling,
    }


def _made_of(settings: AppSettings) -> str:
    """Return the settings that decide the facts of a model, as one string that two replicas can compare."""
    return f"{settings.llm.model_loading_config.model_id} {settings.llm.engine_config().model_dump_json()}"


async def _facts_of(calls: EngineCalls, made_of: str) -> dict[str, Any]:
    """Wait for an engine replica with the settings `made_of` and return its model facts. During a redeploy, engine
    replicas of the old settings, perhaps with another model, answer too; their answers are ignored.
    """
    said = ""
    while True:
        try:
            others, facts = await calls.call("model_facts")
            if others == made_of:
                return dict(facts)
            why = "only engine replicas of other settings are up yet"
        except GoneError as gone:
            why = str(gone)
        if why != said:
            logger.info("no engine replica of these settings answers yet: %s", why)
        said = why
        await asyncio.sleep(RETRY_S)


def build_app(settings: AppSettings, factory: str = FACTORY) -> Application:
    """Return the application for validated settings. `factory` is the import path of the function that builds an
    engine; tests replace it.

    Hub names become commits here, so that all replicas and ranks load the same files, also those that start later.

    Raises:
        ConfigError: a hub has no such model or revision, or cannot be reached.
    """
    settings = pinned(settings)
    llm = settings.llm
    name = "aerie-" + llm.model_loading_config.model_id.replace("/", "--").replace(".", "_").replace("#", "_")
    if settings.ingress == "direct":
        front = _deployment(serve.ingress()(Replica), name, llm.deployment_config, llm.runtime_env)
        direct: Application = front.bind(settings, factory)
        return direct
    engine = _deployment(EngineReplica, f"{name}-engine", llm.deployment_config, llm.runtime_env)
    front = _deployment(serve.ingress()(IngressReplica), name, settings.ingress_deployment_config, llm.runtime_env)
    resilient: Application = front.bind(settings, engine.bind(settings, factory))
    return resilient


def _deployment(replica: Any, name: str, given: dict[str, Any], runtime_env: dict[str, Any]) -> Any:
    """Return the deployment of a replica class, with `DEPLOYMENT_DEFAULTS` overridden by the options `given`."""
    options = {**DEPLOYMENT_DEFAULTS, **given}
    options["ray_actor_options"] = {
        **DEPLOYMENT_DEFAULTS["ray_actor_options"],
        **({"runtime_env": runtime_env} if runtime_env else {}),
        **given.get("ray_actor_options", {}),
    }
    deployment: Any = serve.deployment(replica)
    return deployment.options(name=name, **options)


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return the application for the `args` of a Serve config; Serve calls this builder by its import path.

    Raises:
        ConfigError: an argument is unknown, missing or wrong; one line for each.
    """
    return build_app(parse(args))
