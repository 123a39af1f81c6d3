"""Converts argument values to JSON by the tool's schema. The model wrote them between marks, strings without quotes."""

import json
from collections.abc import Mapping
from typing import Any

from cluster.chat.json_text import loaded

DEEPEST = 16
"""Depth of nested references and alternatives after which a schema counts as allowing anything."""
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def member(text: str, name: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of the member `name` of an object with this schema, written by the model as `text`.

    If the text is JSON of a type that the schema allows, it is returned unchanged; but a text in quotes becomes a
    string that contains the quotes, if the schema names the type string. Otherwise the text becomes a string, if the
    schema allows strings or the text is not JSON. All other JSON is returned unchanged. True, False and None count as
    true, false and null, because chat templates write arguments so.
    """
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    kinds = _kinds(schema.get("additionalProperties") if declared is None else declared, schema, DEEPEST)
    written = text.strip()
    value = loaded(written)
    kind = "null" if written == "null" else None if value is None else TYPES[type(value)]
    if kinds is None:
        return json.dumps(text, ensure_ascii=False) if kind is None else written
    if kind in kinds - {"string"} or (kind == "integer" and "number" in kinds):
        return written
    if "boolean" in kinds and written.lower() in ("true", "false"):
        return written.lower()
    if "null" in kinds and written.lower() in ("null", "none"):
        return "null"
    if "string" in kinds or kind is None:
        return json.dumps(text, ensure_ascii=False)
    return written


def _kinds(schema: Any, root: Mapping[str, Any], deepest: int) -> set[str] | None:
    """Return the types that a schema allows, or None if it allows any type."""
    if not isinstance(schema, Mapping) or not deepest:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(_found(reference, root), root, deepest - 1)
    kind, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    if isinstance(values, list) and values:
        return {"null" if value is None else TYPES[type(value)] for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            each = [_kinds(part, root, deepest - 1) for part in parts]
            return None if None in each else {one for kinds in each for one in kinds or ()}
    every = schema.get("allOf")
    known = [_kinds(part, root, deepest - 1) for part in every] if isinstance(every, list) else []
    return next((kinds for kinds in known if kinds is not None), None)


def _found(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference inside the schema, or None if the target does not exist."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
