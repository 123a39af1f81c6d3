"""HTTP/1.1 connections of Serve's proxy: uvicorn's connection class with two faults repaired.

**Upgrade offers.** Java's HttpClient and `curl --http2` send `Upgrade: h2c` with a plain HTTP/1.1 request. A server may
ignore such an offer (RFC 9110, 7.8), and uvicorn supports no upgrade but WebSocket. But uvicorn's parser, httptools,
assumes that a request with an offer has no body: uvicorn then passes on an empty body and fails on the bytes of the
real one. This class parses the head of such a request a second time, without the offer.

**Half-closed connections.** A client may shut down its sending side once its request is complete, and wait for the
answer. uvicorn treats the half-closed connection as ended; this class sends the answer. A client that has closed its
socket completely looks the same at first, but its request must be cancelled. So the first bytes of the answer, which
are the same for all answers, are sent at once. If the client has left, its operating system rejects these bytes.

`cluster.api.proxy.middleware` makes uvicorn use this class. Only uvicorn imports this module, in the proxy.
"""

import asyncio
import select
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

RESPONSE_PREFIX = b"HTTP/1.1 "  # the first bytes of every answer of uvicorn
FIRST_CHECK_S, MAX_CHECK_S = 0.01, 0.5  # first and longest pause between checks of a half-closed connection


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. A request that offers another protocol than WebSocket continues as HTTP/1.1."""
        self._unset_keepalive_if_required()
        remaining = memoryview(data)
        try:
            while remaining:
                try:
                    self.parser.feed_data(remaining)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if self._should_upgrade():
                        self.handle_websocket_upgrade()
                        return
                    remaining = remaining[upgrade.args[0] :]  # `args[0]` counts the bytes parsed so far: the head
                    self.parser.feed_data(self._head_without_upgrade())
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head will be parsed a second time, without the upgrade offer."""
        if not self._ignores_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body, unless its head will be parsed a second time, without the upgrade offer."""
        if not self._ignores_upgrade():
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Return whether the request is a valid WebSocket upgrade. RFC 6455 allows this upgrade with GET only."""
        return bool(self.parser.get_method() == b"GET" and super()._should_upgrade())

    def _ignores_upgrade(self) -> bool:
        """Return whether the request offers an upgrade to a protocol that this server ignores."""
        return bool(self.parser.should_upgrade() and not self._should_upgrade())

    def _head_without_upgrade(self) -> bytes:
        """Return the head that was just parsed, without the header `Upgrade` and without its name in `Connection`."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # httptools treats CONNECT as an offer without the header
            raise httptools.HttpParserInvalidMethodError("CONNECT is for proxies")
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(
                    token for token in map(bytes.strip, value.split(b",")) if token.lower() != b"upgrade"
                )
            if name != b"upgrade" and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep a half-closed connection open. It stays open only if its last request has arrived
        completely and the answer has not ended.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False
        cycle.keep_alive = False  # close it after the answer
        if not cycle.response_started and not self.pipeline:
            # A client that has left rejects this, and `_abort_if_client_left` then notices it.
            self.transport.write(RESPONSE_PREFIX)
            cycle.transport = cast(asyncio.Transport, _PrefixSentTransport(self.transport))
            cycle.waiting_for_100_continue = False
        self._schedule_check(FIRST_CHECK_S)
        return True

    def _schedule_check(self, pause_s: float) -> None:
        """After `pause_s` seconds check whether the client has left, and repeat this until the answer ends. Each pause
        is twice as long as the one before, up to `MAX_CHECK_S`.
        """
        asyncio.get_running_loop().call_later(pause_s, self._abort_if_client_left, min(2 * pause_s, MAX_CHECK_S))

    def _abort_if_client_left(self, pause_s: float) -> None:
        if self.cycle.response_complete or self.transport.is_closing():
            return
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)  # 0: poll reports errors and hang-ups
        if poller.poll(0):
            self.transport.abort()
        else:
            self._schedule_check(pause_s)


class _PrefixSentTransport:
    """A transport on which `RESPONSE_PREFIX` has been sent already: the first write leaves it out."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._prefix = RESPONSE_PREFIX

    def write(self, data: bytes) -> None:
        """Write the data, without `RESPONSE_PREFIX` at its beginning if this is the first write."""
        self._transport.write(data.removeprefix(self._prefix))
        self._prefix = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
