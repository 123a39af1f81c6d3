"""The REST app of one replica. It does not import Ray; `cluster.api.serve.application` mounts it in a Serve replica."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from cluster import __version__
from cluster.actors.messages import GangStatus
from cluster.api.anthropic.request import CountRequest, MessagesRequest
from cluster.api.anthropic.shape import ENVELOPE_SCHEMA, read_message
from cluster.api.core import errors
from cluster.api.core.adapter import read_checked_request
from cluster.api.core.api_keys import PAGE_PATHS, ApiKeys
from cluster.api.core.conversation import ChatRequest, TokenizeRequest
from cluster.api.core.errors import DEFAULT_RESTART_S, ApiError, truncated_repr, unavailable_error
from cluster.api.core.fields import WARNING_HEADER, warning_headers
from cluster.api.core.generation import CompletionRequest, DetokenizeRequest, check_model
from cluster.api.core.limits import RequestLimits, run_off_loop
from cluster.api.core.service import Service
from cluster.api.core.wire import BodyReader, json_bytes
from cluster.api.http import calls
from cluster.api.http.middleware import (
    AccessLog,
    Drain,
    DrainMiddleware,
    Guard,
    HeadAsGet,
    TrailingSlashRedirect,
    envelope_of,
    is_anonymous,
    key_of,
)
from cluster.api.http.openapi import POLICY, OtherApi, install_openapi, render_page, request_body_schema
from cluster.api.http.server_state import build_server_info, build_server_state
from cluster.api.openai.answers import read_chat, read_completion
from cluster.api.openai.responses.request import ResponseRequest
from cluster.api.openai.responses.shape import read_response
from cluster.api.page import add_page
from cluster.chat.formats.choose import ChosenFormat

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
OTHER_APIS = (
    OtherApi("/v1/responses", (ResponseRequest,)),
    OtherApi("/v1/messages", (MessagesRequest, CountRequest), "AnthropicError", ENVELOPE_SCHEMA),
)


def make_app(
    service: Service,
    limits: RequestLimits | None = None,
    drain: Drain | None = None,
    keys: ApiKeys | None = None,
    origins: Sequence[str] = (),
    page: bool = True,
) -> FastAPI:
    """Return the REST app of `service`. Every call reads the properties of `service` again, so they may change.

    If `limits` is None, the limits follow from the model's context length. `drain` says when to refuse calls; with None
    calls are never refused for draining. If `keys` is None, every route is open to everyone. Browser pages of the
    `origins` may call the server (CORS). If `page` is true, / serves the status page, and /server_state its data.
    """
    limits = limits or RequestLimits.of(service.model.context_length)
    app = FastAPI(title="Aerie", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install_error_handlers(app, envelope_of)
    body_reader = BodyReader(limits)
    _add_generation_routes(app, service, limits, body_reader)
    _add_other_api_routes(app, service, limits, body_reader)
    _add_token_routes(app, service, limits, body_reader)
    _add_info_routes(app, service, limits)
    if page:
        add_page(app)
        _add_state_route(app, service)
    install_openapi(app, limits, OTHER_APIS)
    app.add_middleware(HeadAsGet)
    app.add_middleware(DrainMiddleware, drain=drain or Drain())
    if keys is not None:
        app.add_middleware(Guard, keys=keys, routes=app.routes)
    if page:
        app.add_middleware(TrailingSlashRedirect)
    if origins:  # added after the guard, so CORS comes first: a browser's preflight request carries no key
        exposed = [WARNING_HEADER, "retry-after"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    app.add_middleware(
        AccessLog,
        service=service,
        routes=[route.path for route in app.routes if isinstance(route, Route) and route.path not in PAGE_PATHS],
    )
    return app


def _add_generation_routes(app: FastAPI, service: Service, limits: RequestLimits, body_reader: BodyReader) -> None:
    @app.post("/v1/completions", openapi_extra=request_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await calls.answer(service, limits, body_reader, request, read_completion)

    @app.post("/v1/chat/completions", openapi_extra=request_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await calls.answer(service, limits, body_reader, request, read_chat)


def _add_other_api_routes(app: FastAPI, service: Service, limits: RequestLimits, body_reader: BodyReader) -> None:
    @app.post("/v1/responses", openapi_extra=request_body_schema(ResponseRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation, in OpenAI's newer form; nothing is stored."""
        return await calls.answer(service, limits, body_reader, request, read_response)

    @app.post("/v1/responses/input_tokens", openapi_extra=request_body_schema(ResponseRequest))
    async def input_tokens(request: Request) -> Response:
        """The number of tokens in the prompt of a response."""
        count, warnings = await calls.count_prompt_tokens(service, limits, body_reader, request, read_response)
        return _json({"object": "response.input_tokens", "input_tokens": count}, warnings)

    @app.get("/v1/responses/{response_id:path}")
    @app.post("/v1/responses/{response_id:path}")
    @app.delete("/v1/responses/{response_id:path}")
    async def stored_response(response_id: str) -> Response:
        """Always answers 404: this server stores no response, so none can be read, cancelled or deleted."""
        message = (
            f"there is no response {truncated_repr(response_id)}: this server stores none; keep the answer of the call"
        )
        raise ApiError(message, status=404, code="not_found")

    @app.post("/v1/messages", openapi_extra=request_body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        return await calls.answer(service, limits, body_reader, request, read_message)

    @app.post("/v1/messages/count_tokens", openapi_extra=request_body_schema(CountRequest))
    async def count_tokens(request: Request) -> Response:
        """The number of tokens in the prompt of a message."""
        count, warnings = await calls.count_prompt_tokens(
            service, limits, body_reader, request, partial(read_message, request_class=CountRequest)
        )
        return _json({"input_tokens": count}, warnings)


def _add_token_routes(app: FastAPI, service: Service, limits: RequestLimits, body_reader: BodyReader) -> None:
    @app.post("/tokenize", openapi_extra=request_body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        async with body_reader.read_json(request) as (body, length):
            fields, warnings = await run_off_loop(
                length, lambda: read_checked_request(service, limits, TokenizeRequest, body)
            )
            ids = await calls.tokenize(service, fields, length)
        content = {"count": len(ids), "max_model_len": service.model.max_request_tokens, "tokens": list(ids)}
        return await run_off_loop(len(ids), lambda: _json(content, warnings))

    @app.post("/detokenize", openapi_extra=request_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        async with body_reader.read_json(request) as (body, length):
            fields, warnings = await run_off_loop(length, lambda: DetokenizeRequest.read(body))
            text = await calls.detokenize(service, fields, length)
            return await run_off_loop(len(text), lambda: _json({"prompt": text}, warnings))


def _add_info_routes(app: FastAPI, service: Service, limits: RequestLimits) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The list of served models; it has one entry."""
        return _json({"object": "list", "data": [_model_card(service)]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """The entry of one model in the list of models."""
        check_model(service.model, model_id)
        return _json(_model_card(service))

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Whether the engine makes progress: 200 while it does, else 503 with the reason."""
        await _check_healthy(service, request)
        return Response()

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        """Whether to send requests here: 200 while the engine serves and calls are accepted, else 503 with a reason."""
        await _check_healthy(service, request)
        return Response()

    @app.get("/server_info")
    async def server_info() -> Response:
        """The resolved settings and the counters of every rank."""
        chat_formats = ChosenFormat(None) if service.tokenizer is None else service.tokenizer.chosen_format
        return _json(build_server_info(service.model, limits, await _status(service), chat_formats))

    @app.get("/metrics")
    async def metrics() -> Response:
        """The Prometheus page of all replicas and ranks."""
        return Response(await service.metrics_page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/docs")
    async def docs() -> Response:
        """The routes and the fields of their bodies, as an HTML page."""
        page = render_page(app.openapi())
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    @app.get("/version")
    async def version() -> Response:
        """The version of Aerie."""
        return _json({"version": __version__})


def _add_state_route(app: FastAPI, service: Service) -> None:
    @app.get("/server_state")
    async def server_state(request: Request) -> Response:
        """The present state of the server, for its status page."""
        status, samples = await asyncio.gather(_status(service), service.metric_samples())
        key = key_of(request.scope)
        include_reasons = key is None or key.scope == "admin"
        return _json(
            await asyncio.to_thread(build_server_state, service.model.model_id, status, samples, include_reasons)
        )


async def _check_healthy(service: Service, request: Request) -> None:
    status = await _status(service)
    if not status.healthy:
        start_s = status.history.start_seconds or DEFAULT_RESTART_S  # 0 until the first start is over
        reason = "" if is_anonymous(request.scope) else status.reason
        raise unavailable_error(reason or "the engine is not healthy", start_s)


async def _status(service: Service) -> GangStatus:
    """Return the status of the engine. If it cannot be read within `STATUS_TIMEOUT_S`, return an unhealthy status."""
    try:
        return await asyncio.wait_for(service.engine.status(), STATUS_TIMEOUT_S)
    except TimeoutError:
        return GangStatus(False, f"the engine did not answer within {STATUS_TIMEOUT_S:g} s")
    except Exception:
        logger.exception("the engine's status cannot be read")
        return GangStatus(False, "the engine's status cannot be read; the log has the cause")


def _model_card(service: Service) -> dict[str, Any]:
    model = service.model
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "aerie",
        "root": model.model_id,
        "parent": None,
        "max_model_len": model.max_request_tokens,
    }


def _json(content: Any, warnings: list[str] | None = None) -> Response:
    return Response(json_bytes(content), media_type="application/json", headers=warning_headers(warnings or []))
