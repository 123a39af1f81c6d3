"""Reads a request's body within a time limit: in the proxy the first part, in the replica all that the proxy passes on.

Nothing heavy is imported here, since this runs in the proxy.
"""

import asyncio
from collections.abc import Callable

from starlette.types import Receive

GRACE_S, BYTES_PER_S = 10.0, 16384  # a body must arrive within GRACE_S, plus a second for each BYTES_PER_S bytes


class SlowBodyError(Exception):
    """A body arrived too slowly. The message is for the client, with status 408."""


async def read_chunks(
    receive: Receive, consume: Callable[[bytes], bool], grace_s: float = GRACE_S, bytes_per_s: int = BYTES_PER_S
) -> bool | None:
    """Pass each chunk of a body to `consume`, until the body ends or `consume` returns False. Return whether more of
    the body is to come, or None if the client has left.

    Raises:
        SlowBodyError: the body does not arrive within `grace_s`, plus a second for each `bytes_per_s` bytes.
    """
    clock, received = asyncio.get_running_loop().time, 0
    started_at = clock()
    try:
        async with asyncio.timeout_at(started_at + grace_s) as time_limit:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunk = message.get("body", b"")
                received += len(chunk)
                wants_more = consume(chunk)
                if not message.get("more_body", False):
                    return False
                if not wants_more:
                    return True
                time_limit.reschedule(started_at + grace_s + received / bytes_per_s)
    except TimeoutError:
        raise SlowBodyError(
            f"the body came too slowly: {received} bytes in {clock() - started_at:.0f} s; it must arrive within "
            f"{grace_s:g} s plus one second for every {bytes_per_s} bytes"
        ) from None
