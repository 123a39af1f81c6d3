"""Transfer of compiled grammars to ranks. A grammar may have megabytes, so it is sent apart from its requests.

A replica sends a grammar and a short name for it to the ranks of a group, which read the grammar. Then the replica
submits the request with the name in place of the grammar. This module does not use Ray.
"""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from threading import Lock

from cluster.actors.messages import Commands
from cluster.request import Request

MAX_CACHED_CHARACTERS = 64 << 20
MIN_CACHED_S = 60.0
"""A grammar is kept for at least this long, so that the request that names it finds it."""


def grammar_name(grammar: str) -> str:
    """Return the name of a compiled grammar: its hash, with a prefix that no compiled grammar has."""
    return "name:" + hashlib.blake2b(grammar.encode(), digest_size=32).hexdigest()


def with_grammar(request: Request, name: str) -> Request:
    """Return the request with `name` in place of its grammar."""
    return replace(request, params=replace(request.params, grammar=name))


@dataclass(slots=True)
class GrammarCache:
    """The compiled grammars that a rank has read, by name, oldest first. Thread-safe."""

    _entries: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def add(self, name: str, grammar: str) -> None:
        """Keep a grammar; drop the oldest ones beyond `MAX_CACHED_CHARACTERS`, but none younger than `MIN_CACHED_S`."""
        now = time.monotonic()
        with self._lock:
            self._entries[name] = grammar, now
            self._entries.move_to_end(name)
            total_characters = sum(len(text) for text, _ in self._entries.values())
            while (
                total_characters > MAX_CACHED_CHARACTERS and now - next(iter(self._entries.values()))[1] > MIN_CACHED_S
            ):
                total_characters -= len(self._entries.popitem(last=False)[1][0])

    def resolve_names(self, commands: Commands) -> Commands:
        """Return the commands with grammars in place of their names. An unknown name is kept; the engine then refuses
        the request, because the name is not a compiled grammar.
        """
        return replace(commands, submits=tuple(map(self._resolve, commands.submits)))

    def _resolve(self, request: Request) -> Request:
        with self._lock:
            entry = self._entries.get(request.params.grammar or "")
        return request if entry is None else with_grammar(request, entry[0])
