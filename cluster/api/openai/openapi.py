"""What /openapi.json says: every field of every body with its accepted values, every status of every route.

The handlers read bodies themselves, so FastAPI does not know their fields; what it generates is replaced.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cluster.api.keys import OPEN
from cluster.api.openai.body import MAX_KEYS
from cluster.api.openai.content import ROLES, Strict
from cluster.api.openai.fields import REFUSED, REMEDIES
from cluster.api.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cluster.api.openai.service import Limits

BODIES: tuple[type[Strict], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
PLACE = "#/components/schemas/{model}"
GENERATES = ("/v1/completions", "/v1/chat/completions")
PAGES: Mapping[str, Mapping[str, Any]] = {"/health": {}, "/ready": {}, "/metrics": {"text/plain": {"schema": {}}}}
STATUSES: Mapping[str, str] = {
    "400": "A field is wrong; `param` names it",
    "401": "The server has API keys, and none of them came with the request",
    "403": "The API key is for other routes",
    "404": "The model asked for is not served",
    "408": "The body came too slowly",
    "413": "The body is too long",
    "415": "The body is not JSON, or is compressed",
    "500": "The server failed; its log has the cause",
    "503": "The server is full or not healthy; see Retry-After",
}
OF_BODIES = ("400", "404", "408", "413", "415", "500", "503")
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": NULLABLE,
                "code": NULLABLE,
            },
        }
    },
}


def body_of(fields: type[Strict]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is `fields`."""
    content = {"application/json": {"schema": {"$ref": PLACE.format(model=fields.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, limits: Limits) -> None:
    """Have /openapi.json describe what the routes really accept and answer."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"] = {"schemas": schemas(limits)}
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    _say_responses(path, operation)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def schemas(limits: Limits) -> dict[str, Any]:
    """The schemas of all bodies and of an error; a body that the routes or `limits` refuse does not match them."""
    _, found = models_json_schema([(fields, "validation") for fields in BODIES], ref_template=PLACE)
    named: dict[str, Any] = found["$defs"]
    for name in ("CompletionRequest", "ChatRequest"):
        of = named[name]["properties"]
        of["n"]["maximum"] = limits.choices
        _inner(of["stop"], "array").update(maxItems=limits.stops)
        _inner(of["stop"], "array")["items"] = _stop(limits)
        _inner(of["stop"], "string").update(_stop(limits))
        of["stop_token_ids"].update(maxItems=limits.stop_token_ids)
        of["stop_token_ids"]["items"]["minimum"] = 0
        of["logit_bias"].update(maxProperties=MAX_KEYS, propertyNames={"pattern": "^[0-9]{1,9}$"})
        of["bad_words"].update(maxItems=limits.bad_words, items={**_stop(limits), "pattern": r"\S"})
        _inner(of["allowed_token_ids"], "array")["items"]["minimum"] = 0
        for field in (*REFUSED, *REMEDIES):
            values = [*REFUSED.get(field, ()), None]
            of.setdefault(field, {"enum": values, "description": "Not supported: only these values are accepted"})
    completion, chat = (named[name]["properties"] for name in ("CompletionRequest", "ChatRequest"))
    _inner(completion["logprobs"], "integer")["maximum"] = limits.logprobs
    _inner(chat["top_logprobs"], "integer")["maximum"] = limits.logprobs
    _say_prompt(completion["prompt"], limits)
    for fields in BODIES:
        named[fields.__name__]["maxProperties"] = MAX_KEYS
        messages = named[fields.__name__]["properties"].get("messages")
        if messages is not None:
            messages["maxItems"] = limits.messages
            named[fields.__name__]["properties"]["tools"]["maxItems"] = limits.tools
    named["ChatMessage"]["properties"]["role"] = {"enum": [*ROLES]}
    part: dict[str, Any] = {"type": "object", "required": ["type", "text"]}
    part["properties"] = {"type": {"const": "text"}, "text": {"type": "string"}}
    _inner(named["ChatMessage"]["properties"]["content"], "array")["items"] = part
    named["TokenizeRequest"]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    named["Error"] = ERROR
    return named


def _stop(limits: Limits) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": limits.stop_characters}


def _say_prompt(prompt: dict[str, Any], limits: Limits) -> None:
    for choice in prompt["anyOf"]:
        if choice["type"] == "string":
            choice["minLength"] = 1
            continue
        choice["minItems"] = 1
        items = choice["items"]
        if items["type"] == "integer":
            items["minimum"] = 0
            continue
        choice["maxItems"] = limits.sequences
        items["minLength" if items["type"] == "string" else "minItems"] = 1
        if items["type"] == "array":
            items["items"]["minimum"] = 0


def _inner(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The alternative of a field's schema that has the type `kind`, or the schema itself."""
    found: dict[str, Any] = next((one for one in schema.get("anyOf", ()) if one.get("type") == kind), schema)
    return found


def _say_responses(path: str, operation: dict[str, Any]) -> None:
    """Add all statuses of a route, with the content of their bodies."""
    good: dict[str, Any] = {"description": "Success"}
    kinds = PAGES.get(path, {"application/json": {"schema": {}}})
    if path in GENERATES:
        kinds = {**kinds, "text/event-stream": {"schema": {"type": "string"}}}
    if kinds:
        good["content"] = dict(kinds)
    statuses: tuple[str, ...] = (
        OF_BODIES if "requestBody" in operation else ("500", "503") if path in PAGES else ("500",)
    )
    if "{model_id}" in path:
        statuses = ("404", "500")
    if path not in OPEN:
        statuses = ("401", "403", *statuses)
    content = {"application/json": {"schema": {"$ref": PLACE.format(model="Error")}}}
    operation["responses"] = {
        "200": good,
        **{status: {"description": STATUSES[status], "content": content} for status in statuses},
    }
