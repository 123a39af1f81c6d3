"""HTTP/1.1 connections of Serve's proxy: uvicorn's, without two of its faults.

**Offers of another protocol.** Java's HttpClient and `curl --http2` send `Upgrade: h2c` with a plain HTTP/1.1 request.
A server may ignore such an offer (RFC 9110, 7.8), and uvicorn speaks nothing but WebSocket beside HTTP. But httptools,
its parser, takes a request with an offer for one without a body; uvicorn then hands on an empty body, and fails on the
bytes of the real one. Here the head of such a request is parsed once more without the offer.

**Half-closed connections.** A client may shut down its sending side once its request is complete, and wait for the
answer. uvicorn takes that for the end of the connection. Here the answer is sent. A client that has closed its socket
altogether looks the same at first, and its request must not run on. So the first bytes of the answer, the same for
every answer, are sent at once: the system of a client that has left rejects them, and the request is cancelled.

`cluster.api.proxy.middleware` makes uvicorn use this class. Only uvicorn imports this module, in the proxy.
"""

import asyncio
import select
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

VERSION = b"HTTP/1.1 "  # what every answer of uvicorn begins with
FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.5  # pauses between two looks at a half-closed connection; each doubles the last


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def data_received(self, data: bytes) -> None:
        """Parse what has come. A request that offers a protocol other than WebSocket goes on as HTTP/1.1."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as offer:
                    if self._should_upgrade():
                        self.handle_websocket_upgrade()
                        return
                    rest = rest[offer.args[0] :]
                    self.parser.feed_data(self._head_without_offer())
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head is to be parsed once more."""
        if not self._declined():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body, unless its head is to be parsed once more."""
        if not self._declined():
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Whether the request asks for WebSocket, and may: RFC 6455 has it by GET alone."""
        return bool(self.parser.get_method() == b"GET" and super()._should_upgrade())

    def _declined(self) -> bool:
        return bool(self.parser.should_upgrade() and not self._should_upgrade())

    def _head_without_offer(self) -> bytes:
        """The head that was just parsed, without the header `Upgrade` and its mention in `Connection`."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # is an offer by itself
            raise httptools.HttpParserInvalidMethodError("CONNECT is for proxies")
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(word for word in map(bytes.strip, value.split(b",")) if word.lower() != b"upgrade")
            if name != b"upgrade" and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep a connection open whose client sends no more: where its last request has no answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False
        cycle.keep_alive = False  # close it after the answer
        if not cycle.response_started and not self.pipeline:
            self.transport.write(VERSION)
            cycle.transport = cast(asyncio.Transport, _Begun(self.transport))
            cycle.waiting_for_100_continue = False
        self._look(FIRST_LOOK_S)
        return True

    def _look(self, pause_s: float) -> None:
        """Look after a pause, again and again until the answer is over, whether the client has left altogether."""
        asyncio.get_running_loop().call_later(pause_s, self._end_if_gone, min(2 * pause_s, LONGEST_LOOK_S))

    def _end_if_gone(self, pause_s: float) -> None:
        if self.cycle.response_complete or self.transport.is_closing():
            return
        rejected = select.poll()
        rejected.register(self.transport.get_extra_info("socket").fileno(), 0)  # errors and hang-ups are always told
        if rejected.poll(0):
            self.transport.abort()
        else:
            self._look(pause_s)


class _Begun:
    """A transport on which `VERSION` has been sent: it is left out of what is written first."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._sent = VERSION

    def write(self, data: bytes) -> None:
        """Write what of the data has not been sent."""
        self._transport.write(data.removeprefix(self._sent))
        self._sent = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
