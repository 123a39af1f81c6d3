"""Calls from an ingress replica to the engine deployment through a Serve handle.

If the called replica is lost, the call raises `EngineGoneError`.
"""

import asyncio
import time
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.api.serve.resilient_client import EngineGoneError, EngineQueueFullError, RequestRefused, StreamItem
from cluster.observability.logs import first_line
from cluster.request import Request, SequenceOutput

STALL_TOLERANCE_S = 1.0  # if a wait ends this much later than its timeout, this process was stalled, not the replica


class HandleCalls:
    """Implements `EngineCalls` over the handle of the engine deployment. Serve chooses the replica of every call."""

    def __init__(self, handle: "DeploymentHandle[Any]", caller: str) -> None:
        """`caller` is the full name of this replica. Engine replicas check by this name whether this replica exists."""
        self._caller = caller
        self._handle: Any = handle
        self._streaming: Any = handle.options(stream=True)

    def open(self, request: Request) -> "HandleAttempt":
        """Submit a request to an engine replica that Serve chooses (`EngineCalls.open`)."""
        return HandleAttempt(self._streaming.generate.remote(request, self._caller))

    async def call(self, method: str) -> Any:
        """Return the answer of one engine replica to `method`. If the caller is cancelled, the call is cancelled too.

        Raises:
            EngineGoneError: no engine replica answers, or the chosen one died.
            EngineQueueFullError: the queue of the engine deployment is full.
        """
        response = getattr(self._handle, method).remote()
        try:
            return await response
        except RayTaskError:
            raise
        except BackPressureError as error:
            raise EngineQueueFullError(first_line(error)) from None
        except (RayError, RayServeException) as error:
            raise EngineGoneError(first_line(error)) from None
        except asyncio.CancelledError:
            response.cancel()
            raise


class HandleAttempt:
    """Implements `Attempt` over one streaming call.

    When a client disconnects, Serve cancels the calls that were made while serving this client's request: this call,
    and no call of another stream.
    """

    def __init__(self, response: Any) -> None:
        """`response` is a `DeploymentResponseGenerator` of items."""
        self._response = response
        self._next_item_task: asyncio.Task[StreamItem | None] | None = None
        self._finished = False

    async def next(self, timeout_s: float) -> StreamItem:
        """Return the next item. Raise EngineGoneError if none comes within `timeout_s`, or none can come any more."""
        if self._next_item_task is None:  # a task, since a wait that times out must not cancel the call
            self._next_item_task = asyncio.ensure_future(self._next_item())
        while True:
            wait_started = time.monotonic()
            done, _ = await asyncio.wait((self._next_item_task,), timeout=timeout_s)
            if done:
                break
            if time.monotonic() - wait_started < timeout_s + STALL_TOLERANCE_S:
                raise EngineGoneError(f"the engine replica sent nothing for {timeout_s:.1f} s")
        task, self._next_item_task = self._next_item_task, None
        try:
            item = task.result()
        except RayTaskError:  # a fault of the engine's code, not of its process
            self._finished = True
            raise
        except BackPressureError as queue_full:  # Serve's queue was full, so no replica got the call
            self._finished = True
            message = f"the queue of this server is full (max_queued_requests: {queue_full.args[1]})"
            return RequestRefused(message, queue_full.retry_after_s or 1.0)
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            raise EngineGoneError(first_line(error)) from None
        if item is None:
            self._finished = True
            raise EngineGoneError("its stream ended")
        self._finished = isinstance(item, SequenceOutput) and item.finish_reason is not None
        return item

    async def _next_item(self) -> StreamItem | None:
        try:
            item: StreamItem = await anext(self._response)
        except StopAsyncIteration:
            return None
        return item

    def close(self) -> None:
        """Cancel the call, unless it has ended."""
        if self._next_item_task is not None:
            self._next_item_task.add_done_callback(_retrieve_exception)
            self._next_item_task.cancel()
        if not self._finished:
            self._response.cancel()


def _retrieve_exception(task: "asyncio.Task[StreamItem | None]") -> None:
    """Retrieve the error of a call that nobody awaits; otherwise asyncio logs a traceback for it."""
    if not task.cancelled():
        task.exception()
