"""Builds /openapi.json: the fields of every body with their accepted values, and the statuses of every route.

The handlers read bodies themselves, so FastAPI does not know the fields. This module replaces the schemas that FastAPI
generates.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cluster.api.core.api_keys import PATHS_WITHOUT_KEY
from cluster.api.core.conversation import ROLES, ChatRequest, TokenizeRequest
from cluster.api.core.fields import REFUSED, REMEDIES, StrictModel
from cluster.api.core.generation import CompletionRequest, DetokenizeRequest
from cluster.api.core.limits import RequestLimits
from cluster.api.core.translated import TranslatedBody
from cluster.api.core.wire import MAX_KEYS

BODIES: tuple[type[StrictModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
SCHEMA_PATH = "#/components/schemas/"
STREAMING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
CONTENT_OF_PAGES: Mapping[str, Mapping[str, Any]] = {
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
BODY_STATUSES = ("400", "404", "408", "413", "415", "500", "503")
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
    """An API whose bodies become chat requests. All its paths begin with `path`. `error` is the JSON schema of its
    errors, and `error_name` is the name of this schema in the document.
    """

    path: str
    bodies: tuple[type[TranslatedBody], ...]
    error_name: str = "Error"
    error: Mapping[str, Any] = ERROR


def request_body_schema(fields: type[StrictModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route. It declares that the body of a request has the fields of the class
    `fields`.
    """
    content = {"application/json": {"schema": {"$ref": SCHEMA_PATH + fields.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def install_openapi(app: FastAPI, limits: RequestLimits, other_apis: Sequence[OtherApi] = ()) -> None:
    """Replace the document of /openapi.json by one that describes what the routes accept and answer."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"] = {"schemas": schemas(limits, other_apis)}
            for path, operations in schema["paths"].items():
                error_name = next(
                    (other_api.error_name for other_api in other_apis if f"{path}/".startswith(f"{other_api.path}/")),
                    "Error",
                )
                for operation in operations.values():
                    _set_responses(path, operation, error_name)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def schemas(limits: RequestLimits, other_apis: Sequence[OtherApi] = ()) -> dict[str, Any]:
    """Return the schemas of all bodies and of errors. Many of `limits` become bounds in these schemas."""
    translated = [fields for other_api in other_apis for fields in other_api.bodies]
    _, generated = models_json_schema(
        [(fields, "validation") for fields in (*BODIES, *translated)], ref_template=SCHEMA_PATH + "{model}"
    )
    schema_by_name: dict[str, Any] = generated["$defs"]
    for name in ("CompletionRequest", "ChatRequest"):
        properties = schema_by_name[name]["properties"]
        properties["n"]["maximum"] = limits.choices
        _alternative(properties["prompt_logprobs"], "integer")["maximum"] = limits.logprobs
        _alternative(properties["stop"], "array").update(maxItems=limits.stops)
        _alternative(properties["stop"], "array")["items"] = _stop_schema(limits)
        _alternative(properties["stop"], "string").update(_stop_schema(limits))
        properties["stop_token_ids"].update(maxItems=limits.stop_token_ids)
        properties["stop_token_ids"]["items"]["minimum"] = 0
        properties["logit_bias"].update(maxProperties=MAX_KEYS, propertyNames={"pattern": "^[0-9]{1,9}$"})
        properties["bad_words"].update(maxItems=limits.bad_words, items={**_stop_schema(limits), "pattern": r"\S"})
        _alternative(properties["allowed_token_ids"], "array")["items"]["minimum"] = 0
        _add_refused_fields(properties, REFUSED, REMEDIES)
    completion, chat = (schema_by_name[name]["properties"] for name in ("CompletionRequest", "ChatRequest"))
    _alternative(completion["logprobs"], "integer")["maximum"] = limits.logprobs
    _alternative(completion["best_of"], "integer")["maximum"] = limits.choices
    _alternative(chat["top_logprobs"], "integer")["maximum"] = limits.logprobs
    _set_prompt_bounds(completion["prompt"], limits)
    for fields in BODIES:
        schema_by_name[fields.__name__]["maxProperties"] = MAX_KEYS
        messages = schema_by_name[fields.__name__]["properties"].get("messages")
        if messages is not None:
            messages["maxItems"] = limits.messages
            schema_by_name[fields.__name__]["properties"]["tools"]["maxItems"] = limits.tools
    schema_by_name["ChatMessage"]["properties"]["role"] = {"enum": [*ROLES]}
    content_part: dict[str, Any] = {"type": "object", "required": ["type", "text"]}
    content_part["properties"] = {"type": {"const": "text"}, "text": {"type": "string"}}
    _alternative(schema_by_name["ChatMessage"]["properties"]["content"], "array")["items"] = content_part
    schema_by_name["TokenizeRequest"]["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    for fields in translated:
        _complete_translated_schema(schema_by_name[fields.__name__], fields, chat, limits)
    return {**schema_by_name, "Error": ERROR, **{other_api.error_name: other_api.error for other_api in other_apis}}


def _complete_translated_schema(
    schema: dict[str, Any], fields: type[TranslatedBody], chat: Mapping[str, Any], limits: RequestLimits
) -> None:
    """Add fields to the schema of another API's body: fields shared with a chat request, and refused fields."""
    properties, table = schema["properties"], fields.table
    properties |= {name: chat[name] for name in sorted(fields.extensions)}
    _add_refused_fields(properties, table.refused, table.remedies)
    schema["maxProperties"] = MAX_KEYS
    properties["tools"]["maxItems"] = limits.tools
    if "top_logprobs" in fields.model_fields:
        properties["top_logprobs"]["maximum"] = limits.logprobs


def _add_refused_fields(
    properties: dict[str, Any], refused: Mapping[str, Sequence[Any]], remedies: Iterable[str]
) -> None:
    """Add the fields that are not supported. `refused` maps a field to the values that are accepted although the field
    is not supported; null is always accepted.
    """
    for name in (*refused, *remedies):
        values = [*refused.get(name, ()), None]
        properties.setdefault(name, {"enum": values, "description": "Not supported: only these values are accepted"})


def _stop_schema(limits: RequestLimits) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": limits.stop_characters}


def _set_prompt_bounds(prompt: dict[str, Any], limits: RequestLimits) -> None:
    for alternative in prompt["anyOf"]:
        if alternative["type"] == "string":
            alternative["minLength"] = 1
            continue
        alternative["minItems"] = 1
        items = alternative["items"]
        if items["type"] == "integer":
            items["minimum"] = 0
            continue
        alternative["maxItems"] = limits.sequences
        items["minLength" if items["type"] == "string" else "minItems"] = 1
        if items["type"] == "array":
            items["items"]["minimum"] = 0


def _alternative(schema: dict[str, Any], json_type: str) -> dict[str, Any]:
    """Return the alternative of type `json_type` in a field's schema, or the schema itself if it has no such
    alternative.
    """
    alternative: dict[str, Any] = next(
        (option for option in schema.get("anyOf", ()) if option.get("type") == json_type), schema
    )
    return alternative


def _set_responses(path: str, operation: dict[str, Any], error_name: str) -> None:
    """Add all statuses of a route to `operation`, each with the content type and the schema of its body."""
    success: dict[str, Any] = {"description": "Success"}
    content_types = CONTENT_OF_PAGES.get(path, {"application/json": {"schema": {}}})
    if path in STREAMING_PATHS:
        content_types = {**content_types, "text/event-stream": {"schema": {}}}
    if content_types:
        success["content"] = dict(content_types)
    statuses: tuple[str, ...] = (
        BODY_STATUSES if "requestBody" in operation else ("500", "503") if path in CONTENT_OF_PAGES else ("500",)
    )
    if "{model_id}" in path or "{response_id}" in path:
        statuses = ("404", "500")
    if path not in PATHS_WITHOUT_KEY:
        statuses = ("401", "403", *statuses)
    error_content = {"application/json": {"schema": {"$ref": SCHEMA_PATH + error_name}}}
    ok_response = {} if "{response_id}" in path else {"200": success}
    operation["responses"] = {
        **ok_response,
        **{status: {"description": STATUSES[status], "content": error_content} for status in statuses},
    }


POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 14px ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .25rem .75rem .25rem 0; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } a { color: #8bf; } }
"""
BOUND_SYMBOLS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "maxItems": "at most",
}


def render_page(document: Mapping[str, Any]) -> str:
    """Return the HTML page for the document of /openapi.json."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [f"<h1>{escape(title)}</h1>", "<p>The same for programs: <a href='openapi.json'>openapi.json</a>.</p>"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation_html(f"{method.upper()} {path}", operation, document["components"]["schemas"])
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
    body = "".join(parts)
    return f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>"


def _operation_html(name: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield from _body_html(schemas[content["schema"]["$ref"].removeprefix(SCHEMA_PATH)])
    answers = "; ".join(f"{status}: {response['description']}" for status, response in operation["responses"].items())
    yield f"<p>{escape(answers)}.</p>"


def _body_html(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the HTML of a body: its description, its honoured fields, and the names of unsupported fields."""
    fields, required = schema.get("properties", {}), schema.get("required", ())
    if "description" in schema:
        yield f"<p>{escape(schema['description'])}</p>"
    yield "<table>"
    for name, field in fields.items():
        if not _is_unsupported(field):
            default = f", by default {json.dumps(field['default'])}" if field.get("default") is not None else ""
            text = _type_text(field) + (", needed" if name in required else default)
            yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"
    yield "</table>"
    unsupported = ", ".join(name for name, field in fields.items() if _is_unsupported(field))
    if unsupported:
        yield f"<details><summary>Known and not supported</summary><p>{escape(unsupported)}</p></details>"


def _is_unsupported(field: Mapping[str, Any]) -> bool:
    """Return whether a field is known but not supported. `_add_refused_fields` gives such a field an `enum` and a
    `description`.
    """
    return "enum" in field and "description" in field


def _type_text(schema: Mapping[str, Any]) -> str:
    """Return a short text for the values that a schema allows."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(SCHEMA_PATH)
    if "anyOf" in schema:
        return " or ".join(_type_text(option) for option in schema["anyOf"] if option.get("type") != "null")
    text = str(schema.get("type", "any value"))
    if isinstance(schema.get("items"), Mapping):
        text = f"list of {_type_text(schema['items'])}"
    bounds = [f"{symbol} {schema[rule]:g}" for rule, symbol in BOUND_SYMBOLS.items() if rule in schema]
    return " ".join([text, *bounds])
