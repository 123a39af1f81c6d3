"""Transfer of compiled grammars to ranks. A grammar may have megabytes, so it is sent once, separate from its requests.

A replica sends a grammar with a short name to the ranks of a group, which read the grammar. Then the replica submits
the request with the name in place of the grammar. No Ray here.
"""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from threading import Lock

from cluster.actors.messages import Commands
from cluster.request import Request

KEPT_CHARACTERS = 64 << 20
KEPT_S = 60.0
"""A grammar is kept for at least this long, because its request follows at once."""


def name_of(grammar: str) -> str:
    """Return the name of a compiled grammar: its hash, with a prefix that no compiled grammar has."""
    return "name:" + hashlib.blake2b(grammar.encode(), digest_size=32).hexdigest()


def named(request: Request, name: str) -> Request:
    """Return the request with `name` in place of its grammar."""
    return replace(request, params=replace(request.params, grammar=name))


@dataclass(slots=True)
class GrammarCache:
    """The compiled grammars that a rank has read, by name, oldest first. Thread-safe."""

    _kept: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def keep(self, name: str, grammar: str) -> None:
        """Keep a grammar; drop the oldest ones beyond `KEPT_CHARACTERS`, but none younger than `KEPT_S`."""
        now = time.monotonic()
        with self._lock:
            self._kept[name] = grammar, now
            self._kept.move_to_end(name)
            held = sum(len(text) for text, _ in self._kept.values())
            while held > KEPT_CHARACTERS and now - next(iter(self._kept.values()))[1] > KEPT_S:
                held -= len(self._kept.popitem(last=False)[1][0])

    def whole(self, commands: Commands) -> Commands:
        """Return the commands with grammars in place of their names. An unknown name is kept; the request then ends
        with an error, as the name is not a compiled grammar.
        """
        return replace(commands, submits=tuple(map(self._whole, commands.submits)))

    def _whole(self, request: Request) -> Request:
        with self._lock:
            found = self._kept.get(request.params.grammar or "")
        return request if found is None else named(request, found[0])
