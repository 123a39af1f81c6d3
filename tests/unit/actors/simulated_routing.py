"""A simulation of routing policies under a skewed load. Ranks run in lockstep, so the slowest rank sets a step's time.

It simulates arrivals, routing, first-come-first-served admission, chunked prefill in the steps of decoding requests,
a radix cache per rank, and an accept length per request. A step's cost is a formula, not a measurement:
`STEP_S + max over ranks of (ROW_S * rows + KV_S * KV tokens read)`. The requests, their lengths and their accept
lengths are drawn once per seed, so every policy serves the same load. A policy knows only what a router knows: output
and accept lengths show only while tokens are generated.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.actors.balance import POLICIES, Balancer
from cluster.actors.open_requests import OpenRequest
from cluster.bench.report import mean, p99, ratio, records_table
from cluster.kv.radix import RadixTree
from cluster.request import Request, RequestParams

STEP_S = 6e-3  # fixed cost of a step
ROW_S = 25e-6  # cost of one row (a token in a forward)
KV_S = 20e-9  # cost of one KV token that one request reads in one step
BASELINE = "round_robin"
VOCABULARY = 50_000
LEARNING_RATE = 0.05  # weight of the latest request in the moving average of generated tokens, as in the router
FIRST_GUESS = 128.0  # initial value of that average


@dataclass(frozen=True, slots=True)
class Skew:
    """The load and the gang. `*_tokens` and `*_output` are lengths in tokens (least, most). `*_share` is a share of the
    requests. `*_odds` is the probability that a drafted level is accepted.
    """

    ranks: int = 4
    requests: int = 800
    arrivals_s: float = 40.0
    page_size: int = 16
    cached_pages: int = 2048
    chunk_rows: int = 512
    max_running: int = 64
    tree_nodes: int = 8
    num_steps: int = 4
    prefixes: int = 32
    prefix_tokens: tuple[int, int] = (256, 2048)
    own_tokens: tuple[int, int] = (16, 256)
    long_share: float = 0.05
    long_tokens: tuple[int, int] = (4096, 8192)
    chatty_share: float = 0.25
    short_output: tuple[int, int] = (8, 64)
    chatty_output: tuple[int, int] = (256, 768)
    hard_share: float = 0.4
    hard_odds: float = 0.15
    easy_odds: float = 0.8


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of the load: prompt, arrival (s), output length, and `odds`, the probability of accepting a level."""

    request: Request
    arrives: float
    output: int
    odds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one policy. `mean_s` and `p99_s`: seconds from a request's arrival to its end; `*_first_s`: to its
    first token. `imbalance`: rows of the busiest rank over the mean rows of a rank, summed over steps. `prefix_hits`:
    the share of prompt tokens found in a radix cache. `total_s`: duration of the simulated run.
    """

    policy: str
    mean_s: float
    p99_s: float
    mean_first_s: float
    p99_first_s: float
    imbalance: float
    prefix_hits: float
    total_s: float


def compare(seed: int, skew: Skew = Skew(), policies: Sequence[str] = POLICIES) -> list[Row]:
    """Simulate every policy on the same load; return a row for each, in order. The same seed gives the same rows."""
    jobs = load_of(seed, skew)
    return [_Gang(policy, skew).serve(jobs) for policy in policies]


def table_of(rows: Sequence[Row]) -> str:
    """Return the rows as text: times in seconds, and mean times relative to round robin if it is among the rows."""
    base = next((row.mean_s for row in rows if row.policy == BASELINE), 0.0)
    cells = [
        {
            "policy": row.policy,
            "mean s": row.mean_s,
            "p99 s": row.p99_s,
            "of round robin": ratio(row.mean_s, base) or None,
            "mean first s": f"{row.mean_first_s:.3f}",
            "p99 first s": f"{row.p99_first_s:.3f}",
            "slowest / mean rows": row.imbalance,
            "prefix hits": f"{row.prefix_hits:.0%}",
        }
        for row in rows
    ]
    return (
        f"routing, simulated: a step costs {STEP_S * 1e3:.0f} ms + {ROW_S * 1e6:.0f} us a row + "
        f"{KV_S * 1e9:.0f} ns a KV token, of the slowest rank\n{records_table(cells)}"
    )


def load_of(seed: int, skew: Skew) -> list[SimulatedRequest]:
    """Return the requests in order of arrival. Prompts share prefixes of uneven popularity; a few prompts are long.
    Outputs are short or long, accept lengths low or high.
    """
    draw = random.Random(seed)
    prefixes = [_random_tokens(draw, draw.randint(*skew.prefix_tokens)) for _ in range(skew.prefixes)]
    popularity = [1.0 / (index + 1) for index in range(skew.prefixes)]
    clock, jobs = 0.0, []
    for index in range(skew.requests):
        clock += draw.expovariate(skew.arrivals_s)
        if draw.random() < skew.long_share:
            prompt = _random_tokens(draw, draw.randint(*skew.long_tokens))
        else:
            [prefix] = draw.choices(prefixes, popularity)
            prompt = prefix + _random_tokens(draw, draw.randint(*skew.own_tokens))
        output = draw.randint(*(skew.chatty_output if draw.random() < skew.chatty_share else skew.short_output))
        odds = skew.hard_odds if draw.random() < skew.hard_share else skew.easy_odds
        request = Request(f"r{index}", prompt, RequestParams(max_tokens=skew.chatty_output[1]))
        jobs.append(SimulatedRequest(request, clock, output, odds, draw.getrandbits(32)))
    return jobs


def _random_tokens(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(VOCABULARY), k=length))


@dataclass(slots=True)
class _Running:
    job: SimulatedRequest
    uncomputed_rows: int  # prompt rows still to compute
    cached: int
    levels: random.Random
    generated_tokens: int = 0

    def accept_len(self, num_steps: int) -> int:
        """Return the tokens that the next step commits, bonus included. They depend on the seed, not on the policy."""
        depth = 0
        while depth < num_steps and self.levels.random() < self.job.odds:
            depth += 1
        return depth + 1


@dataclass(slots=True)
class _SimulatedRank:
    cache: RadixTree
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)


class _Gang:
    """Ranks in lockstep behind one balancer."""

    def __init__(self, policy: str, skew: Skew) -> None:
        self._skew = skew
        self._balancer = Balancer(
            policy,
            skew.ranks,
            skew.page_size,
            step_rows=skew.tree_nodes,
            chunk_rows=skew.chunk_rows,
            index_pages=skew.cached_pages,
        )
        self._open: dict[str, OpenRequest] = {}
        self._ranks = [_SimulatedRank(RadixTree(skew.page_size)) for _ in range(skew.ranks)]
        self._mean_new = FIRST_GUESS
        self._first_token_s: list[float] = []
        self._request_s: list[float] = []
        self._slowest_rows = self._mean_rows = 0.0
        self._prompt_tokens = self._cached_tokens = 0
        self._page_count = 0

    def serve(self, jobs: Sequence[SimulatedRequest]) -> Row:
        """Simulate until all jobs have ended, and return the figures."""
        clock, pending_jobs = 0.0, deque(jobs)
        while pending_jobs or any(rank.waiting or rank.running for rank in self._ranks):
            # All ranks are idle: advance the clock to the next arrival.
            if pending_jobs and not any(rank.waiting or rank.running for rank in self._ranks):
                clock = max(clock, pending_jobs[0].arrives)
            while pending_jobs and pending_jobs[0].arrives <= clock:
                job = pending_jobs.popleft()
                expected = min(self._mean_new, job.request.params.max_tokens)
                opened = self._open[job.request.request_id] = OpenRequest(job.request)
                self._ranks[self._balancer.choose(opened, expected)].waiting.append(job)
            clock = self._step(clock)
        return Row(
            self._balancer.policy,
            mean(self._request_s),
            p99(self._request_s),
            mean(self._first_token_s),
            p99(self._first_token_s),
            ratio(self._slowest_rows, self._mean_rows),
            ratio(self._cached_tokens, self._prompt_tokens),
            clock,
        )

    def _step(self, clock: float) -> float:
        """Simulate one step of every rank; return the time at which it ends."""
        rows, cost_s, chunks_of_ranks = [], [], []
        for rank in self._ranks:
            self._admit(rank)
            budget, chunks = self._skew.chunk_rows, []
            for running in rank.running:
                chunk = min(running.uncomputed_rows, budget)
                budget -= chunk
                chunks.append(chunk)
            decoding = [running for running in rank.running if not running.uncomputed_rows]
            rows.append(len(decoding) * self._skew.tree_nodes + sum(chunks))
            kv_tokens_read = sum(
                len(running.job.request.prompt_token_ids) + running.generated_tokens for running in decoding
            )
            cost_s.append(ROW_S * rows[-1] + KV_S * kv_tokens_read)
            chunks_of_ranks.append(chunks)
        clock += STEP_S + max(cost_s)
        self._slowest_rows += max(rows)
        self._mean_rows += sum(rows) / len(rows)
        for rank, chunks in zip(self._ranks, chunks_of_ranks, strict=True):
            for running, chunk in list(zip(rank.running, chunks, strict=True)):
                self._advance(rank, running, chunk, clock)
        return clock

    def _admit(self, rank: _SimulatedRank) -> None:
        while rank.waiting and len(rank.running) < self._skew.max_running:
            job = rank.waiting.popleft()
            prompt = job.request.prompt_token_ids
            cached = self._skew.page_size * len(rank.cache.match(prompt))
            self._prompt_tokens += len(prompt)
            self._cached_tokens += cached
            rank.running.append(_Running(job, len(prompt) - cached, cached, random.Random(job.seed)))

    def _advance(self, rank: _SimulatedRank, running: _Running, chunk: int, clock: float) -> None:
        name, decoding = running.job.request.request_id, not running.uncomputed_rows
        running.uncomputed_rows -= chunk
        if running.uncomputed_rows:
            return
        if decoding:
            count = min(running.accept_len(self._skew.num_steps), running.job.output - running.generated_tokens)
        else:
            count = 1
            self._first_token_s.append(clock - running.job.arrives)
            self._balancer.on_first_output(name, running.cached)
        running.generated_tokens += count
        self._open[name].sent_tokens += [0] * count
        self._balancer.on_tokens(name, count, int(decoding))
        if running.generated_tokens >= running.job.output:
            self._request_s.append(clock - running.job.arrives)
            self._mean_new += LEARNING_RATE * (running.generated_tokens - self._mean_new)
            rank.running.remove(running)
            self._balancer.on_ended(name)
            del self._open[name]
            self._cache_prompt(rank.cache, running.job.request.prompt_token_ids)

    def _cache_prompt(self, cache: RadixTree, prompt: Sequence[int]) -> None:
        count = (len(prompt) - 1) // self._skew.page_size
        cache.insert(prompt, range(self._page_count, self._page_count + count))
        self._page_count += count
        cache.evict(cache.pages - self._skew.cached_pages)
