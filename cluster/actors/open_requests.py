"""The router's records of open requests and of the requests of each rank, and the ranks' reports of their queues."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.actors.prefill_speed import Drift, RankWork
from cluster.actors.streams import OpenStream


class QueueReport(NamedTuple):
    """The last report of a rank. `received_at` is when it came, by the admission's clock. `queued_tokens` is the number
    of prompt tokens that the rank has not computed yet. `submitted` is the number of requests that the rank has got so
    far. `drift` says how much the rank's step times differ from the measured ones.
    """

    received_at: float
    queued_tokens: int
    submitted: int
    drift: Drift = Drift()


@dataclass(frozen=True, slots=True)
class RankChoice:
    """The dp rank that a request would go to.

    `cached_tokens` counts the tokens at the start of the prompt that are in the rank's cache, or will be when the
    prompts of its open requests are computed. `shared_tokens` counts the tokens at the start of the prompt with which
    the prompt of an open request of the rank also starts. `queued_tokens` counts the prompt tokens that are not in the
    rank's cache now. `page_hashes` holds the hashes of the prompt's pages (`page_hashes_of`).
    """

    rank: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    queued_tokens: int = 0
    page_hashes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class OpenRequest(OpenStream):
    """One open request of the router: its stream, the rank that it is counted on (`choice`), and the estimates of
    balancer and admission. The methods of `OpenStream` write the fields of the stream; `Balancer.choose` writes
    `choice`.

    Only the balancer uses the following fields. `queued_tokens` is the number of prompt tokens that count as not
    computed; it is 0 after the first output. `expected_new_tokens` is the expected number of tokens after the prompt.
    `work` (see `RankLoad`) was estimated after `estimated_at_step` steps of the request; `steps_since_estimate` counts
    its steps since then.

    Only admission uses the remaining fields. `uncomputed_tokens` is the number of prompt tokens that, by the rank's
    reports, are not computed yet. `waiting_tokens` is the share of the request in `Admission.queued_tokens`, expected
    new tokens included; it is 0 after the first output. `submission_number` is 1 for the first request submitted to the
    rank, 2 for the second, and so on; it is 0 until the request is submitted.
    """

    choice: RankChoice = RankChoice()
    queued_tokens: int = 0
    expected_new_tokens: float = 0.0
    work: tuple[int, ...] = ()
    estimated_at_step: int = 0
    steps_since_estimate: int = 0
    uncomputed_tokens: int = 0
    waiting_tokens: float = 0.0
    submission_number: int = 0

    @property
    def unshared_kv_tokens(self) -> int:
        """The number of the request's tokens so far whose KV the request does not share with other requests."""
        return self.length - self.choice.shared_tokens

    @property
    def remaining_tokens(self) -> int:
        """The most tokens that may still come, at least 1. Tokens that an earlier replica sent do not come again."""
        return max(1, self.request.params.max_tokens - self.request.resumed_tokens - len(self.sent_tokens))


@dataclass(slots=True)
class RankRequests:
    """The open requests of one rank. `queue` holds the requests whose prompt is not computed, in order; `running` holds
    the others. `submitted` counts the requests submitted to the rank since it started.

    At the time `progress_since`, the number `uncomputed_tokens` of the first queued request was up to date.
    `last_report_at` is the time of the latest report, or of the gang's start before the first one; `drift` is the drift
    of the latest report.
    """

    queue: dict[str, OpenRequest] = field(default_factory=dict)
    running: dict[str, OpenRequest] = field(default_factory=dict)
    submitted: int = 0
    progress_since: float = 0.0
    last_report_at: float = 0.0
    drift: Drift = field(default_factory=Drift)

    def enqueue(self, request: OpenRequest, now: float) -> None:
        """Add a request at the end of the queue; `now` is the time by the admission's clock."""
        if not self.queue:
            self.progress_since = now
        self.queue[request.name] = request

    def dequeue(self, name: str, now: float) -> OpenRequest | None:
        """Take a request out of the queue and return it, or return None if the queue does not hold it."""
        if next(iter(self.queue), None) == name:
            self.progress_since = now
        return self.queue.pop(name, None)

    def apply_report(self, report: QueueReport) -> None:
        """Update `drift`, and `uncomputed_tokens` of the queued requests, by a report of the rank. Ignore a report that
        is not newer than `last_report_at`.
        """
        if report.received_at <= self.last_report_at:
            return
        self.last_report_at, self.drift = report.received_at, report.drift
        # The report gives one sum over the requests that the rank knows. The rank computes prompts in order, so the
        # computed tokens belong to the requests at the front of the queue.
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
        rows, tokens_before = 0, 0  # rows of the next step; tokens computed before each row's chunk, summed over rows
        for request in self.queue.values():
            count = min(request.uncomputed_tokens, max_rows - rows)
            rows, tokens_before = rows + count, tokens_before + count * (request.length - request.uncomputed_tokens)
            if rows == max_rows:
                break
        committed = [request.length for request in self.running.values()]
        return RankWork(
            committed, tokens_before // max(1, rows), sum(request.uncomputed_tokens for request in self.queue.values())
        )
