"""What a shard says of itself before it has an engine."""

import sys
import threading
import time
from types import ModuleType

import pytest

from cluster.actors.shard import ShardActor


def test_the_opening_of_the_store_is_seen_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
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
            ages.append(shard.heartbeat().age_s)
    finally:
        over.set()
        opening.join()
    assert ages[-1] < 0.5
