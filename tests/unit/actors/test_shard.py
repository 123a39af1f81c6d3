"""What a shard reports of itself: its heartbeat before it has an engine, and errors in reading a grammar."""

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from cluster.actors.shard import ShardActor


def test_shard_heartbeat_counts_opening_the_store_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    started, may_finish = threading.Event(), threading.Event()

    class Store:
        port = 1

    def open_store(host: str) -> Store:
        started.set()
        while not may_finish.is_set():  # like the import of torch: computes, without reads from disk
            sum(range(1000))
        return Store()

    factory = ModuleType("busy_factory")
    factory.open_store = open_store  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "busy_factory", factory)
    shard = ShardActor(0, 2, factory="busy_factory:build")
    opening = threading.Thread(target=shard.open_store)
    opening.start()
    started.wait()
    try:
        deadline, idle_times = time.monotonic() + 1.0, []
        while time.monotonic() < deadline:
            time.sleep(0.2)
            idle_times.append(shard.heartbeat().idle_s)
    finally:
        may_finish.set()
        opening.join()
    assert idle_times[-1] < 0.5


@pytest.mark.parametrize("error", [ValueError("no such token"), OSError("tokenizer.json is gone")])
def test_shard_returns_grammar_read_errors_instead_of_raising(error: Exception) -> None:
    def read_grammar(grammar: str) -> None:
        raise error

    shard = ShardActor(0, 1)
    shard._engine_loop = SimpleNamespace(engine=SimpleNamespace(read_grammar=read_grammar))  # type: ignore[assignment]
    replies: list[str] = []
    # In a thread of its own, because `read_grammar` lowers the priority of its thread.
    reader_thread = threading.Thread(target=lambda: replies.append(shard.read_grammar("g", "{}")))
    reader_thread.start()
    reader_thread.join()
    assert str(error) in replies[0]
