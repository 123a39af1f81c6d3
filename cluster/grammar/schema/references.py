"""References inside one schema: JSON pointers, anchors and the names that subschemas give themselves.

RFC 3986 resolves a reference against the nearest `$id` above it; its fragment is percent-decoded and then is a JSON
pointer (RFC 6901, section 6) or the name of an `$anchor`.
"""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from cluster.grammar.asked import GrammarError

VALUES = frozenset({"const", "enum", "default", "example", "examples"})  # what is inside is no schema
ANCHORS = ("$anchor", "$dynamicAnchor")


@dataclass(slots=True)
class References:
    """What the references inside a schema `root` point to."""

    root: Any
    _bases: dict[int, str] = field(default_factory=dict)  # by the identity of a schema
    _named: dict[str, Any] = field(default_factory=dict)  # by URI, and by URI and anchor

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
        """Note what a schema names itself; the base of references inside of it."""
        own = schema.get("$id")
        if isinstance(own, str):
            named, anchor = urldefrag(_absolute(base, own))
            if anchor:  # draft 7 writes an anchor so
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
        """What the `$ref` of a schema at `path` points to.

        Raises:
            GrammarError: it is not in the schema.
        """
        if not isinstance(reference, str):
            raise GrammarError(f"{path}: $ref must be text, as in #/$defs/name")
        uri, fragment = urldefrag(_absolute(self._bases.get(id(schema), ""), reference))
        if uri not in self._named:
            raise GrammarError(f"{path}: $ref {reference[:80]!r} must point into the schema itself, as in #/$defs/name")
        resource = self._named[uri]
        for start in (resource, self.root):  # generators embed a schema that names itself and point on from the root
            for decoded in (unquote(fragment), fragment):  # some write a name as it is, with % in it
                found = [start] if not decoded else _pointed(start, decoded)
                if found:
                    return found[0]
        if f"{uri}#{unquote(fragment)}" in self._named:
            return self._named[f"{uri}#{unquote(fragment)}"]
        raise GrammarError(f"{path}: $ref {reference[:80]!r} points to nothing")


def _absolute(base: str, reference: str) -> str:
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:  # no URI; nothing has such a name
        return reference


def _pointed(found: Any, pointer: str) -> list[Any]:
    """What a JSON pointer leads to from a value, alone in a list; an empty list if it leads to nothing."""
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
