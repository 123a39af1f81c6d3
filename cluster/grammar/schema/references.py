"""References inside one schema: JSON pointers, anchors and the ids of subschemas.

A reference is resolved (RFC 3986) against the nearest `$id` above it. The reference's fragment is percent-decoded; it
is then a JSON pointer (RFC 6901, section 6) or the name of an `$anchor`.
"""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from cluster.grammar.asked import GrammarError

VALUE_KEYWORDS = frozenset(
    {"const", "enum", "default", "example", "examples"}
)  # their content is a value, not a schema
ANCHORS = ("$anchor", "$dynamicAnchor")


@dataclass(slots=True)
class References:
    """Resolves the references inside the schema `root`."""

    root: Any
    _base_uri_of: dict[int, str] = field(default_factory=dict)  # base URI, keyed by the id() of a schema
    _schema_of_uri: dict[str, Any] = field(default_factory=dict)  # keyed by URI, and by URI and anchor

    def __post_init__(self) -> None:
        pending = [(self.root, "")]
        self._schema_of_uri[""] = self.root
        while pending:
            value, base = pending.pop()
            if isinstance(value, dict):
                base = self._register(value, base)
                pending += [(child, base) for name, child in value.items() if name not in VALUE_KEYWORDS]
            elif isinstance(value, list):
                pending += [(child, base) for child in value]

    def _register(self, schema: dict[str, Any], base: str) -> str:
        """Record the URI and anchors of a schema, and return the base URI of the references inside it."""
        own_id = schema.get("$id")
        if isinstance(own_id, str):
            uri, anchor = urldefrag(_absolute_uri(base, own_id))
            if anchor:  # in draft 7 an `$id` with a fragment is an anchor
                self._schema_of_uri.setdefault(f"{uri}#{anchor}", schema)
            else:
                base = uri
                self._schema_of_uri.setdefault(base, schema)
        for name in ANCHORS:
            if isinstance(schema.get(name), str):
                self._schema_of_uri.setdefault(f"{base}#{schema[name]}", schema)
        self._base_uri_of[id(schema)] = base
        return base

    def resolve(self, reference: Any, schema: Any, path: str) -> Any:
        """Return the schema that `reference` points to: the value of `$ref` in `schema`, which is at `path`.

        Raises:
            GrammarError: the reference's target is not in the schema `root`.
        """
        if not isinstance(reference, str):
            raise GrammarError(f"{path}: $ref must be text, as in #/$defs/name")
        uri, fragment = urldefrag(_absolute_uri(self._base_uri_of.get(id(schema), ""), reference))
        if uri not in self._schema_of_uri:
            raise GrammarError(f"{path}: $ref {reference[:80]!r} must point into the schema itself, as in #/$defs/name")
        resource = self._schema_of_uri[uri]
        # Some generators embed a schema that has an `$id`, but whose pointers still start at the root.
        for start_schema in (resource, self.root):
            for pointer in (unquote(fragment), fragment):  # some generators do not percent-encode a name with % in it
                targets = [start_schema] if not pointer else _follow_pointer(start_schema, pointer)
                if targets:
                    return targets[0]
        if f"{uri}#{unquote(fragment)}" in self._schema_of_uri:
            return self._schema_of_uri[f"{uri}#{unquote(fragment)}"]
        raise GrammarError(f"{path}: $ref {reference[:80]!r} points to nothing")


def _absolute_uri(base: str, reference: str) -> str:
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:  # not a URI, so no schema has it as its name
        return reference


def _follow_pointer(value: Any, pointer: str) -> list[Any]:
    """Return a list with the value that a JSON pointer leads to. The list is empty if there is no such value."""
    if not pointer.startswith("/"):
        return []
    for segment in pointer.split("/")[1:]:
        name = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isascii() and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return []
    return [value]
