"""The router's record of the open requests of each rank, and the ranks' reports of their queues."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.actors.prefill_speed import Drift, RankWork


class QueueReport(NamedTuple):
    """The last report of a rank. `at` is when it came, by the admission's clock. `queued_tokens` counts the prompt
    tokens not computed yet, `submitted` the requests that the rank has got so far. `drift` says how far its step times
    are off the measured ones.
    """

    at: float
    queued_tokens: int
    submitted: int
    drift: Drift = Drift()


@dataclass(slots=True)
class OpenRequest:
    """One open request of `rank`. Of its `prompt` tokens, `left` are still to compute and `shared` are also read by
    other requests. `tokens` is the expected number of tokens, prompt included. `most` new tokens are allowed, `dealt`
    were sent so far. `entered` is when the request came to its rank. `number` is 1 for the first request submitted to
    the rank, 2 for the second, and so on; it is 0 until the request is submitted.
    """

    rank: int
    prompt: int
    left: int
    shared: int
    tokens: float
    most: int
    entered: float
    number: int = 0
    dealt: int = 0

    @property
    def length(self) -> int:
        """The number of the request's tokens so far, prompt included."""
        return self.prompt + self.dealt

    @property
    def kv(self) -> int:
        """The number of the request's tokens whose KV is not shared with other requests."""
        return self.length - self.shared


@dataclass(slots=True)
class RankBooks:
    """The open requests of one rank. `queue` holds the requests whose prompt is not computed, in order; `running` holds
    the others. `sent` counts the requests submitted to the rank since it started.

    `left` of the first queued request was right at the time `since`. `reported` and `drift` are the time and the drift
    of the latest report.
    """

    queue: dict[str, OpenRequest] = field(default_factory=dict)
    running: dict[str, OpenRequest] = field(default_factory=dict)
    sent: int = 0
    since: float = 0.0
    reported: float = 0.0
    drift: Drift = field(default_factory=Drift)

    def enqueue(self, name: str, one: OpenRequest) -> None:
        """Add a request at the end of the queue."""
        if not self.queue:
            self.since = one.entered
        self.queue[name] = one

    def dequeue(self, name: str, now: float) -> OpenRequest | None:
        """Take a request out of the queue and return it, or return None if the queue does not hold it."""
        if next(iter(self.queue), None) == name:
            self.since = now
        return self.queue.pop(name, None)

    def read(self, report: QueueReport) -> None:
        """Update `left` of the queued requests by a report of the rank, unless the report is old."""
        if report.at <= self.reported:
            return
        self.reported, self.drift = report.at, report.drift
        # The report gives one sum over the requests that the rank knows. It computes prompts in order, so subtract the
        # computed tokens from the requests at the front.
        known = [one for one in self.queue.values() if 0 < one.number <= report.submitted]
        computed = sum(one.length for one in known) - report.queued_tokens
        for one in known:
            if computed <= 0:
                break
            if one.length - computed < one.left:
                one.left = max(0, one.length - computed)
                self.since = max(self.since, report.at)
            computed -= one.length

    def work(self, chunk: int) -> RankWork:
        """Return the present work of the rank; a step has at most `chunk` prompt rows."""
        rows, before = 0, 0  # rows of the next chunk; the number of tokens before each row, summed over the rows
        for one in self.queue.values():
            count = min(one.left, chunk - rows)
            rows, before = rows + count, before + count * (one.length - one.left)
            if rows == chunk:
                break
        committed = [one.length for one in self.running.values()]
        return RankWork(committed, before // max(1, rows), sum(one.left for one in self.queue.values()))
