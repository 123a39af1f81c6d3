"""Reads a request's body under its time limit: the first part in the proxy, the rest in the replica.

Nothing heavy is imported here, since this runs in the proxy.
"""

import asyncio
from collections.abc import Callable

from starlette.types import Receive

GRACE_S, BYTES_PER_S = 10.0, 16384  # a body must arrive within GRACE_S, plus a second for each BYTES_PER_S bytes


class SlowBodyError(Exception):
    """A body arrived too slowly. The message is for the client, with status 408."""


async def read_pieces(
    receive: Receive, take: Callable[[bytes], bool], grace_s: float = GRACE_S, bytes_per_s: int = BYTES_PER_S
) -> bool | None:
    """Pass each piece of a body to `take`, until the body ends or `take` returns False. Return whether more of the body
    is to come, or None if the client has left.

    Raises:
        SlowBodyError: the body does not arrive within `grace_s`, plus a second for each `bytes_per_s` bytes.
    """
    clock, received = asyncio.get_running_loop().time, 0
    began = clock()
    try:
        async with asyncio.timeout_at(began + grace_s) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                received += len(piece)
                wanted = take(piece)
                if not message.get("more_body", False):
                    return False
                if not wanted:
                    return True
                patience.reschedule(began + grace_s + received / bytes_per_s)
    except TimeoutError:
        raise SlowBodyError(
            f"the body came too slowly: {received} bytes in {clock() - began:.0f} s; it must arrive within {grace_s:g} "
            f"s plus one second for every {bytes_per_s} bytes"
        ) from None
