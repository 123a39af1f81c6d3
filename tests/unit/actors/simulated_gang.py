"""A gang whose schedulers, caches, balancer and admission are the real ones; only the time of a step is made up."""

from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.actors.admission import Admission
from cluster.actors.balance import Balancer
from cluster.actors.messages import Overloaded
from cluster.actors.open_requests import QueueReport
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

BEAT_S = 0.75  # between two reports of a rank
ACCEPT = 2  # tokens that each step gives to a decoding request


@dataclass(frozen=True)
class Arrival:
    """A request that comes at `at`: prompt tokens, new tokens that it takes, and the most that it asks for."""

    at: float
    prompt: int
    tokens: int
    most: int = 0
    prefix: int = 0  # tokens at the start of the prompt that all requests with a prefix share


@dataclass
class Outcome:
    """What was expected of a request when it came, whether it would have been refused, and how long it waited."""

    arrival: Arrival
    rank: int
    expected: float
    refused: bool
    waited: float = -1.0


@dataclass
class _RankState:
    scheduler: Scheduler
    submitted: int = 0
    report: QueueReport | None = None
    busiest: int = 0
    prefilling: int = 0


@dataclass
class SimulatedGang:
    """`machine` says what a step takes; steps take `slower` times what was measured at start. With `admits_all` no
    request is turned away, so that the wait of those that would have been is seen too.
    """

    machine: Machine
    slower: float = 1.0
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
        self._beat = 0.0
        self._open: dict[str, Outcome] = {}
        self.outcomes: list[Outcome] = []

    def _scheduler(self) -> Scheduler:
        page, rows = self.config.page_size, self.config.max_running_requests
        table = PageTable(rows, self.kv_tokens + 512, page, torch.device("cpu"))
        cache = KVCache(self.kv_tokens // page, table, not self.config.disable_radix_cache)
        return Scheduler(self.resolved, cache, self.resolved.shape.window, self.pace)

    def run(self, arrivals: Row[Arrival], until: float = 1e9) -> list[Outcome]:
        """Serve the arrivals to their end, or `until`; returns what became of each."""
        coming = sorted(arrivals, key=lambda one: one.at)
        while (coming or self._open) and self.now < until:
            if not self._open and coming:
                self.now = max(self.now, coming[0].at)
            while coming and coming[0].at <= self.now:
                self._arrive(coming.pop(0))
            plans = [rank.scheduler.schedule(rank.busiest, rank.prefilling) for rank in self._ranks]
            ends = self.now + 1e-6 * self._step_us(plans)
            took = ends - self.now
            while coming and coming[0].at < ends:
                self.now = coming[0].at
                self._arrive(coming.pop(0))
            self.now = ends
            self._land(plans, took)
        return self.outcomes

    def _arrive(self, arrival: Arrival) -> None:
        number = len(self.outcomes)
        shared = [1 + i for i in range(arrival.prefix)]
        own = [1_000_000 + 100_003 * number + i for i in range(arrival.prompt - arrival.prefix)]
        params = RequestParams(max_tokens=arrival.most or arrival.tokens, seed=0)
        request = Request(str(number), tuple(shared + own), params)
        place = self.balancer.propose(request, self.admission.expected_new_tokens(request))
        expected, refused = (
            self.admission.expected_wait(arrival.prompt, place).seconds,
            self.admission.overload() is not None,
        )
        try:
            self.admission.check(request, place)
        except Overloaded:
            refused = True
        outcome = Outcome(arrival, place.rank, expected, refused)
        self.outcomes.append(outcome)
        if refused and not self.admits_all:
            return
        self.balancer.choose(request, self.admission.expected_new_tokens(request), place)
        self.admission.on_admitted(request, place)
        ids = list(request.prompt_token_ids)
        sequence = RequestState(request, FinishCheck(params, (), 64, None, ids), ids, len(ids), accepted=[0])
        self.admission.on_submitted(str(number))
        self._ranks[place.rank].submitted += 1
        self._ranks[place.rank].scheduler.waiting.append(sequence)
        self._open[str(number)] = outcome

    def _step_us(self, plans: Row[Schedule]) -> float:
        def of(plan: Schedule) -> float:
            committed = [sequence.committed for sequence, _ in plan.decodes]
            rows = plan.prompt_rows
            start = sum(chunk.start * (chunk.stop - chunk.start) for chunk in plan.chunks) / rows if rows else 0.0
            if not committed and not rows:
                return 0.0
            longest = max(committed, default=0)
            return self.machine.step(len(committed), longest, rows, int(start))

        return max(500.0, self.slower * max(map(of, plans)))

    def _land(self, plans: Row[Schedule], took: float) -> None:
        decode_us, rows = [plan.decode_us for plan in plans], [plan.prompt_rows for plan in plans]
        for at, (rank, plan) in enumerate(zip(self._ranks, plans, strict=True)):
            rank.busiest = max((us for other, us in enumerate(decode_us) if other != at), default=0)
            rank.prefilling = sum(count > 0 for other, count in enumerate(rows) if other != at)
            decoded = [(sequence, len(sequence.tokens)) for sequence, _ in plan.decodes]
            advance(plan, ACCEPT)
            rank.scheduler.learn(plan, max(decode_us), max(rows), 1e6 * took)
            for chunk in plan.chunks:
                if chunk.final:
                    self._given(rank, chunk.sequence, 1, 0)
            for sequence, before in decoded:
                self._given(rank, sequence, len(sequence.tokens) - before, 1)
        if self.now >= self._beat:
            self._beat = self.now + BEAT_S
            for rank in self._ranks:
                by_now = rank.scheduler.correction
                drift = Drift(by_now.decode_drift.value, by_now.prompt_drift.value, by_now.prefill_drift.value)
                rank.report = QueueReport(self.now, rank.scheduler.queued_tokens, rank.submitted, drift)

    def _given(self, rank: _RankState, sequence: RequestState, tokens: int, steps: int) -> None:
        name = sequence.request.request_id
        outcome = self._open[name]
        if outcome.waited < 0:
            outcome.waited = self.now - outcome.arrival.at
        self.balancer.on_tokens(name, tokens, steps)
        self.admission.on_tokens(name, tokens)
        if len(sequence.tokens) - sequence.prompt_len >= outcome.arrival.tokens:
            rank.scheduler.release(sequence)
            self.balancer.on_ended(name)
            self.admission.on_ended(name, stopped=outcome.arrival.most > outcome.arrival.tokens)
            del self._open[name]
