"""A REST app on a local port, for clients that open HTTP connections."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from tests.serving.api.scripted import ScriptedService


def assert_closing_aborts(stream: Any, service: ScriptedService) -> None:
    """Close an official client's `stream`, and assert that the engine aborts its request."""
    next(iter(stream))
    assert service.engine.running
    stream.close()
    deadline = time.monotonic() + 4
    while service.engine.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(service.engine.aborted) == 1


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve the app in a thread, and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
