"""Admission to the queue of a gang: which requests may enter, and after what time a refused client should retry.

A request is refused if the queue is full or its expected wait for the first token is too long. If step times were
measured, a wait of at most `SHORT_WAIT_S` is never refused. To predict the wait, `forecast.RankForecast` simulates the
queue of the rank that the request would go to, with the step times that the ranks measured at start. Heartbeats report
how many prompt tokens a rank has not computed yet, and how much its present step times differ from the measured ones.
How long running requests go on is predicted from two learnt figures: tokens per request
(`output_lengths.OutputLengths`) and tokens per second (`token_rate.TokenRate`).

This module uses neither Ray nor an event loop; the caller passes the clock.
"""

import time
from collections.abc import Callable

from cluster.actors.forecast import ExpectedWait, GangForecast, QueuedPrompt, RankForecast, RunningRequest
from cluster.actors.messages import Overloaded
from cluster.actors.open_requests import OpenRequest, QueueReport, RankChoice, RankRequests
from cluster.actors.output_lengths import OutputLengths
from cluster.actors.prefill_speed import Drift, PrefillSpeed
from cluster.actors.token_rate import TokenRate
from cluster.config.resolved import ResolvedSettings
from cluster.observability.step_times import StepTimes
from cluster.request import Request

# A wait is not too long if it is at most this, or if the part of it that earlier requests cause is at most this.
SHORT_WAIT_S = 1.0
HEADROOM = 0.7  # share of max_queue_wait_s that an expected wait may take, so that 99 of 100 real waits stay within it
FORECAST_MAX_AGE_S = 0.1  # how long a forecast is reused, because making one costs a millisecond per rank
# Only prompts of at least this many rows are learnt from: a shorter one takes about one step, whatever its size.
MIN_LEARNING_ROWS = 64
LEARNING_RATE = 0.2  # weight of the latest prompt in the mean time per row
# With more ranks than this a forecast is reused for longer, so that its cost per second does not grow.
RANKS_PER_MAX_AGE = 8
GOLDEN_RATIO = 0.6180339887498949  # the fractional parts of the multiples of this number spread evenly over [0, 1)
MIN_REQUEST_TOKENS = 1.0  # tokens of the request for which `overload` checks admission
ONLY_RANK = RankChoice()  # the choice in a gang of one rank without cached prefixes


class Admission:
    """Admits or refuses the requests of one gang, and tracks them. A request is "waiting" before its first token and
    "running" after it.
    """

    def __init__(
        self,
        resolved: ResolvedSettings,
        clock: Callable[[], float] = time.monotonic,
        queue_report: Callable[[int], QueueReport | None] = lambda rank: None,
    ) -> None:
        """`queue_report` returns the latest report of a dp rank, or None if there was none yet."""
        config = resolved.settings
        self._config, self._shape, self._chunk_rows = config, resolved.shape, resolved.chunk_rows
        self._clock, self._queue_report_of = clock, queue_report
        self._ranks = [RankRequests() for _ in range(config.attn_dp_size)]
        self._open: dict[str, OpenRequest] = {}
        self._kv_tokens = 0
        self._step_times: StepTimes | None = None
        # Seconds per prompt row, learnt from long prompts; used if step times were not measured.
        self._seconds_per_row = 0.0
        self.waiting = 0  # requests
        self.queued_tokens = 0.0  # the tokens of waiting requests: prompts and expected new tokens
        self._forecast: GangForecast | None = None
        self._output_lengths = OutputLengths()
        self._token_rate = TokenRate(self._shape.drafted_shape.num_steps, config.attn_dp_size)
        self._running = 0  # requests
        self._last_time_at = clock()
        self._serving = True

    def expected_new_tokens(self, request: Request) -> float:
        """Return the expected number of new tokens of a request."""
        return self._output_lengths.expected(request.params.max_tokens)

    def check(self, request: Request, choice: RankChoice = ONLY_RANK) -> None:
        """Raise if a request that would go to `choice` must be refused.

        Raises:
            Overloaded: with the expected wait, for Retry-After.
        """
        tokens = len(request.prompt_token_ids) + self.expected_new_tokens(request)
        if (refusal := self._refusal(self.expected_wait(len(request.prompt_token_ids), choice), tokens)) is not None:
            raise refusal

    def overload(self) -> Overloaded | None:
        """Return why even the shortest request would be refused now on every rank; None if it would be admitted."""
        return self._refusal(
            min(self.expected_wait(1, RankChoice(rank)) for rank in range(len(self._ranks))), MIN_REQUEST_TOKENS
        )

    def expected_wait(self, prompt_tokens: int, choice: RankChoice = ONLY_RANK) -> ExpectedWait:
        """Return the expected wait of a new request with `prompt_tokens` prompt tokens; no wait while the gang is
        down.
        """
        if not self._serving:
            return ExpectedWait(0.0, 0.0)
        now = self._clock()
        if self._forecast is None or now - self._forecast.made_at > FORECAST_MAX_AGE_S * max(
            1.0, len(self._ranks) / RANKS_PER_MAX_AGE
        ):
            self._forecast = self._new_forecast(now)
        newcomer = QueuedPrompt(
            choice.cached_tokens,
            prompt_tokens - choice.cached_tokens,
            prompt_tokens - choice.shared_tokens + self._shape.window,
            0.0,
        )
        return self._forecast.wait(choice.rank, newcomer, now)

    def _refusal(self, wait: ExpectedWait, tokens: float) -> Overloaded | None:
        """Return why a request with `tokens` tokens (prompt and new) and this expected wait is refused, or None."""
        config, waiting, seconds = self._config, self.waiting, wait.seconds
        if seconds <= SHORT_WAIT_S and self._step_times is not None and self._serving:
            return None
        if waiting >= config.max_queued_requests:
            return Overloaded(f"{waiting} requests wait (max_queued_requests is {config.max_queued_requests})", seconds)
        if waiting and self.queued_tokens + tokens > config.max_queued_tokens:
            message = (
                f"the queue holds {self.queued_tokens:.0f} tokens (max_queued_tokens is {config.max_queued_tokens})"
            )
            return Overloaded(message, seconds)
        limit = max(SHORT_WAIT_S, HEADROOM * config.max_queue_wait_s)
        # A long prompt that no other request delays would not be faster later, so it is not refused.
        if seconds > limit and wait.delay_by_others > SHORT_WAIT_S:
            wait_text = f"the first token would come after about {seconds:.1f} s; the limit is {limit:.3g} s"
            limit_text = (
                f"{HEADROOM:g} of max_queue_wait_s" if limit > SHORT_WAIT_S else "the least for any max_queue_wait_s"
            )
            return Overloaded(f"{wait_text}, {limit_text} ({config.max_queue_wait_s:g} s)", seconds)
        return None

    def on_admitted(self, open_request: OpenRequest) -> None:
        """Record that a request was admitted; it waits at its rank for its first token."""
        self._advance_clock()
        self._open[open_request.name] = open_request
        self.waiting += 1
        open_request.waiting_tokens = open_request.length + self.expected_new_tokens(open_request.request)
        self.queued_tokens += open_request.waiting_tokens
        self._enqueue(open_request)

    def on_submitted(self, request_id: str) -> None:
        """Record that a request was submitted to its rank. From now on the rank's reports may count it."""
        if (open_request := self._open.get(request_id)) is not None:
            rank_requests = self._ranks[open_request.choice.rank]
            rank_requests.submitted += 1
            open_request.submission_number = rank_requests.submitted

    def on_resubmitted(self, request_id: str) -> None:
        """Record that an open request was submitted again after a restart, perhaps to another rank. The gang's caches
        are empty, so the request waits for its whole prompt.
        """
        open_request = self._open.get(request_id)
        if open_request is None:
            return
        self._advance_clock()
        for rank_requests in self._ranks:
            self._dequeue(request_id, rank_requests)
            self._stop_running(request_id, rank_requests)
        self._enqueue(open_request)

    def on_tokens(self, request_id: str, tokens: int) -> None:
        """Record that a request got `tokens` tokens. Its first tokens show that its prompt is computed."""
        self._advance_clock()
        open_request = self._open.get(request_id)
        if open_request is None:
            return
        rank_requests = self._ranks[open_request.choice.rank]
        # Learn only from the first request of the queue: since `progress_since` the rank computed only its rows.
        if open_request.uncomputed_tokens >= MIN_LEARNING_ROWS and next(iter(rank_requests.queue), None) == request_id:
            seconds_per_row = (self._last_time_at - rank_requests.progress_since) / open_request.uncomputed_tokens
            self._seconds_per_row += (LEARNING_RATE if self._seconds_per_row else 1.0) * (
                seconds_per_row - self._seconds_per_row
            )
        if self._dequeue(request_id, rank_requests):
            self._leave_waiting(open_request)
            open_request.uncomputed_tokens = 0
            self._start_running(open_request, rank_requests)
        else:
            self._token_rate.on_tokens(tokens)

    def on_ended(self, request_id: str, stopped: bool) -> None:
        """Record that a request is over. `stopped`: the model ended it, not its token limit or a client that left."""
        self._advance_clock()
        open_request = self._open.pop(request_id, None)
        if open_request is None:
            return
        rank_requests = self._ranks[open_request.choice.rank]
        self._dequeue(request_id, rank_requests)
        self._stop_running(request_id, rank_requests)
        self._leave_waiting(open_request)
        self._output_lengths.on_ended(len(open_request.sent_tokens), stopped)

    def on_gang_down(self) -> None:
        """Record that the gang is down: until `on_gang_up`, time does not count and no wait is estimated."""
        self._advance_clock()
        self._serving = False

    def on_gang_up(self, kv_tokens: int, step_times: StepTimes | None = None) -> None:
        """Record that the gang serves, for the first time or again. `kv_tokens` is the KV capacity of one rank;
        `step_times` holds the measured step times, or None if steps are not measured.
        """
        self._kv_tokens, self._step_times = kv_tokens, step_times
        self._last_time_at = self._clock()
        self._serving = True
        self._forecast = None
        for rank_requests in self._ranks:
            rank_requests.progress_since, rank_requests.last_report_at, rank_requests.submitted = (
                self._last_time_at,
                self._last_time_at,
                0,
            )

    def _enqueue(self, open_request: OpenRequest) -> None:
        choice, rank_requests = open_request.choice, self._ranks[open_request.choice.rank]
        open_request.uncomputed_tokens = open_request.length - choice.cached_tokens
        open_request.submission_number = 0
        rank_requests.enqueue(open_request, self._last_time_at)
        if len(rank_requests.queue) == 1:
            self._forecast = None  # outdated: from now on this rank's prompt rows make steps longer
        elif self._forecast is not None:
            median = self._output_lengths.quantile(0.5, open_request.remaining_tokens, 0)
            self._forecast.add(choice.rank, self._queued_prompt(open_request, median))

    def _dequeue(self, request_id: str, rank_requests: RankRequests) -> bool:
        """Take a request out of a rank's queue; return whether the queue held it."""
        found = rank_requests.dequeue(request_id, self._last_time_at) is not None
        if found and not rank_requests.queue:
            self._forecast = None
        return found

    def _leave_waiting(self, open_request: OpenRequest) -> None:
        """Record that a request has stopped waiting, unless this was recorded already."""
        if not open_request.waiting_tokens:
            return
        self.waiting -= 1
        # Rounding errors add up in a sum of floats, so reset it when no request waits.
        self.queued_tokens = max(0.0, self.queued_tokens - open_request.waiting_tokens) if self.waiting else 0.0
        open_request.waiting_tokens = 0.0

    def _new_forecast(self, now: float) -> GangForecast:
        """Return a forecast of the queues of all ranks from now on."""
        for rank, rank_requests in enumerate(self._ranks):
            if (report := self._queue_report_of(rank)) is not None:
                rank_requests.apply_report(report)
        works = [rank_requests.work(self._chunk_rows) for rank_requests in self._ranks]
        drift = Drift.of_gang([rank_requests.drift for rank_requests in self._ranks])
        speeds = PrefillSpeed.of_ranks(self._chunk_rows, self._step_times, self._seconds_per_row, works, drift)
        window, slots = self._shape.window, self._config.max_running_requests
        running = [request.length for rank_requests in self._ranks for request in rank_requests.running.values()]
        longest = max((r.length for r in self._open.values() if r.request.params.max_tokens > 1), default=1)
        rate_by_running = self._token_rate.rates_by_running(running, max(running, default=1), self._step_times)
        later_rate_by_running = self._token_rate.rates_by_running(running, longest, self._step_times)
        open_tokens = sum(len(request.sent_tokens) for request in self._open.values())
        # Spread the lengths over the learnt distribution: if each had the mean length, all would end at once.
        shares = (GOLDEN_RATIO * index % 1.0 for index in range(1, 1 + len(self._open)))

        def remaining_tokens(request: OpenRequest) -> float:
            return self._output_lengths.quantile(next(shares), request.remaining_tokens, open_tokens)

        forecasts = []
        for rank_requests, speed in zip(self._ranks, speeds, strict=True):
            tokens_per_s = rate_by_running(max(1, len(rank_requests.running)))
            sizes = [
                (request.unshared_kv_tokens + window, remaining_tokens(request))
                for request in rank_requests.running.values()
            ]
            forecasts.append(
                RankForecast(
                    speed=speed,
                    slots=slots - len(sizes),
                    free_kv_tokens=self._kv_tokens - sum(kv_tokens for kv_tokens, _ in sizes),
                    kv_reserve=window,
                    tokens_per_s=later_rate_by_running,
                    running=[
                        RunningRequest(new_tokens / tokens_per_s, kv_tokens + new_tokens, tokens_per_s)
                        for kv_tokens, new_tokens in sizes
                    ],
                    computed_at=min(0.0, rank_requests.progress_since - now) if rank_requests.queue else 0.0,
                    queued_rows=sum(request.uncomputed_tokens for request in rank_requests.queue.values()),
                )
            )
        queues = [
            [self._queued_prompt(request, remaining_tokens(request)) for request in rank_requests.queue.values()]
            for rank_requests in self._ranks
        ]
        return GangForecast(forecasts, queues, now)

    def _queued_prompt(self, request: OpenRequest, tokens: float) -> QueuedPrompt:
        """Return the forecast's record of a waiting request that is expected to get `tokens` more tokens."""
        return QueuedPrompt(
            request.length - request.uncomputed_tokens,
            request.uncomputed_tokens,
            request.unshared_kv_tokens + self._shape.window,
            max(0.0, tokens - 1),
        )

    def _advance_clock(self) -> None:
        """Count the time since the last call as time in which the running requests ran, if the gang serves."""
        now = self._clock()
        seconds, self._last_time_at = now - self._last_time_at, now
        if self._serving:
            self._token_rate.on_time_passed(seconds, self._running)

    def _start_running(self, request: OpenRequest, rank_requests: RankRequests) -> None:
        """Record that a request decodes from now on."""
        rank_requests.running[request.name] = request
        self._running += 1
        if self._running == 1:
            self._forecast = None  # outdated: while a request decodes, a step has fewer prompt rows

    def _stop_running(self, request_id: str, rank_requests: RankRequests) -> None:
        if rank_requests.running.pop(request_id, None) is not None:
            self._running -= 1
            if not self._running:
                self._forecast = None  # outdated: while no request decodes, a step has more prompt rows
