"""When a request was queued, admitted and given tokens: the source of metrics like vLLM's `request_*_time_seconds`."""

import time
from dataclasses import dataclass, field

from cluster.observability.metrics import EngineMetrics
from cluster.request import FinishReason


@dataclass(slots=True)
class RequestTimes:
    """When the events of one request happened, by `time.perf_counter`; None for an event that has not happened yet.
    A request that is retracted and admitted again keeps the time of its first admission.
    """

    queued: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def admit(self, now: float) -> None:
        """Record that the request is admitted for the first time."""
        self.admitted = now

    def record_tokens(self, now: float) -> None:
        """Record that the request got tokens."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def finish(self, metrics: EngineMetrics, reason: FinishReason) -> None:
        """Count the request as ended, with the seconds that it spent in each of queue, prefill and decode; None for a
        stage that it did not complete.
        """
        queue, prefill = _between(self.queued, self.admitted), _between(self.admitted, self.first_token)
        metrics.on_finished(reason, queue, prefill, _between(self.first_token, self.last_token))


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
