"""The Serve application. `build_openai_app` builds it for the `import_path` of a Serve config.

`ingress: direct` is one deployment: each replica owns a gang (its ranks, in other processes) and is the ASGI ingress,
so a request takes one hop. `ingress: resilient` is two deployments: engine replicas own the gangs, and ingress replicas
in front of them hold the clients' streams. There a stream survives the loss of the engine replica that feeds it. In
both layouts a replica runs no model: replicas tokenize, route requests to ranks, detokenize and stream.
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
from cluster.actors.process_settings import tune_gil_and_gc
from cluster.actors.shard import FACTORY
from cluster.api.core.api_keys import ApiKeys, check_exposure
from cluster.api.proxy.middleware import proxies_use_middlewares
from cluster.api.proxy.refusals import AnnounceRefusals
from cluster.api.serve.engine_calls import HandleCalls
from cluster.api.serve.feed import CallerMonitor, stream_items
from cluster.api.serve.host import GangHost, call_before_kill
from cluster.api.serve.model_sources import pin_hub_models
from cluster.api.serve.resilient_client import (
    HEARTBEAT_SHARE,
    RETRY_S,
    EngineCalls,
    EngineGoneError,
    ResilientClient,
    SharedTokenLimit,
    StreamHeartbeat,
    StreamItem,
    folders_of,
)
from cluster.api.serve.rest_parts import RestParts, gather_or_cancel, load_rest
from cluster.api.serve.settings import DEPLOYMENT_DEFAULTS, AppSettings, parse, resolve_engine_paths
from cluster.arch.generation import sampling_defaults
from cluster.arch.hub import fetch_configs
from cluster.config import EngineConfig
from cluster.observability.logs import configure
from cluster.observability.metrics import ServingMetrics, merge
from cluster.request import Request
from cluster.status import RankInfo

logger = logging.getLogger(__name__)

PEERS_TIMEOUT_S = 0.8


class RestService:
    """Implements `cluster.api.core.service.Service` for a replica that owns a gang (the ranks of one engine)."""

    def __init__(self, engine: EngineClient, model: Any, rest: "RestParts", metrics: ServingMetrics) -> None:
        self.engine, self.model, self.tokenizer, self.metrics = engine, model, rest.tokenizer, metrics
        self.grammars = rest.grammars_class(rest.tokenizer, model)
        self.grammars.start()
        self._samples_call, self._page_call = CoalescedCall(self._collect_samples), CoalescedCall(self._render_page)

    async def metric_samples(self) -> list[bytes]:
        """Return the metrics of all replicas and ranks that answer, as JSON texts. Every replica returns the same."""
        return await self._samples_call.get()

    async def metrics_page(self) -> bytes:
        """Return the Prometheus text of all replicas and ranks that answer. Every replica returns the same page."""
        return await self._page_call.get()

    async def _collect_samples(self) -> list[bytes]:
        ingress_samples, engine_samples = await asyncio.gather(self._ingress_samples(), self.engine.metrics())
        return [*ingress_samples, *engine_samples]

    async def _render_page(self) -> bytes:
        return await asyncio.to_thread(merge, await self._samples_call.get())

    async def _ingress_samples(self) -> list[bytes]:
        """Return the metrics, as JSON texts, of all replicas with REST routes; in this class, of this replica only."""
        return [self.metrics.serialize()]


class GangOwner:
    """Base of the Serve replicas that own a gang, which is the group of their ranks."""

    _host: GangHost

    async def end_streams(self) -> None:
        """End every open stream of this replica with an error, because the server is shutting down."""
        self._host.router.end_streams()

    async def check_health(self) -> None:
        """Serve's health check: raise RuntimeError once the ranks are lost for good (`GangHost.check_health`)."""
        self._host.check_health()

    async def __del__(self) -> None:
        """End the streams and the ranks. Serve awaits this method when it removes the replica."""
        if hasattr(self, "_host"):
            await self._host.close()


class Replica(GangOwner):
    """The one replica class of `ingress: direct`. It owns a gang (its ranks) and serves the REST routes."""

    async def __init__(self, settings: AppSettings, factory: str = FACTORY) -> None:  # type: ignore[misc]
        """Start the gang, and load the REST routes meanwhile; return when requests can be served."""
        _set_up_process(settings)
        self._rest_options = await asyncio.to_thread(_rest_options, settings)
        self._host = GangHost(settings, factory)
        default_sampling = _default_sampling(settings, self._host.local_config)
        rest_loading = asyncio.to_thread(load_rest, self._host.local_config, settings.parsers)
        try:
            _, rest = await gather_or_cancel(self._host.start(), rest_loading)
        except BaseException:
            self._host.gang.kill()
            raise
        self._make_app = rest.make_app
        model = rest.model_info_class(
            created=int(time.time()), **_model_facts_of(settings, self._host.gang.infos[0], default_sampling)
        )
        self._service = RestService(self._host.router, model, rest, self._host.metrics)
        self._drain = rest.drain_class()
        self._replicas = settings.llm.fixed_replicas
        call_before_kill(self._host.begin_shutdown)
        tune_gil_and_gc()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the FastAPI app inside `AnnounceRefusals`. Serve calls this once, after the constructor."""
        app = self._make_app(self._service, drain=self._drain, **self._rest_options)
        replicas = self._replicas if proxies_use_middlewares() else None
        return AnnounceRefusals(app, serve.get_replica_context().replica_tag, replicas, self._count_repeated_refusals)

    def _count_repeated_refusals(self, path: str, count: int) -> None:
        self._service.metrics.on_refused("overloaded", count)
        self._service.metrics.on_response(path, 503, count)

    async def drain(self) -> int:
        """Refuse new calls for some time (`Drain.begin`), and return the number of open calls."""
        open_calls: int = self._drain.begin()
        return open_calls


class EngineReplica(GangOwner):
    """The engine replica of `ingress: resilient`. It owns a gang (its ranks); ingress replicas call it by a handle."""

    async def __init__(self, settings: AppSettings, factory: str = FACTORY) -> None:  # type: ignore[misc]
        """Start the gang; return when requests can be served."""
        _set_up_process(settings)
        self._host = GangHost(settings, factory)
        default_sampling = _default_sampling(settings, self._host.local_config)
        await self._host.start()
        info = self._host.gang.infos[0]
        self._model_facts = _model_facts_of(settings, info, default_sampling)
        self._settings_key = _settings_key_of(settings)
        config, numerics = self._host.config, f"{info.dtype}, {info.kernels}, KV cache in {info.kv_cache_dtype}"
        draft_tokens_per_tree = info.speculative_num_draft_tokens - 1
        model = f"{config.model_path} ({numerics})"
        self._heartbeat = StreamHeartbeat(model, draft_tokens_per_tree, folders_of(config), info.max_request_tokens)
        self._heartbeat_period_s = HEARTBEAT_SHARE * config.watchdog_timeout_s
        self._caller_monitor = CallerMonitor()
        call_before_kill(self._host.begin_shutdown)
        tune_gil_and_gc()

    async def generate(self, request: Request, caller: str = "") -> AsyncGenerator[StreamItem, None]:
        """Yield the items of `stream_items` for a request. Serve closes this generator when the ingress cancels its
        call. `caller` is the full name of the ingress replica.
        """
        with self._caller_monitor.open_stream(caller) as caller_gone:
            items = stream_items(
                self._host.router, request, self._heartbeat, self._heartbeat_period_s, self._abandon_reason, caller_gone
            )
            async with aclosing(items):
                async for item in items:
                    yield item

    def _abandon_reason(self) -> str:
        return "the engine replica is shutting down" if self._host.shutting_down else self._host.router.lost_reason

    async def model_facts(self) -> tuple[str, dict[str, Any]]:
        """Return the key of the settings that decide the model (`_settings_key_of`), and the fields of a `ModelInfo`
        except `created`.
        """
        return self._settings_key, self._model_facts

    async def restart_timeout_s(self) -> float:
        """Return for how many seconds streams wait for a gang that restarts, or for another engine replica."""
        return self._host.gang.restart_timeout_s

    async def status(self) -> GangStatus:
        """Return the health and load of this replica's ranks (`EngineClient.status`)."""
        return await self._host.router.status()

    async def metrics(self) -> list[bytes]:
        """Return the metrics of all engine replicas and of their ranks, one JSON text each."""
        return [self._host.metrics.serialize(), *await self._host.router.metrics()]


class ResilientService(RestService):
    """Implements `Service` for an ingress replica. The metrics cover the other ingress replicas too."""

    def __init__(
        self, engine: EngineClient, model: Any, rest: "RestParts", metrics: ServingMetrics, peers: Any
    ) -> None:
        """`peers` is the handle of the ingress deployment itself."""
        super().__init__(engine, model, rest, metrics)
        self._peers = peers

    async def _ingress_samples(self) -> list[bytes]:
        try:
            responses = self._peers.broadcast("sample")
            # `results` runs in a thread. `results_async` would drop all answers if one answer did not come in time.
            results = await asyncio.to_thread(responses.results, timeout_s=PEERS_TIMEOUT_S, return_exceptions=True)
        except Exception:
            logger.exception("the metrics of the other ingress replicas cannot be read")
            results = []
        return [sample for sample in results if isinstance(sample, bytes)] or [self.metrics.serialize()]


class IngressReplica:
    """The ingress replica of `ingress: resilient`. It serves the REST routes and calls engine replicas by a handle."""

    async def __init__(self, settings: AppSettings, engine: Any) -> None:  # type: ignore[misc]
        """Load the REST routes and wait for an engine replica; return when requests can be served."""
        _set_up_process(settings)
        self._rest_options = await asyncio.to_thread(_rest_options, settings)
        context = serve.get_replica_context()
        config = resolve_engine_paths(settings.llm.engine_config())
        engine_calls = HandleCalls(engine, context.replica_id.to_full_id_str())
        rest_loading = asyncio.to_thread(lambda: load_rest(fetch_configs(config), settings.parsers))
        facts, rest = await gather_or_cancel(
            _wait_for_model_facts(engine_calls, _settings_key_of(settings)), rest_loading
        )
        restart_timeout_s = await engine_calls.call("restart_timeout_s")
        self._make_app = rest.make_app
        model = rest.model_info_class(created=int(time.time()), **facts)
        self._metrics = ServingMetrics(model_name=model.model_id, replica=context.replica_id.unique_id)
        rank, on_resumed = context.rank.rank, self._metrics.on_resumed
        self._client = ResilientClient(
            engine_calls, config, rank, on_resumed, restart_timeout_s, self._update_token_limit
        )
        self._engine, self._token_limit = engine, SharedTokenLimit()
        peers = serve.get_deployment_handle(context.deployment, context.app_name)
        self._service = ResilientService(self._client, model, rest, self._metrics, peers)
        self._drain = rest.drain_class()
        tune_gil_and_gc()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the FastAPI app. Serve calls this once, after the constructor."""
        return self._make_app(self._service, drain=self._drain, **self._rest_options)

    def _update_token_limit(self, max_request_tokens: int) -> None:
        """Record an engine replica's token limit. Clients see the smallest one, which fits every engine replica."""
        if (smallest_limit := self._token_limit.update(max_request_tokens)) != self._service.model.kv_cache_tokens:
            self._service.model = replace(self._service.model, kv_cache_tokens=smallest_limit)

    async def drain(self) -> int:
        """Refuse new calls for some time (`Drain.begin`), and return the number of open calls."""
        open_calls: int = self._drain.begin()
        return open_calls

    async def end_streams(self) -> None:
        """End every open stream with an error, here and on all engine replicas, because the server is shutting down."""
        self._client.end_streams()
        responses = self._engine.broadcast("end_streams")
        await responses.results_async(timeout_s=PEERS_TIMEOUT_S, return_exceptions=True)

    async def sample(self) -> bytes:
        """Return this replica's metrics as a JSON text. The other ingress replicas call this (`ResilientService`)."""
        return self._metrics.serialize()


def _set_up_process(settings: AppSettings) -> None:
    """Set up this replica's log, and bind its gRPC server to the node's own address."""
    configure(settings.log(serve.get_replica_context().app_name))
    _bind_to_node_only()


def _rest_options(settings: AppSettings) -> dict[str, Any]:
    """Return the options of `make_app` that the settings decide: API keys, allowed origins, and the status page.

    Raises:
        ConfigError: the API keys cannot be used, or there are no keys and other machines can reach Serve's proxy.
    """
    keys = ApiKeys.load(settings.api_keys_file)
    if keys is None and not settings.allow_unauthenticated:
        client: Any = _get_global_client()
        check_exposure(client.http_config.host, keys, allow_unauthenticated=False)
    return {"keys": keys, "origins": settings.allowed_origins, "page": settings.page}


def _bind_to_node_only() -> None:
    """Bind Serve's gRPC server of this replica to the node's own address only.

    Serve 2.60 opens a gRPC server in every replica, on all addresses and without a token, and unpickles the data that
    arrives. Aerie does not use this server. Bound to the node's address, it can be reached only by machines that can
    reach the rest of Ray: only by this machine if `aerie serve` started Ray. A version of Serve without
    `add_port_to_grpc_server` is not patched.
    """
    replica = importlib.import_module("ray.serve._private.replica")
    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        logger.warning("Serve's replica has no add_port_to_grpc_server; its gRPC server may listen on all addresses")
        return
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    host = f"[{node}]" if ":" in node else node
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", host))  # type: ignore[attr-defined]


def _default_sampling(settings: AppSettings, config: EngineConfig) -> dict[str, float]:
    """Return default sampling parameters from the model's generation_config.json; empty with `sampling_defaults:
    openai`. Call this before the gang loads, so that a broken file raises its ConfigError at once.
    """
    return sampling_defaults(config.model_path) if settings.sampling_defaults == "model" else {}


def _model_facts_of(settings: AppSettings, info: RankInfo, default_sampling: dict[str, float]) -> dict[str, Any]:
    """Return the fields of a `ModelInfo` except `created`; `info` is the report of rank 0."""
    return {
        "model_id": settings.llm.model_loading_config.model_id,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "kv_cache_tokens": info.max_request_tokens,
        "eos_token_ids": info.eos_token_ids,
        "sampling_defaults": default_sampling,
    }


def _settings_key_of(settings: AppSettings) -> str:
    """Return the settings that decide the fields of a `ModelInfo`, as one string that two replicas can compare."""
    return f"{settings.llm.model_loading_config.model_id} {settings.llm.engine_config().model_dump_json()}"


async def _wait_for_model_facts(engine_calls: EngineCalls, settings_key: str) -> dict[str, Any]:
    """Wait for an engine replica whose settings have the key `settings_key`, and return its fields of a `ModelInfo`
    (all except `created`). During a redeploy, engine replicas with the old settings, perhaps with another model, answer
    too; their answers are ignored.
    """
    logged_reason = ""
    while True:
        try:
            replica_settings_key, facts = await engine_calls.call("model_facts")
            if replica_settings_key == settings_key:
                return dict(facts)
            reason = "only engine replicas of other settings are up yet"
        except EngineGoneError as error:
            reason = str(error)
        if reason != logged_reason:
            logger.info("no engine replica of these settings answers yet: %s", reason)
        logged_reason = reason
        await asyncio.sleep(RETRY_S)


def build_app(settings: AppSettings, factory: str = FACTORY) -> Application:
    """Return the application for validated settings. `factory` is the import path of the function that builds an
    engine; tests replace it.

    Hub names become commits here, so that all replicas and ranks load the same files, even if they start later.

    Raises:
        ConfigError: a hub has no such model or revision, or cannot be reached.
    """
    settings = pin_hub_models(settings)
    llm = settings.llm
    name = "aerie-" + llm.model_loading_config.model_id.replace("/", "--").replace(".", "_").replace("#", "_")
    if settings.ingress == "direct":
        ingress = _deployment(serve.ingress()(Replica), name, llm.deployment_config, llm.runtime_env)
        direct: Application = ingress.bind(settings, factory)
        return direct
    engine = _deployment(EngineReplica, f"{name}-engine", llm.deployment_config, llm.runtime_env)
    ingress = _deployment(serve.ingress()(IngressReplica), name, settings.ingress_deployment_config, llm.runtime_env)
    resilient: Application = ingress.bind(settings, engine.bind(settings, factory))
    return resilient


def _deployment(replica: Any, name: str, configured_options: dict[str, Any], runtime_env: dict[str, Any]) -> Any:
    """Return the deployment of a replica class: `DEPLOYMENT_DEFAULTS`, overridden by `configured_options`."""
    options = {**DEPLOYMENT_DEFAULTS, **configured_options}
    options["ray_actor_options"] = {
        **DEPLOYMENT_DEFAULTS["ray_actor_options"],
        **({"runtime_env": runtime_env} if runtime_env else {}),
        **configured_options.get("ray_actor_options", {}),
    }
    deployment: Any = serve.deployment(replica)
    return deployment.options(name=name, **options)


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return the application for the `args` of a Serve config; Serve calls this builder by its import path.

    Raises:
        ConfigError: an argument is unknown, missing or wrong; one line for each.
    """
    return build_app(parse(args))
