"""What a shard says of itself before it has an engine."""

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from cluster.actors.shard import ShardActor


def test_shard_heartbeat_counts_opening_the_store_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), threading.Event()

    class Store:
        port = 1

    def open_store(host: str) -> Store:
        begun.set()
        while not over.is_set():  # as the import of torch: computes, and reads nothing that is not in memory
            sum(range(1000))
        return Store()

    factory = ModuleType("busy_factory")
    factory.open_store = open_store  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "busy_factory", factory)
    shard = ShardActor(0, 2, factory="busy_factory:build")
    opening = threading.Thread(target=shard.open_store)
    opening.start()
    begun.wait()
    try:
        until, ages = time.monotonic() + 1.0, []
        while time.monotonic() < until:
            time.sleep(0.2)
            ages.append(shard.heartbeat().idle_s)
    finally:
        over.set()
        opening.join()
    assert ages[-1] < 0.5


@pytest.mark.parametrize("error", [ValueError("no such token"), OSError("tokenizer.json is gone")])
def test_shard_returns_grammar_read_errors_instead_of_raising(error: Exception) -> None:
    def read_grammar(grammar: str) -> None:
        raise error

    shard = ShardActor(0, 1)
    shard._engine_loop = SimpleNamespace(engine=SimpleNamespace(read_grammar=read_grammar))  # type: ignore[assignment]
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.append(shard.read_grammar("g", "{}")))  # it makes its thread nicer
    reading.start()
    reading.join()
    assert str(error) in said[0]
