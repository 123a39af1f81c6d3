"""Connections of Serve's proxy: offers of protocols that it does not speak, and clients that send no more."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop

from cluster.api.proxy.connections import Connection

OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


RUNS: dict[str, Callable[..., Any]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}  # Ray's actors use uvloop


@pytest.fixture(params=RUNS, autouse=True)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNS, "now", RUNS[request.param])


class Server:
    """An application behind real sockets: it answers with what it was asked, once `go` is set."""

    def __init__(self) -> None:
        self.go, self.asked, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.go.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.asked.set()
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            await asyncio.wait([asyncio.ensure_future(self.go.wait()), watch], return_when="FIRST_COMPLETED")
            if self.gone.is_set():
                return
            upgrade = [value.decode() for name, value in scope["headers"] if name in (b"upgrade", b"connection")]
            answer = json.dumps([scope["method"], scope["path"], body.decode(), *upgrade]).encode() + b"\n"
            length = (b"content-length", str(len(answer)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": answer})
        finally:
            watch.cancel()

    async def _watch(self, receive: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            self.gone.set()


def served(talk: Callable[[Server, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        app = Server()
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server._serve([listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            try:
                async with asyncio.timeout(20):
                    return await talk(app, reader, writer)
            finally:
                writer.close()
                server.should_exit = True
                await serving

    return RUNS["now"](whole())


def answers(*parts: bytes, close: bool = False) -> list[Any]:
    """What a client gets that sends these parts one by one, and shuts down its sending side if it is told to."""

    async def talk(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        if close:
            writer.write_eof()
        return await reader.read()

    got: bytes = served(talk)
    assert got.startswith(b"HTTP/1.1 ")
    return [json.loads(line) if line.startswith(b"[") else line for line in got.split(b"\n") if line[:1] in b"[H"]


def post(offer: str, *, length: str = "Content-Length: 3", version: str = "1.1") -> bytes:
    return f"POST /p?q HTTP/{version}\r\nHost: x\r\n{length}\r\n{offer}\r\n".encode()


@pytest.mark.parametrize(
    ("offer", "left"),
    [
        (OFFER, ["HTTP2-Settings"]),
        ("upgrade: TLS/1.0, h2c\r\nconnection:upgrade\r\n", []),
        ("Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n", []),  # RFC 6455: by GET alone
    ],
)
def test_body_of_request_with_upgrade_header_is_read(offer: str, left: list[str]) -> None:
    chunked = post(offer, length="Transfer-Encoding: chunked")
    for parts in (
        [post(offer) + b"abc" + LAST],
        [post(offer), b"a", b"bc", LAST],
        [post(offer)[:50], post(offer)[50:] + b"ab", b"c" + LAST],
        [chunked + b"3\r\nabc\r\n0\r\n\r\n" + LAST],
        [chunked, b"3\r\nabc\r\n", b"0\r\n\r\n", LAST],
    ):
        said = [line for line in answers(*parts) if isinstance(line, list)]
        assert said == [["POST", "/p", "abc", *left], ["GET", "/last", "", "close"]], parts


def test_single_write_may_contain_many_upgrade_requests() -> None:
    said = answers(post(OFFER, length="Content-Length: 0") * 1500 + LAST)
    assert sum(isinstance(line, list) for line in said) == 1501


def test_invalid_http_requests_get_status_400() -> None:
    assert answers(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n")[0].startswith(b"HTTP/1.1 400")
    assert answers(post(OFFER) + b"abcd\r\n")[-1].startswith(b"HTTP/1.1 400")


def test_websocket_upgrade_reaches_the_application() -> None:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    get = f"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n"
    seen: list[str] = []

    async def talk(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(get.encode())
        return await reader.readline()

    async def refuse(self: Server, scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])
        await receive()
        await send({"type": "websocket.close"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "__call__", refuse)
        assert served(talk).startswith(b"HTTP/1.1 403")
    assert seen == ["websocket"]


def test_half_closed_client_gets_its_answer_and_connection_close() -> None:
    async def talk(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        app.go.clear()
        writer.write(post("") + b"abc")
        writer.write_eof()
        await app.asked.wait()
        await asyncio.sleep(0.1)  # a few looks at the connection
        assert not app.gone.is_set()
        app.go.set()
        return await reader.read()

    got = served(talk)
    assert got.startswith(b"HTTP/1.1 200 OK\r\n") and b"connection: close\r\n" in got and b'"abc"' in got
    both = answers(post("") + b"abc" + b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\n", close=True)
    assert [line for line in both if isinstance(line, list)] == [["POST", "/p", "abc"], ["GET", "/2", ""]]


@pytest.mark.parametrize("sent", [post("") + b"abc", post("") + b"ab"])
def test_client_disconnect_is_detected(sent: bytes) -> None:
    async def talk(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.go.clear()
        writer.write(sent)
        await writer.drain()
        if sent.endswith(b"c"):
            await app.asked.wait()
            writer.close()
            await app.gone.wait()
        else:
            writer.close()
            await app.asked.wait()

    served(talk)


def test_incomplete_request_of_half_closed_client_gets_no_answer() -> None:
    async def talk(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(post("") + b"ab")
        writer.write_eof()
        return await reader.read()

    assert served(talk) == b""
