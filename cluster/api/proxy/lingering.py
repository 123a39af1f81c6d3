"""Reads and drops the rest of a request's body when the answer comes before the body is complete.

If a server closes a connection while bytes still arrive, the client's operating system drops the answer: the client
sees a connection reset instead of the error.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 2.0  # longest time for which the rest of a body is read
LINGER_BYTES = 64 << 20  # most bytes of the rest that are read


class Lingering:
    """ASGI middleware that reads the rest of a request's body before it ends an answer that came before the body was
    complete. It must be the outermost middleware, so that it sees the answers of the other middleware too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. The answer is sent first; its end is sent after the rest of the request body is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        unread_body = _UnreadBody(receive)

        async def send_after_body(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or unread_body.is_complete:
                await send(message)
                return
            await send({**message, "more_body": True})
            await unread_body.discard()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, unread_body.receive, send_after_body)


class _UnreadBody:
    """The part of a request's body that has not been read. `is_complete` is True once the body is complete."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_complete = False

    async def receive(self) -> Message:
        """Return the next message of the request."""
        message = await self._receive()
        self.is_complete = self.is_complete or message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read and drop the rest of the body: about `LINGER_BYTES` bytes at most, for at most `LINGER_S` seconds."""
        discarded_bytes = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while not self.is_complete and discarded_bytes < LINGER_BYTES:
                    discarded_bytes += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return
