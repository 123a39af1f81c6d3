"""The router's record of the open requests of each rank, and the ranks' reports of their queues."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.actors.prefill_speed import Drift, RankWork


class QueueReport(NamedTuple):
    """The last report of a rank. `received_at` is when it came, by the admission's clock. `queued_tokens` counts the
    prompt tokens not computed yet, `submitted` the requests that the rank has got so far. `drift` says how far its step
    times are off the measured ones.
    """

    received_at: float
    queued_tokens: int
    submitted: int
    drift: Drift = Drift()


@dataclass(slots=True)
class OpenRequest:
    """One open request of `rank`. Of its `prompt_tokens` tokens, `uncomputed_tokens` are still to compute and
    `shared_tokens` are also read by other requests. `expected_tokens` is the expected number of tokens, prompt
    included. `max_new_tokens` new tokens are allowed, `generated_tokens` were sent so far. `queued_at` is when the
    request came to its rank. `submission_number` is 1 for the first request submitted to the rank, 2 for the second,
    and so on; it is 0 until the request is submitted.
    """

    rank: int
    prompt_tokens: int
    uncomputed_tokens: int
    shared_tokens: int
    expected_tokens: float
    max_new_tokens: int
    queued_at: float
    submission_number: int = 0
    generated_tokens: int = 0

    @property
    def length(self) -> int:
        """The number of the request's tokens so far, prompt included."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def unshared_kv_tokens(self) -> int:
        """The number of the request's tokens whose KV is not shared with other requests."""
        return self.length - self.shared_tokens


@dataclass(slots=True)
class RankRequests:
    """The open requests of one rank. `queue` holds the requests whose prompt is not computed, in order; `running` holds
    the others. `submitted` counts the requests submitted to the rank since it started.

    `uncomputed_tokens` of the first queued request was right at the time `progress_since`. `last_report_at` and `drift`
    are the time and the drift of the latest report.
    """

    queue: dict[str, OpenRequest] = field(default_factory=dict)
    running: dict[str, OpenRequest] = field(default_factory=dict)
    submitted: int = 0
    progress_since: float = 0.0
    last_report_at: float = 0.0
    drift: Drift = field(default_factory=Drift)

    def enqueue(self, name: str, request: OpenRequest) -> None:
        """Add a request at the end of the queue."""
        if not self.queue:
            self.progress_since = request.queued_at
        self.queue[name] = request

    def dequeue(self, name: str, now: float) -> OpenRequest | None:
        """Take a request out of the queue and return it, or return None if the queue does not hold it."""
        if next(iter(self.queue), None) == name:
            self.progress_since = now
        return self.queue.pop(name, None)

    def apply_report(self, report: QueueReport) -> None:
        """Update `uncomputed_tokens` of the queued requests by a report of the rank, unless the report is old."""
        if report.received_at <= self.last_report_at:
            return
        self.last_report_at, self.drift = report.received_at, report.drift
        # The report gives one sum over the requests that the rank knows. It computes prompts in order, so subtract the
        # computed tokens from the requests at the front.
        reported_requests = [
            request for request in self.queue.values() if 0 < request.submission_number <= report.submitted
        ]
        computed = sum(request.length for request in reported_requests) - report.queued_tokens
        for request in reported_requests:
            if computed <= 0:
                break
            if request.length - computed < request.uncomputed_tokens:
                request.uncomputed_tokens = max(0, request.length - computed)
                self.progress_since = max(self.progress_since, report.received_at)
            computed -= request.length

    def work(self, max_rows: int) -> RankWork:
        """Return the present work of the rank; a step has at most `max_rows` prompt rows."""
        rows, tokens_before = 0, 0  # rows of the next chunk; the number of tokens before each row, summed over the rows
        for request in self.queue.values():
            count = min(request.uncomputed_tokens, max_rows - rows)
            rows, tokens_before = rows + count, tokens_before + count * (request.length - request.uncomputed_tokens)
            if rows == max_rows:
                break
        committed = [request.length for request in self.running.values()]
        return RankWork(
            committed, tokens_before // max(1, rows), sum(request.uncomputed_tokens for request in self.queue.values())
        )
