"""Finds out which limit of Ray Serve ended a call; Serve's proxy does not report it.

The proxy answers a call that met a limit in plain text, or not at all if the answer had begun. From outside, middleware
cannot tell a timeout from a lost replica, or a full queue from a deployment without replicas. The proxy turns every
exception of a call into a status by one function, which `listen` wraps.

Nothing heavy is imported here, since this runs in the proxy.
"""

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

PROXY, FUNCTION = "ray.serve._private.proxy", "get_http_response_status"


@dataclass(slots=True)
class Met:
    """The limit that ended a call; both fields are None until one did. `timeout_s` is the longest time of a call
    (`http_options.request_timeout_s`, or the client's own header), in seconds; `queue` is the number of calls that may
    wait for a deployment (`max_queued_requests`).
    """

    timeout_s: float | None = None
    queue: int | None = None

    def note(self, error: BaseException, timeout_s: float | None) -> None:
        """Note the exception that ended the call, and the call's time limit in seconds (None: no limit)."""
        exceptions: Any = sys.modules["ray.serve.exceptions"]
        if isinstance(error, TimeoutError) and timeout_s is not None:
            self.timeout_s = timeout_s
        # A rejected call of the replica arrives as a RayTaskError, whose only argument is its cause.
        elif isinstance(error, exceptions.BackPressureError) and len(error.args) > 1:
            self.queue = error.args[1]


_met: ContextVar[Met | None] = ContextVar("met", default=None)


@contextmanager
def noted() -> Iterator[Met]:
    """Yield a `Met` that records the limit which ends the proxy's call inside the block."""
    met = Met()
    before = _met.set(met)
    try:
        yield met
    finally:
        _met.reset(before)


def listen() -> None:
    """Wrap the proxy's status function in this process; do nothing in a process without a proxy."""
    proxy: Any = sys.modules.get(PROXY)
    if proxy is None:
        return
    status_of = getattr(proxy, FUNCTION, None)
    if status_of is None:
        logger.warning("Serve's proxy has no %s: its timeouts and full queues are taken for lost replicas", FUNCTION)
        return

    @functools.wraps(status_of)
    def status_and_note(error: BaseException, timeout_s: float | None, *rest: Any) -> Any:
        if (met := _met.get()) is not None:
            met.note(error, timeout_s)
        return status_of(error, timeout_s, *rest)

    setattr(proxy, FUNCTION, status_and_note)
