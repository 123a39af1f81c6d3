"""Compiled grammars on their way to a rank: they may have megabytes, so they travel once, beside the requests.

A replica has the ranks of a group read one, under a short name; the request that is submitted then has the name in its
place. No Ray here.
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
"""A grammar that was read is kept so long at least: its request follows at once."""


def name_of(grammar: str) -> str:
    """The name of a compiled grammar, which is none itself."""
    return "name:" + hashlib.blake2b(grammar.encode(), digest_size=32).hexdigest()


def named(request: Request, name: str) -> Request:
    """A request with a name in the place of its grammar."""
    return replace(request, params=replace(request.params, grammar=name))


@dataclass(slots=True)
class GrammarCache:
    """Those that a rank has read, by name, the one read longest ago first. For any thread."""

    _kept: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def keep(self, name: str, grammar: str) -> None:
        """Keep a grammar for requests to come; old ones make room."""
        now = time.monotonic()
        with self._lock:
            self._kept[name] = grammar, now
            self._kept.move_to_end(name)
            held = sum(len(text) for text, _ in self._kept.values())
            while held > KEPT_CHARACTERS and now - next(iter(self._kept.values()))[1] > KEPT_S:
                held -= len(self._kept.popitem(last=False)[1][0])

    def whole(self, commands: Commands) -> Commands:
        """Commands with grammars in the place of their names. A name that is not known stays, and its request ends with
        an error, as with any text that is no grammar.
        """
        return replace(commands, submits=tuple(map(self._whole, commands.submits)))

    def _whole(self, request: Request) -> Request:
        with self._lock:
            found = self._kept.get(request.params.grammar or "")
        return request if found is None else named(request, found[0])
