"""A real engine with one layer that is slow or blocks when it gets at least `MIN_ROWS` rows.

The slow layer is one operation: the rank reaches no other part of the step until the layer returns. A file in the
model's folder chooses the trouble. The file `BURN` makes the layer compute for `BURN_S` seconds of CPU time. The file
`BLOCK` makes the layer wait for ever, once. The file `LOAD` holds a number of seconds that every load takes longer.
"""

import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cluster.actors.engine_loop import EngineLoop
from cluster.actors.messages import Commands
from cluster.config import EngineConfig
from cluster.distributed.mesh import Rendezvous, Store, open_store
from cluster.engine import Rank, build_rank

MIN_ROWS = 200
BURN, BLOCK, LOAD = "burn", "block", "load"
BURN_S = 4.0


class SlowedLayer:
    def __init__(self, layer: Any, folder: Path) -> None:
        self._layer, self._folder = layer, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: torch.Tensor, *other_args: Any) -> Any:
        if hidden.shape[0] >= MIN_ROWS:
            if (self._folder / BLOCK).exists():
                (self._folder / BLOCK).unlink()
                threading.Event().wait()
            if (self._folder / BURN).exists():
                started_at, matrix = time.thread_time(), torch.randn(256, 256)
                while time.thread_time() - started_at < BURN_S:
                    matrix @ matrix
        return self._layer(hidden, *other_args)


def build(
    config: EngineConfig, rank: int = 0, rendezvous: Rendezvous | None = None, store: Store | None = None
) -> Rank:
    folder = Path(config.model_path)
    if (folder / LOAD).exists():
        time.sleep(float((folder / LOAD).read_text()))
    engine = build_rank(config, rank, rendezvous, store)
    layers = engine.lockstep.step._target.model._layers
    layers[1] = SlowedLayer(layers[1], folder)
    return engine


def serve_rank(rank: int, folder: str, port: int, pipe: Connection) -> None:
    """Run one rank of a gang of two in this process.

    The loop takes `Commands` from the pipe. To each "heartbeat" from the pipe, the rank answers with its heartbeat and
    with the step items of its loop. Any other message, or a closed pipe, ends the process.
    """
    config = EngineConfig(model_path=folder, tp_size=2, attn_dp_size=2, num_threads=1, max_total_tokens=4096)
    store = None
    if rank == 0:
        store = open_store("127.0.0.1")
        pipe.send(store.port)
    loop = EngineLoop(build(config, rank, Rendezvous("127.0.0.1", store.port if store else port), store), rank, 2)
    loop.start()
    pipe.send("ready")
    while True:
        message: Any = pipe.recv()
        if isinstance(message, Commands):
            loop.put(message)
        elif message == "heartbeat":
            pipe.send((loop.heartbeat(), loop.drain(timeout_s=0.0)))
        else:
            return
