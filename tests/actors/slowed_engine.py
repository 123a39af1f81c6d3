"""The real engine with one layer that is slow, or stands still, at prompts of `ROWS` rows: one operation, no marks.

The model's folder says how, by a file in it: `BURN` makes the layer compute for `BURN_S` of CPU time, `BLOCK` makes it
wait for ever, once. `LOAD` makes every load take as many seconds longer as it says.
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

ROWS = 200
BURN, BLOCK, LOAD = "burn", "block", "load"
BURN_S = 4.0


class SlowedLayer:
    def __init__(self, layer: Any, folder: Path) -> None:
        self._layer, self._folder = layer, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: torch.Tensor, *rest: Any) -> Any:
        if hidden.shape[0] >= ROWS:
            if (self._folder / BLOCK).exists():
                (self._folder / BLOCK).unlink()
                threading.Event().wait()
            if (self._folder / BURN).exists():
                began, some = time.thread_time(), torch.randn(256, 256)
                while time.thread_time() - began < BURN_S:
                    some @ some
        return self._layer(hidden, *rest)


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
    """A process of a gang of two: answers with its heartbeats, and with what its loop gave, until the pipe closes."""
    config = EngineConfig(model_path=folder, tp_size=2, attn_dp_size=2, num_threads=1, max_total_tokens=4096)
    store = None
    if rank == 0:
        store = open_store("127.0.0.1")
        pipe.send(store.port)
    loop = EngineLoop(build(config, rank, Rendezvous("127.0.0.1", store.port if store else port), store), rank, 2)
    loop.start()
    pipe.send("ready")
    while True:
        asked: Any = pipe.recv()
        if isinstance(asked, Commands):
            loop.put(asked)
        elif asked == "heartbeat":
            pipe.send((loop.heartbeat(), loop.drain(timeout_s=0.0)))
        else:
            return
