"""A simulated gang. Schedulers, KV caches, balancer and admission are the product's; only step times are invented."""

from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.actors.admission import Admission
from cluster.actors.balance import Balancer
from cluster.actors.messages import Overloaded
from cluster.actors.open_requests import OpenRequest, QueueReport
from cluster.actors.prefill_speed import Drift
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.engine.finish import FinishCheck
from cluster.engine.request_state import RequestState
from cluster.engine.schedule import Schedule
from cluster.engine.scheduler import Scheduler
from cluster.kv.cache import KVCache
from cluster.kv.page_table import PageTable
from cluster.observability.step_times import StepTimes
from cluster.request import Request, RequestParams
from tests.unit.engine.test_prefill_share import Machine
from tests.unit.engine.test_scheduler import advance

REPORT_PERIOD_S = 0.75  # seconds between two queue reports of a rank
ACCEPT_LEN = 2  # tokens that a decoding request gets in each step


@dataclass(frozen=True)
class Arrival:
    """A request that arrives at `arrives_at` (seconds). `prompt` is its number of prompt tokens, `tokens` the number of
    tokens that it generates, `max_tokens` its limit on generated tokens (0: the limit is `tokens`).
    """

    arrives_at: float
    prompt: int
    tokens: int
    max_tokens: int = 0
    prefix: int = 0  # tokens at the start of the prompt that all requests with a prefix share


@dataclass
class Outcome:
    """The outcome of one request. `expected_wait_s` is the wait that admission expected when the request arrived.
    `refused`: admission refused it. `wait_s` is its real wait for the first token, -1.0 before that token.
    """

    arrival: Arrival
    rank: int
    expected_wait_s: float
    refused: bool
    wait_s: float = -1.0


@dataclass
class _RankState:
    scheduler: Scheduler
    submitted: int = 0
    report: QueueReport | None = None
    max_peer_decode_us: int = 0
    prefilling_peers: int = 0


@dataclass
class SimulatedGang:
    """A gang on a simulated machine. `machine` gives the step times that the gang measures at start; its real steps
    take `slowdown` times as long. Without `measured`, admission gets no step times. With `admits_all` the gang serves
    refused requests too, so that their real waits are known.
    """

    machine: Machine
    slowdown: float = 1.0
    kv_tokens: int = 200_000
    settings: dict[str, Any] = field(default_factory=dict)
    admits_all: bool = True
    measured: bool = True
    now: float = 0.0

    def __post_init__(self) -> None:
        self.config = EngineConfig.model_validate(
            {
                "model_path": "m",
                "speculative_draft_model_path": "d",
                "speculative_num_steps": self.machine.tree - 1,
                "max_queued_tokens": 1 << 30,
                "max_queued_requests": 1 << 30,
                "tp_size": self.settings.get("attn_dp_size", 1),
                **self.settings,
            }
        )
        self.resolved = ResolvedSettings.from_settings(self.config)
        groups, chunk = self.config.attn_dp_size, self.config.chunked_prefill_size
        self.pace: StepTimes = self.machine.pace(self.config.prefill_share, chunk, groups)
        self.balancer = Balancer.of(self.resolved)
        self.balancer.on_restart(self.kv_tokens // self.config.page_size)
        self.admission = Admission(self.resolved, lambda: self.now, lambda rank: self._ranks[rank].report)
        self.admission.on_gang_up(self.kv_tokens, self.pace if self.measured else None)
        self._ranks = [_RankState(self._scheduler()) for _ in range(groups)]
        self._next_report_at = 0.0
        self._open: dict[str, tuple[Outcome, OpenRequest]] = {}
        self.outcomes: list[Outcome] = []

    def _scheduler(self) -> Scheduler:
        page, rows = self.config.page_size, self.config.max_running_requests
        table = PageTable(rows, self.kv_tokens + 512, page, torch.device("cpu"))
        cache = KVCache(self.kv_tokens // page, table, not self.config.disable_radix_cache)
        return Scheduler(self.resolved, cache, self.resolved.shape.window, self.pace)

    def run(self, arrivals: Row[Arrival], until: float = 1e9) -> list[Outcome]:
        """Serve the arrivals until all have ended or the clock reaches `until`; return the outcomes of all requests."""
        pending_arrivals = sorted(arrivals, key=lambda arrival: arrival.arrives_at)
        while (pending_arrivals or self._open) and self.now < until:
            if not self._open and pending_arrivals:
                self.now = max(self.now, pending_arrivals[0].arrives_at)
            while pending_arrivals and pending_arrivals[0].arrives_at <= self.now:
                self._arrive(pending_arrivals.pop(0))
            plans = [rank.scheduler.schedule(rank.max_peer_decode_us, rank.prefilling_peers) for rank in self._ranks]
            step_ends_at = self.now + 1e-6 * self._step_us(plans)
            step_s = step_ends_at - self.now
            while pending_arrivals and pending_arrivals[0].arrives_at < step_ends_at:
                self.now = pending_arrivals[0].arrives_at
                self._arrive(pending_arrivals.pop(0))
            self.now = step_ends_at
            self._end_step(plans, step_s)
        return self.outcomes

    def _arrive(self, arrival: Arrival) -> None:
        number = len(self.outcomes)
        shared_ids = [1 + i for i in range(arrival.prefix)]
        own_ids = [1_000_000 + 100_003 * number + i for i in range(arrival.prompt - arrival.prefix)]
        params = RequestParams(max_tokens=arrival.max_tokens or arrival.tokens, seed=0)
        request = Request(str(number), tuple(shared_ids + own_ids), params)
        choice = self.balancer.propose(request, self.admission.expected_new_tokens(request))
        expected_wait_s, refused = (
            self.admission.expected_wait(arrival.prompt, choice).seconds,
            self.admission.overload() is not None,
        )
        try:
            self.admission.check(request, choice)
        except Overloaded:
            refused = True
        outcome = Outcome(arrival, choice.rank, expected_wait_s, refused)
        self.outcomes.append(outcome)
        if refused and not self.admits_all:
            return
        open_request = OpenRequest(request)
        self.balancer.choose(open_request, self.admission.expected_new_tokens(request), choice)
        self.admission.on_admitted(open_request)
        ids = list(request.prompt_token_ids)
        sequence = RequestState(request, FinishCheck(params, (), 64, None, ids), ids, len(ids), accepted=[0])
        self.admission.on_submitted(str(number))
        self._ranks[choice.rank].submitted += 1
        self._ranks[choice.rank].scheduler.waiting.append(sequence)
        self._open[str(number)] = (outcome, open_request)

    def _step_us(self, plans: Row[Schedule]) -> float:
        def step_us_of(plan: Schedule) -> float:
            committed = [sequence.committed for sequence, _ in plan.decodes]
            rows = plan.prompt_rows
            start = sum(chunk.start * (chunk.stop - chunk.start) for chunk in plan.chunks) / rows if rows else 0.0
            if not committed and not rows:
                return 0.0
            longest = max(committed, default=0)
            return self.machine.step(len(committed), longest, rows, int(start))

        return max(500.0, self.slowdown * max(map(step_us_of, plans)))

    def _end_step(self, plans: Row[Schedule], step_s: float) -> None:
        decode_us, rows = [plan.decode_us for plan in plans], [plan.prompt_rows for plan in plans]
        for rank_index, (rank, plan) in enumerate(zip(self._ranks, plans, strict=True)):
            rank.max_peer_decode_us = max(
                (us for peer_index, us in enumerate(decode_us) if peer_index != rank_index), default=0
            )
            rank.prefilling_peers = sum(count > 0 for peer_index, count in enumerate(rows) if peer_index != rank_index)
            decoded = [(sequence, len(sequence.tokens)) for sequence, _ in plan.decodes]
            advance(plan, ACCEPT_LEN)
            rank.scheduler.learn(plan, max(decode_us), max(rows), 1e6 * step_s)
            for chunk in plan.chunks:
                if chunk.final:
                    self._on_tokens(rank, chunk.sequence, 1, 0)
            for sequence, token_count_before in decoded:
                self._on_tokens(rank, sequence, len(sequence.tokens) - token_count_before, 1)
        if self.now >= self._next_report_at:
            self._next_report_at = self.now + REPORT_PERIOD_S
            for rank in self._ranks:
                correction = rank.scheduler.correction
                drift = Drift(
                    correction.decode_drift.value, correction.prompt_drift.value, correction.prefill_drift.value
                )
                rank.report = QueueReport(self.now, rank.scheduler.queued_tokens, rank.submitted, drift)

    def _on_tokens(self, rank: _RankState, sequence: RequestState, tokens: int, steps: int) -> None:
        name = sequence.request.request_id
        outcome, open_request = self._open[name]
        if outcome.wait_s < 0:
            outcome.wait_s = self.now - outcome.arrival.arrives_at
        open_request.sent_tokens += [0] * tokens
        self.balancer.on_tokens(name, tokens, steps)
        self.admission.on_tokens(name, tokens)
        if len(sequence.tokens) - sequence.prompt_len >= outcome.arrival.tokens:
            rank.scheduler.release(sequence)
            self.balancer.on_ended(name)
            self.admission.on_ended(name, stopped=outcome.arrival.max_tokens > outcome.arrival.tokens)
            del self._open[name]
