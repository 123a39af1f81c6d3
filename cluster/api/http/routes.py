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
from cluster.api.anthropic.shape import ENVELOPE, read_message
from cluster.api.core import errors
from cluster.api.core.adapter import checked
from cluster.api.core.api_keys import PAGE, ApiKeys
from cluster.api.core.conversation import ChatRequest, TokenizeRequest
from cluster.api.core.errors import RESTART_S, ApiError, shown, unavailable
from cluster.api.core.fields import WARNING_HEADER, warning_headers
from cluster.api.core.generation import CompletionRequest, DetokenizeRequest, check_model
from cluster.api.core.limits import RequestLimits, off_loop
from cluster.api.core.service import Service
from cluster.api.core.wire import BodyReader, json_bytes
from cluster.api.http import calls
from cluster.api.http.middleware import (
    AccessLog,
    Drain,
    DrainMiddleware,
    Guard,
    HeadAsGet,
    SlashBehindPrefix,
    envelope_of,
    is_anonymous,
    key_of,
)
from cluster.api.http.openapi import POLICY, OtherApi, body_of, describe, page_of
from cluster.api.http.server_state import facts_of, state_of
from cluster.api.openai.answers import read_chat, read_completion
from cluster.api.openai.responses.request import ResponseRequest
from cluster.api.openai.responses.shape import read_response
from cluster.api.page import add_page
from cluster.chat.formats.choose import ChosenFormat

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
OTHER_APIS = (
    OtherApi("/v1/responses", (ResponseRequest,)),
    OtherApi("/v1/messages", (MessagesRequest, CountRequest), "AnthropicError", ENVELOPE),
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

    If `limits` is None, the limits follow from the model's context length. `drain` says when to refuse calls. If `keys`
    is None, every route is open to everyone. Browser pages of the `origins` may call the server (CORS). If `page` is
    true, / serves the status page.
    """
    limits = limits or RequestLimits.of(service.model.context_length)
    app = FastAPI(title="Aerie", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install(app, envelope_of)
    intake = BodyReader(limits)
    _add_generation(app, service, limits, intake)
    _add_other_apis(app, service, limits, intake)
    _add_tokens(app, service, limits, intake)
    _add_facts(app, service, limits)
    if page:
        add_page(app)
        _add_state(app, service)
    describe(app, limits, OTHER_APIS)
    app.add_middleware(HeadAsGet)
    app.add_middleware(DrainMiddleware, drain=drain or Drain())
    if keys is not None:
        app.add_middleware(Guard, keys=keys, routes=app.routes)
    if page:
        app.add_middleware(SlashBehindPrefix)
    if origins:  # added after the guard, so CORS comes first: a browser's preflight request carries no key
        exposed = [WARNING_HEADER, "retry-after"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    app.add_middleware(
        AccessLog,
        service=service,
        routes=[route.path for route in app.routes if isinstance(route, Route) and route.path not in PAGE],
    )
    return app


def _add_generation(app: FastAPI, service: Service, limits: RequestLimits, intake: BodyReader) -> None:
    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await calls.answer(service, limits, intake, request, read_completion)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await calls.answer(service, limits, intake, request, read_chat)


def _add_other_apis(app: FastAPI, service: Service, limits: RequestLimits, intake: BodyReader) -> None:
    @app.post("/v1/responses", openapi_extra=body_of(ResponseRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation, in OpenAI's newer form; nothing is stored."""
        return await calls.answer(service, limits, intake, request, read_response)

    @app.post("/v1/responses/input_tokens", openapi_extra=body_of(ResponseRequest))
    async def input_tokens(request: Request) -> Response:
        """The number of tokens in the prompt of a response."""
        count, warnings = await calls.count(service, limits, intake, request, read_response)
        return _json({"object": "response.input_tokens", "input_tokens": count}, warnings)

    @app.get("/v1/responses/{response_id:path}")
    @app.post("/v1/responses/{response_id:path}")
    @app.delete("/v1/responses/{response_id:path}")
    async def stored_response(response_id: str) -> Response:
        """Always 404: this server stores no response, so none can be read, cancelled or deleted."""
        message = f"there is no response {shown(response_id)}: this server stores none; keep the answer of the call"
        raise ApiError(message, status=404, code="not_found")

    @app.post("/v1/messages", openapi_extra=body_of(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        return await calls.answer(service, limits, intake, request, read_message)

    @app.post("/v1/messages/count_tokens", openapi_extra=body_of(CountRequest))
    async def count_tokens(request: Request) -> Response:
        """The number of tokens in the prompt of a message."""
        count, warnings = await calls.count(service, limits, intake, request, partial(read_message, kind=CountRequest))
        return _json({"input_tokens": count}, warnings)


def _add_tokens(app: FastAPI, service: Service, limits: RequestLimits, intake: BodyReader) -> None:
    @app.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        async with intake.json(request) as (body, length):
            fields, warnings = await off_loop(length, lambda: checked(service, limits, TokenizeRequest, body))
            ids = await calls.tokens_of(service, fields, length)
        facts = {"count": len(ids), "max_model_len": service.model.room, "tokens": list(ids)}
        return await off_loop(len(ids), lambda: _json(facts, warnings))

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        async with intake.json(request) as (body, length):
            fields, warnings = await off_loop(length, lambda: DetokenizeRequest.read(body))
            text = await calls.text_of(service, fields, length)
            return await off_loop(len(text), lambda: _json({"prompt": text}, warnings))


def _add_facts(app: FastAPI, service: Service, limits: RequestLimits) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The list of served models; it has one entry."""
        return _json({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """One model's card."""
        check_model(service.model, model_id)
        return _json(_card(service))

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Whether the engine makes progress: 200 while it does, else 503 with the reason."""
        await _check_progress(service, request)
        return Response()

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        """Whether to send requests here: 200 while the engine serves, else 503 with the reason."""
        await _check_progress(service, request)
        return Response()

    @app.get("/server_info")
    async def server_info() -> Response:
        """The resolved settings and the counters of every rank."""
        chosen = ChosenFormat(None) if service.tokenizer is None else service.tokenizer.chosen
        return _json(facts_of(service.model, limits, await _status(service), chosen))

    @app.get("/metrics")
    async def metrics() -> Response:
        """The Prometheus page of all replicas and ranks."""
        return Response(await service.metrics_page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/docs")
    async def docs() -> Response:
        """The routes and the fields of their bodies, as an HTML page."""
        page = page_of(app.openapi())
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    @app.get("/version")
    async def version() -> Response:
        """The version of Aerie."""
        return _json({"version": __version__})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/server_state")
    async def server_state(request: Request) -> Response:
        """The present state of the server, for its status page."""
        status, samples = await asyncio.gather(_status(service), service.samples())
        key = key_of(request.scope)
        causes = key is None or key.scope == "admin"
        return _json(await asyncio.to_thread(state_of, service.model.model_id, status, samples, causes))


async def _check_progress(service: Service, request: Request) -> None:
    status = await _status(service)
    if not status.healthy:
        start_s = status.history.start_seconds or RESTART_S  # 0 until the first start is over
        reason = "" if is_anonymous(request.scope) else status.reason
        raise unavailable(reason or "the engine is not healthy", start_s)


async def _status(service: Service) -> GangStatus:
    """Return the gang's status. If it cannot be read within `STATUS_TIMEOUT_S`, return an unhealthy status."""
    try:
        return await asyncio.wait_for(service.engine.status(), STATUS_TIMEOUT_S)
    except TimeoutError:
        return GangStatus(False, f"the engine did not answer within {STATUS_TIMEOUT_S:g} s")
    except Exception:
        logger.exception("the engine's status cannot be read")
        return GangStatus(False, "the engine's status cannot be read; the log has the cause")


def _card(service: Service) -> dict[str, Any]:
    model = service.model
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "aerie",
        "root": model.model_id,
        "parent": None,
        "max_model_len": model.room,
    }


def _json(content: Any, warnings: list[str] | None = None) -> Response:
    return Response(json_bytes(content), media_type="application/json", headers=warning_headers(warnings or []))
