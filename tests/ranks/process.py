"""The process of a rank from within: reads a case per line, and says what comes of it in lines of JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

from cluster.distributed.mesh import Rendezvous, Store, open_store

HOST = "127.0.0.1"
Live = Callable[[dict[str, Any], int, Rendezvous, Store | None], None]
"""Lives through a case as a rank that meets the others there, and says what came of it; rank 0 brings the store."""


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def serve(rank: int, live: Live) -> None:
    """Have `live` live through cases until the input ends."""
    store: Store | None = None
    say({"ready": rank})
    for line in sys.stdin:
        if line == "open\n":
            store = open_store(HOST)
            say({"port": store.port})
            continue
        message = json.loads(line)
        live(message["case"], rank, Rendezvous(HOST, message["port"], message["epoch"]), store)
