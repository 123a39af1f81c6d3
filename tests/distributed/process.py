"""The main loop of a rank's process: reads a case from each line of its input, and answers in lines of JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

from cluster.distributed.mesh import Rendezvous, Store, open_store

HOST = "127.0.0.1"
CaseRunner = Callable[[dict[str, Any], int, Rendezvous, Store | None], None]
"""Runs a case as one rank and writes the answer. Its arguments: the case, the rank, where the ranks meet, and the store
that rank 0 has opened (None for the other ranks).
"""


def write_json_line(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def serve(rank: int, run_case: CaseRunner) -> None:
    """Call `run_case` for each case until the input ends."""
    store: Store | None = None
    write_json_line({"ready": rank})
    for line in sys.stdin:
        if line == "open\n":
            store = open_store(HOST)
            write_json_line({"port": store.port})
            continue
        message = json.loads(line)
        run_case(message["case"], rank, Rendezvous(HOST, message["port"], message["epoch"]), store)
