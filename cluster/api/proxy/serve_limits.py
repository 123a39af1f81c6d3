"""Finds out which limit of Ray Serve ended a call; Serve's proxy does not report it.

If a limit ends a call, the proxy answers in plain text, or sends nothing more if the answer has begun. So middleware
cannot see whether a limit or another cause ended the call: a timeout looks like a lost replica, and a full queue looks
like a deployment without replicas. The proxy has one function that turns the exception of a call into a status.
`patch_proxy` wraps this function.

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

PROXY_MODULE, STATUS_FUNCTION = "ray.serve._private.proxy", "get_http_response_status"


@dataclass(slots=True)
class ServeLimit:
    """The limit that ended a call; both fields are None if no limit ended it. `timeout_s` is the longest time of a call
    in seconds (`http_options.request_timeout_s`, or the client's own header). `max_queued_requests` is the setting of
    this name, the number of calls that may wait for a deployment.
    """

    timeout_s: float | None = None
    max_queued_requests: int | None = None

    def record(self, error: BaseException, timeout_s: float | None) -> None:
        """Note the exception that ended the call, and the call's time limit in seconds (None: no limit)."""
        exceptions: Any = sys.modules["ray.serve.exceptions"]
        if isinstance(error, TimeoutError) and timeout_s is not None:
            self.timeout_s = timeout_s
        # If the replica itself raised the BackPressureError, for a call of its own, the proxy gets a RayTaskError with
        # one argument, the cause. The queue of this call was then not full.
        elif isinstance(error, exceptions.BackPressureError) and len(error.args) > 1:
            self.max_queued_requests = error.args[1]


_current_limit: ContextVar[ServeLimit | None] = ContextVar("serve_limit", default=None)


@contextmanager
def record_limit() -> Iterator[ServeLimit]:
    """Yield a `ServeLimit`. If a limit of Serve ends the proxy's call inside the block, the `ServeLimit` records it."""
    limit = ServeLimit()
    token = _current_limit.set(limit)
    try:
        yield limit
    finally:
        _current_limit.reset(token)


def patch_proxy() -> None:
    """Wrap the proxy's status function in this process; do nothing in a process without a proxy."""
    proxy: Any = sys.modules.get(PROXY_MODULE)
    if proxy is None:
        return
    original_function = getattr(proxy, STATUS_FUNCTION, None)
    if original_function is None:
        logger.warning(
            "Serve's proxy has no %s: its timeouts and full queues are taken for lost replicas", STATUS_FUNCTION
        )
        return

    @functools.wraps(original_function)
    def record_and_return_status(error: BaseException, timeout_s: float | None, *arguments: Any) -> Any:
        if (limit := _current_limit.get()) is not None:
            limit.record(error, timeout_s)
        return original_function(error, timeout_s, *arguments)

    setattr(proxy, STATUS_FUNCTION, record_and_return_status)
