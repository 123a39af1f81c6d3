"""The open requests of each rank as the router knows them, and what ranks report of their queues."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.actors.prefill_speed import Drift, RankWork


class QueueReport(NamedTuple):
    """What a rank last said of itself: when (by the clock of the admission), how many prompt tokens of its waiting and
    running requests it had not computed, how many requests were submitted to it until then, and how far its steps are
    off the measured times.
    """

    at: float
    queued_tokens: int
    submitted: int
    drift: Drift = Drift()


@dataclass(slots=True)
class OpenRequest:
    """One open request of `rank`. Of the `prompt` tokens `left` are still to compute, and `shared` are read by others
    too; `tokens` are expected in all, `most` new ones are allowed, of which it was `dealt` some. `entered` is when it
    came to its rank, and `number` tells which of the requests submitted to it this is, from 1 on.
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
        """All its tokens so far."""
        return self.prompt + self.dealt

    @property
    def kv(self) -> int:
        """The tokens whose KV it does not share."""
        return self.length - self.shared


@dataclass(slots=True)
class RankBooks:
    """The open requests of one rank: `queue` those whose prompts are not computed, in order, and `running` the others.
    `sent` were submitted to the rank since it started.

    The first of the queue had its `left` prompt tokens at the time `since`, and the latest report came at `reported`,
    with this `drift`.
    """

    queue: dict[str, OpenRequest] = field(default_factory=dict)
    running: dict[str, OpenRequest] = field(default_factory=dict)
    sent: int = 0
    since: float = 0.0
    reported: float = 0.0
    drift: Drift = field(default_factory=Drift)

    def enqueue(self, name: str, one: OpenRequest) -> None:
        """A request came, and waits behind the others."""
        if not self.queue:
            self.since = one.entered
        self.queue[name] = one

    def dequeue(self, name: str, now: float) -> OpenRequest | None:
        """Take a request out of the queue, if it is there."""
        if next(iter(self.queue), None) == name:
            self.since = now
        return self.queue.pop(name, None)

    def read(self, report: QueueReport) -> None:
        """Note what the rank said."""
        if report.at <= self.reported:
            return
        self.reported, self.drift = report.at, report.drift
        known = [one for one in self.queue.values() if 0 < one.number <= report.submitted]
        computed = sum(one.length for one in known) - report.queued_tokens
        for one in known:  # in the order in which they are computed
            if computed <= 0:
                break
            if one.length - computed < one.left:
                one.left = max(0, one.length - computed)
                self.since = max(self.since, report.at)
            computed -= one.length

    def work(self, chunk: int) -> RankWork:
        """What the rank does now, where a step has at most `chunk` prompt rows."""
        rows, before = 0, 0  # of the next chunk; the tokens before them, summed over the rows
        for one in self.queue.values():
            count = min(one.left, chunk - rows)
            rows, before = rows + count, before + count * (one.length - one.left)
            if rows == chunk:
                break
        committed = [one.length for one in self.running.values()]
        return RankWork(committed, before // max(1, rows), sum(one.left for one in self.queue.values()))
