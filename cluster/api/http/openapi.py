"""Builds /openapi.json: the fields of every body with their accepted values, and the statuses of every route.

The handlers read bodies themselves, so FastAPI does not know the fields. Its generated schemas are replaced here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cluster.api.core.api_keys import OPEN
from cluster.api.core.conversation import ROLES, ChatRequest, TokenizeRequest
from cluster.api.core.fields import REFUSED, REMEDIES, Strict
from cluster.api.core.generation import CompletionRequest, DetokenizeRequest
from cluster.api.core.limits import RequestLimits
from cluster.api.core.translated import TranslatedBody
from cluster.api.core.wire import MAX_KEYS

BODIES: tuple[type[Strict], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
PLACE = "#/components/schemas/"
GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
PAGES: Mapping[str, Mapping[str, Any]] = {
    "/health": {},
    "/ready": {},
    "/metrics": {"text/plain": {"schema": {}}},
    "/docs": {"text/html": {"schema": {"type": "string"}}},
}
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


class OtherApi(NamedTuple):
    """An API whose bodies become chat requests. `path` is the root of its paths; `error` is the JSON schema of its
    errors.
    """

    path: str
    bodies: tuple[type[TranslatedBody], ...]
    error_name: str = "Error"
    error: Mapping[str, Any] = ERROR


def body_of(fields: type[Strict]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is `fields`."""
    content = {"application/json": {"schema": {"$ref": PLACE + fields.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, limits: RequestLimits, others: Sequence[OtherApi] = ()) -> None:
    """Replace the document of /openapi.json by one that describes what the routes accept and answer."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"] = {"schemas": schemas(limits, others)}
            for path, operations in schema["paths"].items():
                error = next((other.error_name for other in others if f"{path}/".startswith(f"{other.path}/")), "Error")
                for operation in operations.values():
                    _say_responses(path, operation, error)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def schemas(limits: RequestLimits, others: Sequence[OtherApi] = ()) -> dict[str, Any]:
    """Return the schemas of all bodies and of errors. A body that exceeds one of `limits` does not match its schema."""
    translated = [fields for other in others for fields in other.bodies]
    _, found = models_json_schema(
        [(fields, "validation") for fields in (*BODIES, *translated)], ref_template=PLACE + "{model}"
    )
    named: dict[str, Any] = found["$defs"]
    for name in ("CompletionRequest", "ChatRequest"):
        of = named[name]["properties"]
        of["n"]["maximum"] = limits.choices
        _inner(of["prompt_logprobs"], "integer")["maximum"] = limits.logprobs
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
    _inner(completion["best_of"], "integer")["maximum"] = limits.choices
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
    for fields in translated:
        _say_translated(named[fields.__name__], fields, chat, limits)
    return {**named, "Error": ERROR, **{other.error_name: other.error for other in others}}


def _say_translated(
    schema: dict[str, Any], fields: type[TranslatedBody], chat: Mapping[str, Any], limits: RequestLimits
) -> None:
    """Add fields to the schema of another API's body: fields shared with a chat request, and refused fields."""
    of, table = schema["properties"], fields.table
    of |= {name: chat[name] for name in sorted(fields.extensions)}
    for name in (*table.refused, *table.remedies):
        values = [*table.refused.get(name, ()), None]
        of.setdefault(name, {"enum": values, "description": "Not supported: only these values are accepted"})
    schema["maxProperties"] = MAX_KEYS
    of["tools"]["maxItems"] = limits.tools
    if "top_logprobs" in fields.model_fields:
        of["top_logprobs"]["maximum"] = limits.logprobs


def _stop(limits: RequestLimits) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": limits.stop_characters}


def _say_prompt(prompt: dict[str, Any], limits: RequestLimits) -> None:
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
    """Return the alternative of type `kind` in a field's schema, or the schema itself if it has no such alternative."""
    found: dict[str, Any] = next((one for one in schema.get("anyOf", ()) if one.get("type") == kind), schema)
    return found


def _say_responses(path: str, operation: dict[str, Any], error: str) -> None:
    """Set the responses of a route: every status, with the content type and schema of its body."""
    good: dict[str, Any] = {"description": "Success"}
    kinds = PAGES.get(path, {"application/json": {"schema": {}}})
    if path in GENERATES:
        kinds = {**kinds, "text/event-stream": {"schema": {}}}
    if kinds:
        good["content"] = dict(kinds)
    statuses: tuple[str, ...] = (
        OF_BODIES if "requestBody" in operation else ("500", "503") if path in PAGES else ("500",)
    )
    if "{model_id}" in path or "{response_id}" in path:
        statuses = ("404", "500")
    if path not in OPEN:
        statuses = ("401", "403", *statuses)
    content = {"application/json": {"schema": {"$ref": PLACE + error}}}
    found = {} if "{response_id}" in path else {"200": good}
    operation["responses"] = {
        **found,
        **{status: {"description": STATUSES[status], "content": content} for status in statuses},
    }


POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 14px ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .25rem .75rem .25rem 0; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } a { color: #8bf; } }
"""
RULES = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "maxItems": "at most"}


def page_of(document: Mapping[str, Any]) -> str:
    """Return the HTML page for the document of /openapi.json."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [f"<h1>{escape(title)}</h1>", "<p>The same for programs: <a href='openapi.json'>openapi.json</a>.</p>"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(f"{method.upper()} {path}", operation, document["components"]["schemas"])
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
    body = "".join(parts)
    return f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>"


def _operation(name: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield from _body(schemas[content["schema"]["$ref"].removeprefix(PLACE)])
    answers = "; ".join(f"{status}: {said['description']}" for status, said in operation["responses"].items())
    yield f"<p>{escape(answers)}.</p>"


def _body(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the HTML of a body: its description, its honoured fields, and the names of unsupported fields."""
    fields, needed = schema.get("properties", {}), schema.get("required", ())
    if "description" in schema:
        yield f"<p>{escape(schema['description'])}</p>"
    yield "<table>"
    for name, field in fields.items():
        if not _is_neutral(field):
            default = f", by default {json.dumps(field['default'])}" if field.get("default") is not None else ""
            kind = _kind(field) + (", needed" if name in needed else default)
            yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td></tr>"
    yield "</table>"
    neutral = ", ".join(name for name, field in fields.items() if _is_neutral(field))
    if neutral:
        yield f"<details><summary>Known and not supported</summary><p>{escape(neutral)}</p></details>"


def _is_neutral(field: Mapping[str, Any]) -> bool:
    """Return whether a field is known but not supported: `openapi` lists the values that do nothing as its enum."""
    return "enum" in field and "description" in field


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a short text for the values that a schema allows."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(PLACE)
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    kind = str(schema.get("type", "any value"))
    if isinstance(schema.get("items"), Mapping):
        kind = f"list of {_kind(schema['items'])}"
    rules = [f"{sign} {schema[rule]:g}" for rule, sign in RULES.items() if rule in schema]
    return " ".join([kind, *rules])
