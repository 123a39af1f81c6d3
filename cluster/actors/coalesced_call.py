"""One call whose result is shared by all callers that need it at about the same time."""

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_AGE_S = 0.25


class CoalescedCall(Generic[T]):
    """Shares the result of `call` among callers. `call` never runs twice at once. A result is reused for `max_age_s`.

    When a client leaves, Serve cancels every call that its request's task has made, and Ray passes the cancellation on
    to the called actor. So a request must not call an actor itself. Instead, `call` runs in the context in which this
    object was created, which must not be the context of a request. `call` continues even if all callers stop waiting.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]], max_age_s: float = MAX_AGE_S) -> None:
        self._call, self._max_age_s = call, max_age_s
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None
        self._finished_at = 0.0

    async def get(self) -> T:
        """Return the latest result if it is at most `max_age_s` old. Otherwise wait for a new result: of the call that
        is running, or of a call that begins.

        Raises:
            Exception: the error that `call` raised; the next call of `get` runs `call` again.
        """
        task = self._task
        if task is None or (task.done() and (task.cancelled() or task.exception() or self._age() > self._max_age_s)):
            task = self._task = asyncio.create_task(self._call(), context=self._context)
            task.add_done_callback(self._record_finish)
        return await asyncio.shield(task)

    def _age(self) -> float:
        return time.monotonic() - self._finished_at

    def _record_finish(self, _: "asyncio.Task[T]") -> None:
        self._finished_at = time.monotonic()
