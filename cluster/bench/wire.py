"""Send many HTTP requests, ordinary or abusive, from one process, over asyncio connections, which need little CPU."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.bench.streams import HOST, TIMEOUT_S

LINE_LIMIT = 1 << 20
T = TypeVar("T")


@dataclass(slots=True)
class Reply:
    """The reply to one request. `seconds` and `first_event_s` count from `started_at`. `error` says what failed, or is
    "". `status` is 0 if there was no answer.

    For a stream, `first_event_s` is the time of the first event, and `error_event` is the text of the last event that
    reports an error. `received_all`: the complete body, or the stream up to `[DONE]`, was received.
    """

    started_at: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    first_event_s: float | None = None
    received_all: bool = False
    error_event: str = ""
    error: str = ""

    @property
    def complete(self) -> bool:
        """Whether everything was received and no event reports an error. The status does not matter."""
        return self.received_all and not self.error_event and not self.error

    @property
    def retry_after_s(self) -> float | None:
        """The seconds of the header Retry-After, or None if the header is missing or not a whole number."""
        header_value = self.headers.get("retry-after", "")
        return float(header_value) if header_value.isdigit() else None

    @property
    def is_json(self) -> bool:
        """Whether the body is a JSON object and the content type says JSON."""
        try:
            return self.headers.get("content-type", "").startswith("application/json") and isinstance(
                json.loads(self.body), dict
            )
        except ValueError:
            return False


def request_head(method: str, path: str, length: int | None = None) -> bytes:
    """Return the head of an HTTP request. If a JSON body follows, `length` is the body's number of bytes."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close"]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def read_reply(reader: asyncio.StreamReader, reply: Reply) -> None:
    """Read an answer to its end into `reply`."""
    status = await reader.readline()
    if not status.startswith(b"HTTP/"):
        raise ConnectionError(f"not an HTTP status line: {status[:80]!r}")
    reply.status = int(status.split()[1])
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        reply.headers[name.strip().lower()] = value.strip()
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        length = reply.headers.get("content-length")
        reply.body = await (reader.read() if length is None else reader.readexactly(int(length)))
        reply.received_all = True
        return
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            reply.received_all = True
        elif line.startswith(b"data: "):
            reply.first_event_s = reply.first_event_s or time.perf_counter() - reply.started_at
            if b'"error"' in line and "error" in json.loads(line.removeprefix(b"data: ")):
                reply.error_event = line[:300].decode(errors="replace")


Exchange = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Reply], Awaitable[None]]
"""A coroutine function that sends a request on a connection and reads the answer into the `Reply`."""


async def connect(port: int, exchange: Exchange, timeout_s: float = TIMEOUT_S) -> Reply:
    """Run the exchange on a new connection and return the reply; failures are stored in `Reply.error`."""
    reply = Reply(started_at=time.perf_counter())
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(HOST, port, limit=LINE_LIMIT)
            await exchange(reader, writer, reply)
    except (OSError, ValueError, TimeoutError, EOFError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    finally:
        reply.seconds = time.perf_counter() - reply.started_at
        if writer is not None:
            writer.close()
    return reply


async def post(port: int, path: str, body: Mapping[str, Any] | bytes) -> Reply:
    """POST a JSON body, given as a mapping or as encoded bytes, and return the reply."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> None:
        writer.write(request_head("POST", path, len(raw)) + raw)
        await read_reply(reader, reply)

    return await connect(port, exchange)


def run_coroutine(coroutine_function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
    """Run a coroutine function to its end. A measuring process calls this in another process, to stay undisturbed."""
    return asyncio.run(coroutine_function(*args))
