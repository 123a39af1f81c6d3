"""Many HTTP requests from one process, also abusive ones: plain asyncio connections, to cost little."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.bench.streams import HOST

LINE_LIMIT = 1 << 20
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Reply:
    """What one request got. Seconds count from `began`; `status` 0 means no answer, and `error` says why.

    `events` counts the events of a stream, `first_s` is when the first came, `failure` is an error event. `whole`: the
    body, or the stream up to its `[DONE]`, came completely.
    """

    began: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    first_s: float | None = None
    events: int = 0
    whole: bool = False
    failure: str = ""
    error: str = ""

    @property
    def is_json(self) -> bool:
        """Whether the body is a JSON object and the headers say so."""
        try:
            return self.headers.get("content-type", "").startswith("application/json") and isinstance(
                json.loads(self.body), dict
            )
        except ValueError:
            return False


def head_of(method: str, path: str, length: int | None = None) -> bytes:
    """The head of a request, with `length` for one whose JSON body of so many bytes follows."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close"]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def read_reply(reader: asyncio.StreamReader, reply: Reply, look: Callable[[bytes], None] | None = None) -> None:
    """Read an answer to its end; `look` is called with each event of a stream."""
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
        reply.whole = True
        return
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            reply.whole = True
        elif line.startswith(b"data: "):
            reply.events += 1
            reply.first_s = reply.first_s or time.perf_counter() - reply.began
            if b'"error"' in line and "error" in json.loads(line.removeprefix(b"data: ")):
                reply.failure = line[:300].decode(errors="replace")
            if look is not None:
                look(line)


async def call(
    port: int, method: str, path: str, body: Any = None, look: Callable[[bytes], None] | None = None
) -> Reply:
    """Send one request on a connection of its own; failures go into `Reply.error`."""
    reply = Reply(began=time.perf_counter())
    raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    writer = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port, limit=LINE_LIMIT)
            writer.write(head_of(method, path, None if raw is None else len(raw)) + (raw or b""))
            try:
                await read_reply(reader, reply, look)
            except ConnectionError as error:
                reply.error = f"{type(error).__name__}: {error}"
    except (OSError, ValueError, TimeoutError, EOFError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    finally:
        reply.seconds = time.perf_counter() - reply.began
        if writer is not None:
            writer.close()
    return reply
