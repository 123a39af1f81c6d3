"""References inside one schema: JSON pointers, anchors and the ids of subschemas.

A reference is resolved (RFC 3986) against the nearest `$id` above it. The reference's fragment is percent-decoded; it
is then a JSON pointer (RFC 6901, section 6) or the name of an `$anchor`.
"""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from cluster.grammar.asked import GrammarError

VALUES = frozenset({"const", "enum", "default", "example", "examples"})  # their content is a value, not a schema
ANCHORS = ("$anchor", "$dynamicAnchor")


@dataclass(slots=True)
class References:
    """Resolves the references inside the schema `root`."""

    root: Any
    _bases: dict[int, str] = field(default_factory=dict)  # base URI, keyed by the id() of a schema
    _named: dict[str, Any] = field(default_factory=dict)  # keyed by URI, and by URI and anchor

    def __post_init__(self) -> None:
        waiting = [(self.root, "")]
        self._named[""] = self.root
        while waiting:
            inside, base = waiting.pop()
            if isinstance(inside, dict):
                base = self._entered(inside, base)
                waiting += [(part, base) for name, part in inside.items() if name not in VALUES]
            elif isinstance(inside, list):
                waiting += [(part, base) for part in inside]

    def _entered(self, schema: dict[str, Any], base: str) -> str:
        """Record the URI and anchors of a schema, and return the base URI of the references inside it."""
        own = schema.get("$id")
        if isinstance(own, str):
            named, anchor = urldefrag(_absolute(base, own))
            if anchor:  # in draft 7 an `$id` with a fragment is an anchor
                self._named.setdefault(f"{named}#{anchor}", schema)
            else:
                base = named
                self._named.setdefault(base, schema)
        for name in ANCHORS:
            if isinstance(schema.get(name), str):
                self._named.setdefault(f"{base}#{schema[name]}", schema)
        self._bases[id(schema)] = base
        return base

    def resolved(self, reference: Any, schema: Any, path: str) -> Any:
        """Return the schema that the `$ref` of a schema at `path` points to.

        Raises:
            GrammarError: the reference's target is not in the schema `root`.
        """
        if not isinstance(reference, str):
            raise GrammarError(f"{path}: $ref must be text, as in #/$defs/name")
        uri, fragment = urldefrag(_absolute(self._bases.get(id(schema), ""), reference))
        if uri not in self._named:
            raise GrammarError(f"{path}: $ref {reference[:80]!r} must point into the schema itself, as in #/$defs/name")
        resource = self._named[uri]
        # Some generators embed a schema that has an `$id`, but whose pointers still start at the root.
        for start in (resource, self.root):
            for decoded in (unquote(fragment), fragment):  # some generators do not percent-encode a name with % in it
                found = [start] if not decoded else _pointed(start, decoded)
                if found:
                    return found[0]
        if f"{uri}#{unquote(fragment)}" in self._named:
            return self._named[f"{uri}#{unquote(fragment)}"]
        raise GrammarError(f"{path}: $ref {reference[:80]!r} points to nothing")


def _absolute(base: str, reference: str) -> str:
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:  # not a URI, so no schema has it as its name
        return reference


def _pointed(found: Any, pointer: str) -> list[Any]:
    """Return a list with the value that a JSON pointer leads to. The list is empty if there is no such value."""
    if not pointer.startswith("/"):
        return []
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return []
    return [found]
