"""One reader per API. It turns the body of a generating route into a core request: a completion or chat request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from cluster.api.anthropic.request import CountRequest, MessagesRequest
from cluster.api.anthropic.shape import MessageShape
from cluster.api.core.content import unread
from cluster.api.core.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from cluster.api.core.service import RequestLimits, Served
from cluster.api.core.tools import left_out_warnings
from cluster.api.core.translated import Origins
from cluster.api.openai.answers import AnswerContext, AnswerShape, ChatShape, CompletionShape
from cluster.api.openai.responses.request import ResponseRequest
from cluster.api.openai.responses.shape import ResponseShape
from cluster.chat.formats.choose import NONE

F = TypeVar("F", CompletionRequest, ChatRequest, TokenizeRequest)


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """The body of any API as a completion or chat request (`fields`), with warnings about ignored fields.

    `shape` builds the object that writes the answer. The answer's id begins with `prefix`. If `id_header` is not empty,
    a response header of that name also has the id. `origins` translates names of `fields` in errors and warnings into
    the names in the client's body.
    """

    fields: CompletionRequest | ChatRequest
    warnings: list[str]
    prefix: str
    shape: Callable[[AnswerContext], AnswerShape]
    origins: Origins = field(default_factory=lambda: Origins({}))
    id_header: str = ""


Reader = Callable[[Served, RequestLimits, Mapping[str, Any]], CoreRequest]
"""A function that parses the body of one API. It raises an ApiError that names the wrong field if the body cannot be
served.
"""


def checked(service: Served, limits: RequestLimits, kind: type[F], body: Mapping[str, Any]) -> tuple[F, list[str]]:
    """Return the request in a JSON body, checked against the model and the limits, and warnings about ignored fields.

    Raises:
        ApiError: the body cannot be served; the error names the field at fault.
    """
    fields, warnings = kind.read(body)
    fields.check(service.model, limits)
    if isinstance(fields, TokenizeRequest):
        return fields, warnings + left_out_warnings(fields.tools)
    if isinstance(fields, ChatRequest):
        warnings += left_out_warnings(fields.tools) + unread(fields.messages)
    return fields.filled(service.model.sampling), warnings


def asked_text(service: Served, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/completions."""
    fields, warnings = checked(service, limits, CompletionRequest, body)
    return CoreRequest(fields, warnings, "cmpl-", lambda about: CompletionShape(*about))


def asked_chat(service: Served, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/chat/completions."""
    fields, warnings = checked(service, limits, ChatRequest, body)
    return CoreRequest(fields, warnings, "chatcmpl-", lambda about: ChatShape(*about))


def asked_response(service: Served, limits: RequestLimits, body: Mapping[str, Any]) -> CoreRequest:
    """Read a body of /v1/responses."""
    request, warnings = ResponseRequest.read(body)
    chat, origins = request.translated()
    with origins.named():
        chat.check(service.model, limits)
    chat = chat.filled(service.model.sampling)
    shape = partial(ResponseShape, request, chat.temperature, chat.top_p)
    warnings += [*map(origins.reworded, left_out_warnings(chat.tools)), *request.said_beside()]
    return CoreRequest(chat, warnings, "resp_", shape, origins)


def asked_message(
    service: Served, limits: RequestLimits, body: Mapping[str, Any], kind: type[CountRequest] = MessagesRequest
) -> CoreRequest:
    """Read a body of /v1/messages, or of /v1/messages/count_tokens with `kind` CountRequest."""
    request, warnings = kind.read(body)
    chat, origins = request.translated()
    with origins.named():
        chat.check(service.model, limits)
    chat = chat.filled(service.model.sampling)
    thinks = service.tokenizer is not None and service.tokenizer.chosen.thought != NONE
    warnings += [*map(origins.reworded, left_out_warnings(chat.tools)), *request.said_beside(thinks)]
    return CoreRequest(chat, warnings, "msg_", MessageShape, origins, "request-id")
