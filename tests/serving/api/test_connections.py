"""Connections of Serve's proxy: offers of protocols that it does not support, and clients that stop sending."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop

from cluster.api.proxy.connections import Connection

H2C_OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
LAST_REQUEST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


LOOP_RUNNERS: dict[str, Callable[..., Any]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}  # Ray's actors use uvloop


@pytest.fixture(params=LOOP_RUNNERS, autouse=True)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOOP_RUNNERS, "now", LOOP_RUNNERS[request.param])


class Server:
    """An application behind real sockets. Once `may_answer` is set, it answers with method, path and body of the
    request.
    """

    def __init__(self) -> None:
        self.may_answer, self.request_received, self.client_gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more_body = b"", True
        while more_body:
            message = await receive()
            body, more_body = body + message.get("body", b""), message.get("more_body", False)
        self.request_received.set()
        disconnect_task = asyncio.ensure_future(self._wait_for_disconnect(receive))
        try:
            await asyncio.wait(
                [asyncio.ensure_future(self.may_answer.wait()), disconnect_task], return_when="FIRST_COMPLETED"
            )
            if self.client_gone.is_set():
                return
            upgrade = [value.decode() for name, value in scope["headers"] if name in (b"upgrade", b"connection")]
            answer = json.dumps([scope["method"], scope["path"], body.decode(), *upgrade]).encode() + b"\n"
            length = (b"content-length", str(len(answer)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": answer})
        finally:
            disconnect_task.cancel()

    async def _wait_for_disconnect(self, receive: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            self.client_gone.set()


def run_client(client: Callable[[Server, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]) -> Any:
    async def run() -> Any:
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
                    return await client(app, reader, writer)
            finally:
                writer.close()
                server.should_exit = True
                await serving

    return LOOP_RUNNERS["now"](run())


def answers(*parts: bytes, close: bool = False) -> list[Any]:
    """The status and JSON lines that a client gets after it sends these parts one by one. With `close`, the client then
    shuts down its sending side.
    """

    async def client(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        if close:
            writer.write_eof()
        return await reader.read()

    response: bytes = run_client(client)
    assert response.startswith(b"HTTP/1.1 ")
    return [json.loads(line) if line.startswith(b"[") else line for line in response.split(b"\n") if line[:1] in b"[H"]


def post(offer: str, *, length: str = "Content-Length: 3", version: str = "1.1") -> bytes:
    return f"POST /p?q HTTP/{version}\r\nHost: x\r\n{length}\r\n{offer}\r\n".encode()


@pytest.mark.parametrize(
    ("offer", "remaining_headers"),
    [
        (H2C_OFFER, ["HTTP2-Settings"]),
        ("upgrade: TLS/1.0, h2c\r\nconnection:upgrade\r\n", []),
        ("Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n", []),  # RFC 6455: only by GET
    ],
)
def test_body_of_request_with_upgrade_header_is_read(offer: str, remaining_headers: list[str]) -> None:
    chunked = post(offer, length="Transfer-Encoding: chunked")
    for parts in (
        [post(offer) + b"abc" + LAST_REQUEST],
        [post(offer), b"a", b"bc", LAST_REQUEST],
        [post(offer)[:50], post(offer)[50:] + b"ab", b"c" + LAST_REQUEST],
        [chunked + b"3\r\nabc\r\n0\r\n\r\n" + LAST_REQUEST],
        [chunked, b"3\r\nabc\r\n", b"0\r\n\r\n", LAST_REQUEST],
    ):
        json_lines = [line for line in answers(*parts) if isinstance(line, list)]
        assert json_lines == [["POST", "/p", "abc", *remaining_headers], ["GET", "/last", "", "close"]], parts


def test_single_write_may_contain_many_upgrade_requests() -> None:
    lines = answers(post(H2C_OFFER, length="Content-Length: 0") * 1500 + LAST_REQUEST)
    assert sum(isinstance(line, list) for line in lines) == 1501


def test_invalid_http_requests_get_status_400() -> None:
    assert answers(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n")[0].startswith(b"HTTP/1.1 400")
    assert answers(post(H2C_OFFER) + b"abcd\r\n")[-1].startswith(b"HTTP/1.1 400")


def test_websocket_upgrade_reaches_the_application() -> None:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    request_text = f"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n"
    scope_types: list[str] = []

    async def client(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request_text.encode())
        return await reader.readline()

    async def refuse(self: Server, scope: Any, receive: Any, send: Any) -> None:
        scope_types.append(scope["type"])
        await receive()
        await send({"type": "websocket.close"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "__call__", refuse)
        assert run_client(client).startswith(b"HTTP/1.1 403")
    assert scope_types == ["websocket"]


def test_half_closed_client_gets_its_answer_and_connection_close() -> None:
    async def client(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        app.may_answer.clear()
        writer.write(post("") + b"abc")
        writer.write_eof()
        await app.request_received.wait()
        await asyncio.sleep(0.1)  # time for a few checks of the connection
        assert not app.client_gone.is_set()
        app.may_answer.set()
        return await reader.read()

    response = run_client(client)
    assert response.startswith(b"HTTP/1.1 200 OK\r\n") and b"connection: close\r\n" in response and b'"abc"' in response
    lines = answers(post("") + b"abc" + b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\n", close=True)
    assert [line for line in lines if isinstance(line, list)] == [["POST", "/p", "abc"], ["GET", "/2", ""]]


@pytest.mark.parametrize("sent", [post("") + b"abc", post("") + b"ab"])
def test_client_disconnect_is_detected(sent: bytes) -> None:
    async def client(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        app.may_answer.clear()
        writer.write(sent)
        await writer.drain()
        if sent.endswith(b"c"):
            await app.request_received.wait()
            writer.close()
            await app.client_gone.wait()
        else:
            writer.close()
            await app.request_received.wait()

    run_client(client)


def test_incomplete_request_of_half_closed_client_gets_no_answer() -> None:
    async def client(app: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(post("") + b"ab")
        writer.write_eof()
        return await reader.read()

    assert run_client(client) == b""
