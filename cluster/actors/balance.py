"""Which data-parallel rank takes a request. Plain bookkeeping: no clock, no Ray, the same answers in the same order.

All ranks of a gang step together, so a step lasts as long as its slowest rank's. `expected_load` sends a request where
it adds least to the sum, over the steps to come, of the slowest rank's work. Work is counted in rows of the model: a
prompt token not yet computed is one row; a running request is `step_rows` rows in every step it still needs, and it
needs its expected tokens divided by its accept length; a KV token is read once per step, for `KV_READ` of a row. A rank
that holds pages of the prompt is spared their rows, which is all there is to prefix affinity. Steps to come are split
at `HORIZON`, so that many short requests and one long one are not taken for the same load. The slowest rank is a
4-norm over the ranks, a soft maximum: the second slowest counts a little, for it may yet become the slowest.

The other policies are SGLang's: `round_robin`, `total_requests`, and `total_tokens` (ties go to fewer requests).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from cluster.actors.prefixes import PrefixIndex, chain_of
from cluster.config import EngineConfig, tree_shape
from cluster.request import Request

POLICIES = ("expected_load", "round_robin", "total_tokens", "total_requests")
UNIT = 1024  # work is kept in whole parts of a row, so that what is added and taken away cancels exactly
KV_READ = 1 / 1024  # reading one KV token in one step, in rows
HORIZON = (8, 32, 128, 512)  # steps ahead at which the future is split; the last part has no end
PARTS = len(HORIZON) + 1
RENEWAL = 4  # steps of a request between two estimates of its remaining work
PRIOR_STEPS = 4  # a request's own accept length counts as much as the gang's mean after this many steps
MEMORY = 1 / 256  # weight of one step in the gang's mean accept length
UNBOUNDED = 1 << 30

Work = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank has been sent and has not ended, by the router's books.

    `tokens` are prompt and generated tokens, `queued_tokens` those of prompts not yet computed, `work` the expected
    work of running requests in `UNIT` parts of a row for each part of `HORIZON`, `pages` the indexed prefix pages.
    """

    requests: int = 0
    tokens: int = 0
    queued_tokens: int = 0
    work: Work = (0,) * PARTS
    pages: int = 0


@dataclass(slots=True)
class _Open:
    """One request on its rank. `queued` counts prompt tokens to compute, `expected` the new tokens it may give and
    `most` those it is allowed; `steps` had been taken when `work` was estimated, `since` were taken after. `arrived` is
    its prompt when it first came, `tokens` since its last move.
    """

    rank: int
    arrived: tuple[int, ...]
    tokens: tuple[int, ...]
    chain: tuple[int, ...]
    queued: int
    expected: float
    most: int
    new: int = 0
    steps: int = 0
    since: int = 0
    work: Work = ()


@dataclass(slots=True)
class _Rank:
    """Running sums over the open requests of one rank."""

    index: PrefixIndex
    requests: int = 0
    tokens: int = 0
    queued: int = 0
    work: list[int] = field(default_factory=lambda: [0] * PARTS)


class Balancer:
    """Chooses ranks and keeps the books: choose -> started -> progressed ... -> ended; `restarted` when a gang was.

    Calls about requests that are not open change nothing, so late outputs and double ends are harmless.
    """

    def __init__(
        self,
        policy: str,
        dp_size: int,
        page_size: int,
        *,
        step_rows: int = 1,
        chunk_rows: int = 512,
        index_pages: int = 32768,
    ) -> None:
        """`step_rows` is N, the rows of one decoding request in a step; `chunk_rows` the prompt rows of a rank in one.

        `index_pages` bounds the prefix index of each rank (about 150 bytes a page); best its KV pages. 0 forgets all.

        Raises:
            ValueError: a policy that does not exist.
        """
        if policy not in POLICIES:
            raise ValueError(f"routing_policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
        self.policy, self.dp_size, self.page_size = policy, dp_size, page_size
        self._step_rows, self._chunk_rows = step_rows, chunk_rows
        self._ranks = [_Rank(PrefixIndex(index_pages)) for _ in range(dp_size)]
        self._open: dict[str, _Open] = {}
        self._turn = 0
        self._accept = 0.0  # the gang's mean accept length; 0.0 before the first step

    @classmethod
    def of(cls, config: EngineConfig, index_pages: int | None = None) -> Self:
        """The balancer of a gang with these settings."""
        chunk = config.chunked_prefill_size if config.chunked_prefill_size > 0 else UNBOUNDED
        pages = 0 if config.disable_radix_cache else 32768 if index_pages is None else index_pages
        rows = tree_shape(config).num_draft_tokens
        size = (config.attn_dp_size, config.page_size)
        return cls(config.routing_policy, *size, step_rows=rows, chunk_rows=chunk, index_pages=pages)

    def choose(self, request: Request, expected_new: float) -> int:
        """The dp rank for `request`, which is counted as queued there; it may give `expected_new` more tokens.

        A request id that is open is moved: its old place is forgotten.

        Raises:
            ValueError: `routed_dp_rank` is no rank; nothing is changed then.
        """
        pinned = request.routed_dp_rank
        if pinned is not None and not 0 <= pinned < self.dp_size:
            raise ValueError(f"routed_dp_rank: must lie in [0, {self.dp_size - 1}], got {pinned}")
        tokens = request.prompt_token_ids
        earlier = self._open.get(request.request_id)
        arrived = tokens if earlier is None else earlier.arrived
        self.ended(request.request_id)
        chain = chain_of(tokens, self.page_size)
        most = max(1, request.params.max_tokens - request.resumed_tokens)
        opened = _Open(0, arrived, tokens, chain, 0, min(max(1.0, expected_new), most), most)
        opened.work = self._work_of(opened)
        queued = [len(tokens) - self.page_size * rank.index.held(chain) for rank in self._ranks]
        opened.rank = self._best(opened, queued) if pinned is None else pinned
        opened.queued = queued[opened.rank]
        self._open[request.request_id] = opened
        self._count(opened, 1)
        return opened.rank

    def started(self, request_id: str, cached_tokens: int | None = None) -> None:
        """Its prompt is computed (its first output came). `cached_tokens` of it were found in the rank's cache: what
        the index believed beyond them is forgotten.
        """
        opened = self._open.get(request_id)
        if opened is None or not opened.queued:
            return
        rank = self._ranks[opened.rank]
        rank.queued -= opened.queued
        opened.queued = 0
        if cached_tokens is not None:
            rank.index.drop(opened.chain[cached_tokens // self.page_size :])

    def progressed(self, request_id: str, tokens: int, steps: int) -> None:
        """It was given `tokens` in `steps` trees of its own (0 for the token that ends a prompt)."""
        opened = self._open.get(request_id)
        if opened is None:
            return
        self.started(request_id)
        if steps:
            mean = tokens / steps
            self._accept += min(1.0, MEMORY * steps) * (mean - self._accept) if self._accept else mean
        opened.new += tokens
        opened.since += steps
        self._ranks[opened.rank].tokens += tokens
        if opened.since < RENEWAL and opened.steps:
            return
        opened.steps, opened.since = opened.steps + opened.since, 0
        held = self._ranks[opened.rank].work
        old, opened.work = opened.work, self._work_of(opened)
        for part, work in enumerate(opened.work):
            held[part] += work - old[part]

    def ended(self, request_id: str, token_ids: Sequence[int] = ()) -> None:
        """It is over, however it ended. A rank keeps what it computed: its prompt is indexed and, where the caller
        knows them, `token_ids`: all that the request was given since it first came, on whatever rank.
        """
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        self._count(opened, -1)
        if not opened.queued:
            chain = chain_of((*opened.arrived, *token_ids), self.page_size) if token_ids else opened.chain
            self._ranks[opened.rank].index.add(chain)

    def restarted(self, kv_pages: int) -> None:
        """A gang begins with empty caches of `kv_pages` per rank. Open requests count as queued with their whole
        prompt until `choose` moves them.
        """
        for rank in self._ranks:
            rank.index.clear()
            if rank.index.capacity:  # 0 forgets all
                rank.index.capacity = kv_pages
        for opened in self._open.values():
            self._ranks[opened.rank].queued += len(opened.tokens) - opened.queued
            opened.queued = len(opened.tokens)

    def load(self, dp_rank: int) -> RankLoad:
        """The books of one rank."""
        rank = self._ranks[dp_rank]
        return RankLoad(rank.requests, rank.tokens, rank.queued, tuple(rank.work), len(rank.index))

    def _count(self, opened: _Open, sign: int) -> None:
        """Add a request to its rank's sums, or take away what was added."""
        rank = self._ranks[opened.rank]
        rank.requests += sign
        rank.tokens += sign * (len(opened.tokens) + opened.new)
        rank.queued += sign * opened.queued
        for part, work in enumerate(opened.work):
            rank.work[part] += sign * work

    def _work_of(self, opened: _Open) -> Work:
        """Expected work of the steps it still needs, for each part of the horizon."""
        # A request that outlives its estimate is of the long kind: expect half of what it has given once more.
        left = min(opened.most - opened.new, max(opened.expected - opened.new, opened.new / 2))
        accept = (PRIOR_STEPS * (self._accept or 1.0) + opened.new) / (PRIOR_STEPS + opened.steps)
        steps = max(1.0, left / max(1.0, accept))
        per_step = UNIT * (self._step_rows + KV_READ * (len(opened.tokens) + opened.new + left / 2))
        work, start = [], 0
        for end in (*HORIZON, UNBOUNDED):
            work.append(int(per_step * max(0.0, min(steps, end) - start)))
            start = end
        return tuple(work)

    def _best(self, opened: _Open, queued: Sequence[int]) -> int:
        """The rank that the policy prefers; `queued` are the prompt rows left to compute on each."""
        ranks = range(self.dp_size)
        if self.policy == "round_robin":
            self._turn += 1
            return (self._turn - 1) % self.dp_size
        if self.policy == "total_requests":
            return min(ranks, key=lambda at: self._ranks[at].requests)
        if self.policy == "total_tokens":
            return min(ranks, key=lambda at: (self._ranks[at].tokens, self._ranks[at].requests))
        before = [self._future(rank, 0, ()) for rank in self._ranks]
        sums = [sum(_power(future[part]) for future in before) for part in range(PARTS)]

        def slowest(at: int) -> tuple[float, int]:
            after = self._future(self._ranks[at], queued[at], opened.work)
            parts = zip(sums, before[at], after, strict=True)
            powers = (total - _power(old) + _power(new) for total, old, new in parts)
            # Where the load makes no difference, the emptier cache takes it.
            return sum(math.sqrt(math.sqrt(max(0.0, power))) for power in powers), len(self._ranks[at].index)

        return min(ranks, key=slowest)

    def _future(self, rank: _Rank, queued: int, work: Work) -> list[int]:
        """Work of a rank in each part of the horizon with `queued` more prompt rows and `work` more to decode."""
        rows, start, future = rank.queued + queued, 0, []
        for part, end in enumerate((*HORIZON, UNBOUNDED)):
            room = min(rows, self._chunk_rows * (end - start))
            future.append(UNIT * room + rank.work[part] + (work[part] if work else 0))
            rows, start = rows - room, end
        return future


def _power(work: int) -> float:
    square = float(work) * work
    return square * square
