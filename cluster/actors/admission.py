"""Admission to the queue of a gang: which requests may enter, and after what time a refused client should retry.

A request is refused if the queue is full or its expected wait for the first token is too long. To predict the wait,
`forecast.RankForecast` simulates the queue of the rank that the request would go to, with the step times that the ranks
measured at start. Heartbeats report how many prompt tokens a rank has not computed yet, and how far its present step
times are off the measured ones. How long running requests go on is predicted from two learnt figures: tokens per
request (`output_lengths.OutputLengths`) and tokens per second (`token_rate.TokenRate`).

No Ray and no event loop here: plain bookkeeping over an injected clock.
"""

import time
from collections.abc import Callable

from cluster.actors.balance import RankChoice
from cluster.actors.forecast import ExpectedWait, GangForecast, QueuedPrompt, RankForecast, RunningRequest
from cluster.actors.messages import Overloaded
from cluster.actors.open_requests import OpenRequest, QueueReport, RankBooks
from cluster.actors.output_lengths import OutputLengths
from cluster.actors.prefill_speed import Drift, PrefillSpeed
from cluster.actors.token_rate import TokenRate
from cluster.config.resolved import ResolvedSettings
from cluster.observability.step_times import StepTimes
from cluster.request import Request

SOON_S = 1.0  # an expected wait up to this, or of which earlier requests cause only this, is not refused as too long
HEADROOM = 0.7  # share of max_queue_wait_s that an expected wait may take, so that 99 of 100 real waits stay within it
FRESH_S = 0.1  # seconds for which a forecast is reused: making one costs a millisecond per rank
TELLING_ROWS = 64  # the time of a shorter prompt is mostly that of one step, and says little about the time per row
MEMORY = 0.2  # weight of the latest prompt in the time per row
RANKS = 8  # with more ranks than this a forecast is reused for longer, so that its cost per second does not grow
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples spread evenly over [0, 1)
SHORTEST = 1.0  # tokens of the request for which `full` checks admission
ALONE = RankChoice()  # the choice in a gang of one rank without cached prefixes


class Admission:
    """Admits or refuses the requests of one gang, and tracks them. A request without a token yet is "waiting", and
    "running" after its first token. An OpenRequest is called `one` here.
    """

    def __init__(
        self,
        resolved: ResolvedSettings,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[int], QueueReport | None] = lambda rank: None,
    ) -> None:
        """`report` returns the latest report of a dp rank, or None if there was none yet."""
        config = resolved.settings
        self._config, self._shape, self._chunk = config, resolved.shape, resolved.chunk_rows
        self._clock, self._report = clock, report
        self._ranks = [RankBooks() for _ in range(config.attn_dp_size)]
        self._open: dict[str, OpenRequest] = {}
        self._kv_tokens = 0
        self._pace: StepTimes | None = None
        self._row_s = 0.0  # seconds per prompt row, learnt from long prompts; used where steps are not measured
        self.waiting = 0  # requests
        self.queued_tokens = 0.0  # of waiting requests, expected new tokens included
        self._forecast: GangForecast | None = None
        self._lengths = OutputLengths()
        self._rate = TokenRate(self._shape.num_steps, config.attn_dp_size)
        self._running = 0  # requests
        self._at = clock()
        self._serving = True

    def new_tokens(self, request: Request) -> float:
        """Return the expected number of new tokens of a request."""
        return self._lengths.expected(request.params.max_tokens)

    def check(self, request: Request, place: RankChoice = ALONE) -> None:
        """Raise if a request that would go to `place` must be refused.

        Raises:
            Overloaded: with the expected wait, for Retry-After.
        """
        tokens = len(request.prompt_token_ids) + self.new_tokens(request)
        if (why := self._why(self.wait(len(request.prompt_token_ids), place), tokens)) is not None:
            raise why

    def full(self) -> Overloaded | None:
        """Return why even the shortest request would be refused now on every rank; None if it would be admitted."""
        return self._why(min(self.wait(1, RankChoice(rank)) for rank in range(len(self._ranks))), SHORTEST)

    def wait(self, prompt: int, place: RankChoice = ALONE) -> ExpectedWait:
        """Return the expected wait of a new request with `prompt` tokens; 0.0 while the gang is down."""
        if not self._serving:
            return ExpectedWait(0.0, 0.0)
        now = self._clock()
        if self._forecast is None or now - self._forecast.made > FRESH_S * max(1.0, len(self._ranks) / RANKS):
            self._forecast = self._run_ahead(now)
        newcomer = QueuedPrompt(place.cached, prompt - place.cached, prompt - place.shared + self._shape.window, 0.0)
        return self._forecast.wait(place.rank, newcomer, now)

    def _why(self, wait: ExpectedWait, tokens: float) -> Overloaded | None:
        """Return why a request with `tokens` tokens (prompt and new) and this expected wait is refused, or None."""
        config, waiting, seconds = self._config, self.waiting, wait.seconds
        if seconds <= SOON_S and self._pace is not None and self._serving:
            return None
        if waiting >= config.max_queued_requests:
            return Overloaded(f"{waiting} requests wait (max_queued_requests is {config.max_queued_requests})", seconds)
        if waiting and self.queued_tokens + tokens > config.max_queued_tokens:
            held = f"the queue holds {self.queued_tokens:.0f} tokens (max_queued_tokens is {config.max_queued_tokens})"
            return Overloaded(held, seconds)
        limit = max(SOON_S, HEADROOM * config.max_queue_wait_s)
        if seconds > limit and wait.delay > SOON_S:  # without delay by others, a long prompt would not be faster later
            first = f"the first token would come after about {seconds:.1f} s; the limit is {limit:.3g} s"
            share = f"{HEADROOM:g} of max_queue_wait_s" if limit > SOON_S else "the least for any max_queue_wait_s"
            return Overloaded(f"{first}, {share} ({config.max_queue_wait_s:g} s)", seconds)
        return None

    def entered(self, request: Request, place: RankChoice = ALONE) -> None:
        """Note that a request was admitted; it waits at `place` for its first token."""
        self._pass()
        prompt, most = len(request.prompt_token_ids), request.params.max_tokens
        expected = prompt + self.new_tokens(request)
        one = OpenRequest(place.rank, prompt, prompt - place.cached, place.shared, expected, most, self._at)
        self._open[request.request_id] = one
        self.waiting += 1
        self.queued_tokens += one.tokens
        self._enqueue(request.request_id, one)

    def sent(self, name: str) -> None:
        """Note that a request was submitted to its rank: the rank's reports may count it from now on."""
        if (one := self._open.get(name)) is not None:
            books = self._ranks[one.rank]
            books.sent += 1
            one.number = books.sent

    def moved(self, name: str, prompt: int, place: RankChoice) -> None:
        """Note that a request was submitted again, with `prompt` tokens, to a gang that starts with empty caches."""
        one = self._open.get(name)
        if one is None:
            return
        self._pass()
        self._dequeue(name, one)
        self._run_no_more(one, name)
        one.rank, one.prompt, one.left, one.shared = place.rank, prompt - one.dealt, prompt - place.cached, place.shared
        one.entered, one.number = self._at, 0
        self._enqueue(name, one)

    def progressed(self, name: str, tokens: int) -> None:
        """Note that a request got `tokens` tokens. Its first tokens show that its prompt is computed."""
        self._pass()
        one = self._open.get(name)
        if one is None:
            return
        books = self._ranks[one.rank]
        # Learn from the first of the queue only: all rows since `books.since` were its own.
        if one.left >= TELLING_ROWS and next(iter(books.queue), None) == name:
            took = (self._at - books.since) / one.left
            self._row_s += (MEMORY if self._row_s else 1.0) * (took - self._row_s)
        if self._dequeue(name, one):
            if not one.dealt:
                self._served(one)
            one.left = 0
            self._run(one, name)
        else:
            self._rate.given(tokens)
        one.dealt += tokens

    def left(self, name: str, stopped: bool) -> None:
        """Note that a request is over. `stopped`: the model ended it, not its token limit or a client that left."""
        self._pass()
        one = self._open.pop(name, None)
        if one is None:
            return
        self._dequeue(name, one)
        self._run_no_more(one, name)
        if not one.dealt:
            self._served(one)
        self._lengths.ended(one.dealt, stopped)

    def stopped(self) -> None:
        """Note that the gang is down: until `started`, time does not count and no wait is estimated."""
        self._pass()
        self._serving = False

    def started(self, kv_tokens: int, pace: StepTimes | None = None) -> None:
        """Note that the gang serves, for the first time or again. `kv_tokens` is the KV capacity of one rank; `pace`
        holds the measured step times, or None if steps are not measured.
        """
        self._kv_tokens, self._pace = kv_tokens, pace
        self._at = self._clock()
        self._serving = True
        self._forecast = None
        for books in self._ranks:
            books.since, books.reported, books.sent = self._at, self._at, 0

    def _enqueue(self, name: str, one: OpenRequest) -> None:
        books = self._ranks[one.rank]
        books.enqueue(name, one)
        if len(books.queue) == 1:
            self._forecast = None  # outdated: this rank's prompt rows make steps longer from now on
        elif self._forecast is not None:
            median = self._lengths.quantile(0.5, max(1, one.most - one.dealt), 0)
            self._forecast.add(one.rank, self._prompt(one, median))

    def _dequeue(self, name: str, one: OpenRequest) -> bool:
        """Take a request out of its rank's queue; return whether it was there."""
        books = self._ranks[one.rank]
        found = books.dequeue(name, self._at) is not None
        if found and not books.queue:
            self._forecast = None
        return found

    def _served(self, one: OpenRequest) -> None:
        """Note that a request waits no more."""
        self.waiting -= 1
        self.queued_tokens = max(0.0, self.queued_tokens - one.tokens) if self.waiting else 0.0  # float sums drift

    def _run_ahead(self, now: float) -> GangForecast:
        """Return a forecast of the queues of all ranks from now on."""
        for rank, books in enumerate(self._ranks):
            if (report := self._report(rank)) is not None:
                books.read(report)
        works = [books.work(self._chunk) for books in self._ranks]
        drift = Drift.of_gang([books.drift for books in self._ranks])
        speeds = PrefillSpeed.of_ranks(self._chunk, self._pace, self._row_s, works, drift)
        window, slots = self._shape.window, self._config.max_running_requests
        running = [one.length for books in self._ranks for one in books.running.values()]
        longest = max((one.length for one in self._open.values() if one.most > 1), default=1)
        per_s = self._rate.by_running(running, max(running, default=1), self._pace)
        later_per_s = self._rate.by_running(running, longest, self._pace)
        lived = sum(one.dealt for one in self._open.values())
        # Spread the lengths over the learnt distribution: with the mean for each, all requests would end at once.
        shares = (GOLDEN * at % 1.0 for at in range(1, 1 + len(self._open)))

        def left(one: OpenRequest) -> float:
            return self._lengths.quantile(next(shares), max(1, one.most - one.dealt), lived)

        forecasts = []
        for books, speed in zip(self._ranks, speeds, strict=True):
            each = per_s(max(1, len(books.running)))
            sizes = [(one.kv + window, left(one)) for one in books.running.values()]
            forecasts.append(
                RankForecast(
                    speed=speed,
                    slots=slots - len(sizes),
                    kv=self._kv_tokens - sum(kv for kv, _ in sizes),
                    spare=window,
                    per_s=later_per_s,
                    ends=[RunningRequest(more / each, kv + more, each) for kv, more in sizes],
                    clock=min(0.0, books.since - now) if books.queue else 0.0,
                    rows=sum(one.left for one in books.queue.values()),
                )
            )
        queues = [[self._prompt(one, left(one)) for one in books.queue.values()] for books in self._ranks]
        return GangForecast(forecasts, queues, now)

    def _prompt(self, one: OpenRequest, tokens: float) -> QueuedPrompt:
        """Return the forecast's record of a waiting request that is expected to get `tokens` more tokens."""
        return QueuedPrompt(one.length - one.left, one.left, one.kv + self._shape.window, max(0.0, tokens - 1))

    def _pass(self) -> None:
        """Count the time since the last call as time of the running requests."""
        now = self._clock()
        seconds, self._at = now - self._at, now
        if self._serving:
            self._rate.passed(seconds, self._running)

    def _run(self, one: OpenRequest, name: str) -> None:
        """Note that a request decodes from now on."""
        self._ranks[one.rank].running[name] = one
        self._running += 1
        if self._running == 1:
            self._forecast = None  # outdated: other rules hold for prompt rows while a request decodes

    def _run_no_more(self, one: OpenRequest, name: str) -> None:
        if self._ranks[one.rank].running.pop(name, None) is not None:
            self._running -= 1
            if not self._running:
                self._forecast = None  # outdated: other rules hold for prompt rows while none decodes
