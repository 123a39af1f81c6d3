"""/docs: one HTML page with the routes and the fields of their bodies. The page loads no other file."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 14px ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .25rem .75rem .25rem 0; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } a { color: #8bf; } }
"""
RULES = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "maxItems": "at most"}
PLACE = "#/components/schemas/"


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
