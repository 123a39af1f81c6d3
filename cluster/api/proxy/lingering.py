"""An answer that comes before the request's body is over: the rest is read and dropped for a moment.

A server that closes a connection on which bytes are still arriving makes the client's system drop the answer with it:
the client sees a reset and never learns why.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 2.0
LINGER_BYTES = 64 << 20


class Lingering:
    """ASGI middleware around everything that may answer early."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its answer is whole at the client before the rest of its body is waited for."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rest = _UnreadBody(receive)

        async def sending(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not last or rest.over:
                await send(message)
                return
            await send({**message, "more_body": True})
            await rest.drop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, rest.receive, sending)


class _UnreadBody:
    """What of a request's body has not come yet."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.over = False

    async def receive(self) -> Message:
        """The next message of the request."""
        message = await self._receive()
        self.over = self.over or message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def drop(self) -> None:
        """Read the rest and keep nothing of it, within the limits."""
        dropped = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while not self.over and dropped < LINGER_BYTES:
                    dropped += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return
