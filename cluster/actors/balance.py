"""The choice of a data-parallel rank for each request. Plain bookkeeping: no clock, no Ray, deterministic.

All ranks of a gang step together, so a step lasts as long as its slowest rank. `expected_load` chooses the rank where a
request adds least to the slowest rank's work, summed over future steps. Work is counted in rows of the model:
- A prompt token that is not yet computed is one row.
- A running request is `step_rows` rows in each step that it still needs. The number of these steps is its expected
  tokens divided by its accept length. Reading one KV token in one step costs `KV_READ` rows.
- Pages of the prompt that a rank has cached cost nothing on that rank; there is no other prefix affinity.
Future steps are split into parts at `HORIZON`, so that many short requests and one long request are different loads.
"The slowest rank" is a 4-norm over the ranks, a soft maximum: the second slowest rank counts a little, as it may become
the slowest.

The other policies are SGLang's: `round_robin`, `total_requests`, and `total_tokens` (ties go to fewer requests).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Self

from cluster.actors.prefix_estimates import PrefixIndex, chain_of
from cluster.config.resolved import UNLIMITED, ResolvedSettings
from cluster.request import Request

POLICIES = ("expected_load", "round_robin", "total_tokens", "total_requests")
UNIT = 1024  # work is an integer number of 1/UNIT rows, so that additions and subtractions cancel exactly
KV_READ = 1 / 1024  # reading one KV token in one step, in rows
HORIZON = (8, 32, 128, 512)  # steps from now at which future steps are split into parts; the last part has no end
PARTS = len(HORIZON) + 1
RENEWAL = 4  # steps of a request between two estimates of its remaining work
PRIOR_STEPS = 4  # after this many steps a request's own accept length counts as much as the gang's mean
INDEX_PAGES = 32768  # of a prefix index before a gang has said how many KV pages a rank has
MEMORY = 1 / 256  # weight of one step of a request in the gang's mean accept length

Work = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one rank by the router's own count of its open requests.

    `tokens` counts prompt and generated tokens, `queued_tokens` prompt tokens not yet computed, `work` the expected
    decoding work in 1 / `UNIT` rows for each part of `HORIZON`, `pages` the pages in the prefix index.
    """

    requests: int = 0
    tokens: int = 0
    queued_tokens: int = 0
    work: Work = (0,) * PARTS
    pages: int = 0


@dataclass(frozen=True, slots=True)
class RankChoice:
    """The dp rank that a request would go to.

    `cached` counts the tokens at the start of the prompt that are in the rank's cache, or will be when the prompts of
    its open requests are computed. `shared` counts those at the start that open requests also have. `queued` counts the
    prompt tokens that are not in the rank's cache now. `chain` holds the hashes of the prompt's pages (`chain_of`).
    """

    rank: int = 0
    cached: int = 0
    shared: int = 0
    queued: int = 0
    chain: tuple[int, ...] = ()


@dataclass(slots=True)
class _Open:
    """One open request. `queued` counts prompt tokens still to compute. `new` tokens were generated so far, `expected`
    are likely in total, `most` are allowed. `work` was estimated after `steps` steps of the request; `since` counts its
    steps after that. `arrived` is the prompt as it first came, `tokens` the prompt as submitted to this rank, `chain`
    the hashes of its pages, `salt` its cache salt.
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
    salt: int = 0


@dataclass(slots=True)
class _Rank:
    """Running sums over the open requests of one rank; `coming[page]` counts the requests whose prompt has the page."""

    index: PrefixIndex
    coming: Counter[int] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    queued: int = 0
    work: list[int] = field(default_factory=lambda: [0] * PARTS)

    def found(self, chain: Sequence[int]) -> tuple[int, int]:
        """Return two counts of pages at the start of `chain`: pages that are cached or belong to prompts of open
        requests, and pages that belong to prompts of open requests.
        """
        if not self.index.capacity:
            return 0, 0
        shared = next((n for n, page in enumerate(chain) if page not in self.coming), len(chain))
        known = (page in self.coming or page in self.index for page in chain[shared:])
        return shared + sum(takewhile(bool, known)), shared


class Balancer:
    """Chooses a dp rank for each request, and counts the load of each rank.

    The caller calls `choose`, `started`, `progressed` (once per output) and `ended` for each request, and `restarted`
    after a restart of the gang. Calls for requests that are not open change nothing, so late or repeated calls are
    harmless.
    """

    def __init__(
        self,
        policy: str,
        dp_size: int,
        page_size: int,
        *,
        step_rows: int = 1,
        chunk_rows: int = 512,
        index_pages: int = INDEX_PAGES,
    ) -> None:
        """`step_rows` is N, the target rows of a decoding request per step. `chunk_rows` is the most prompt rows of a
        rank per step. `index_pages` bounds each rank's prefix index (about 150 bytes per page): ideally the number of
        its KV pages; 0 disables it.

        Raises:
            ValueError: the policy does not exist.
        """
        if policy not in POLICIES:
            raise ValueError(f"routing_policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
        self.policy, self.dp_size, self.page_size = policy, dp_size, page_size
        self._step_rows, self._chunk_rows = step_rows, chunk_rows
        self._ranks = [_Rank(PrefixIndex(index_pages)) for _ in range(dp_size)]
        self._open: dict[str, _Open] = {}
        self._turn = 0
        self._accept = 0.0  # the gang's mean accept length; 0.0 before the first verified tree

    @classmethod
    def of(cls, resolved: ResolvedSettings) -> Self:
        """Return the balancer of a gang with these settings."""
        config, rows = resolved.settings, resolved.shape.num_draft_tokens
        size, pages = (config.attn_dp_size, config.page_size), 0 if config.disable_radix_cache else INDEX_PAGES
        return cls(config.routing_policy, *size, step_rows=rows, chunk_rows=resolved.chunk_rows, index_pages=pages)

    def place(self, request: Request, expected_new: float) -> RankChoice:
        """Return where `request` would go now, and change nothing. `expected_new` is the expected number of new tokens.
        An open request with the same id is not counted as load.

        Raises:
            ValueError: `routed_dp_rank` is out of range.
        """
        pinned, tokens = self._pinned(request), request.prompt_token_ids
        earlier = self._open.get(request.request_id)
        if earlier is not None:
            self._count(earlier, -1)
        chain = chain_of(tokens, self.page_size, request.cache_salt)
        scored = request.params.prompt_logprobs is not None  # prompt logprobs need every row, cached or not
        queued = [len(tokens) - (0 if scored else self.page_size * rank.index.held(chain)) for rank in self._ranks]
        at = self._best(self._opened(request, expected_new, chain).work, queued) if pinned is None else pinned
        found, shared = self._ranks[at].found(() if scored else chain)
        if earlier is not None:
            self._count(earlier, 1)
        return RankChoice(at, self.page_size * found, self.page_size * shared, queued[at], chain)

    def choose(self, request: Request, expected_new: float, place: RankChoice | None = None) -> int:
        """Return the dp rank for `request`, and count the request as queued on that rank. `expected_new` is the
        expected number of new tokens. The argument `place` may hold the result of the method `place` for this request.

        If a request with the same id is open, it is moved from its old rank.

        Raises:
            ValueError: `routed_dp_rank` is out of range; nothing is changed then.
        """
        pinned, earlier = self._pinned(request), self._open.get(request.request_id)
        self.ended(request.request_id)
        place = place or self.place(request, expected_new)
        self._turn += pinned is None
        opened = self._opened(request, expected_new, place.chain)
        opened.rank, opened.queued = place.rank, place.queued
        if earlier is not None:
            opened.arrived = earlier.arrived
        self._open[request.request_id] = opened
        self._count(opened, 1)
        return opened.rank

    def started(self, request_id: str, cached_tokens: int | None = None) -> None:
        """Note that the prompt of a request is computed: its first output came. `cached_tokens` tokens of the prompt
        were found in the rank's cache; the prefix index drops the prompt's later pages.
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
        """Note that a request got `tokens` tokens from `steps` verified trees. `steps` is 0 for its first token."""
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
        """Note that a request is over, for any reason. Its rank keeps the KV, so the prompt is added to the prefix
        index, followed by `token_ids`. These are all tokens that the request got on any rank; empty if unknown.
        """
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        self._count(opened, -1)
        if not opened.queued:
            whole = (*opened.arrived, *token_ids)
            chain = chain_of(whole, self.page_size, opened.salt) if token_ids else opened.chain
            self._ranks[opened.rank].index.add(chain)

    def restarted(self, kv_pages: int) -> None:
        """Note that the gang starts with empty caches of `kv_pages` pages per rank. Until `choose` moves an open
        request, its whole prompt counts as queued.
        """
        for rank in self._ranks:
            rank.index.restarted(kv_pages)
        for opened in self._open.values():
            self._ranks[opened.rank].queued += len(opened.tokens) - opened.queued
            opened.queued = len(opened.tokens)

    def load(self, dp_rank: int) -> RankLoad:
        """Return the present load of one rank."""
        rank = self._ranks[dp_rank]
        return RankLoad(rank.requests, rank.tokens, rank.queued, tuple(rank.work), len(rank.index))

    def _count(self, opened: _Open, sign: int) -> None:
        """Add a request to its rank's sums (`sign` 1), or subtract it again (-1)."""
        rank = self._ranks[opened.rank]
        rank.requests += sign
        rank.tokens += sign * (len(opened.tokens) + opened.new)
        rank.queued += sign * opened.queued
        for page in opened.chain:
            rank.coming[page] += sign
            if not rank.coming[page]:
                del rank.coming[page]
        for part, work in enumerate(opened.work):
            rank.work[part] += sign * work

    def _pinned(self, request: Request) -> int | None:
        """Return the rank that a request names, or None if it names none. Raise ValueError for an unknown rank."""
        pinned = request.routed_dp_rank
        if pinned is not None and not 0 <= pinned < self.dp_size:
            raise ValueError(f"routed_dp_rank: must lie in [0, {self.dp_size - 1}], got {pinned}")
        return pinned

    def _opened(self, request: Request, expected_new: float, chain: tuple[int, ...]) -> _Open:
        """Return the record of a request whose rank is not chosen yet."""
        tokens = request.prompt_token_ids
        most = max(1, request.params.max_tokens - request.resumed_tokens)
        expected = min(max(1.0, expected_new), most)
        opened = _Open(0, tokens, tokens, chain, 0, expected, most, salt=request.cache_salt)
        opened.work = self._work_of(opened)
        return opened

    def _work_of(self, opened: _Open) -> Work:
        """Return the expected work of the steps that a request still needs, for each part of the horizon."""
        # A request beyond its estimate is a long one: expect at least half as many more tokens as it has already.
        left = min(opened.most - opened.new, max(opened.expected - opened.new, opened.new / 2))
        accept = (PRIOR_STEPS * (self._accept or 1.0) + opened.new) / (PRIOR_STEPS + opened.steps)
        steps = max(1.0, left / max(1.0, accept))
        per_step = UNIT * (self._step_rows + KV_READ * (len(opened.tokens) + opened.new + left / 2))
        work, start = [], 0
        for end in (*HORIZON, UNLIMITED):
            work.append(int(per_step * max(0.0, min(steps, end) - start)))
            start = end
        return tuple(work)

    def _best(self, work: Work, queued: Sequence[int]) -> int:
        """Return the rank that the policy prefers for a request with the decoding work `work` and `queued[rank]` prompt
        rows on each rank.
        """
        ranks = range(self.dp_size)
        if self.policy == "round_robin":
            return self._turn % self.dp_size
        if self.policy == "total_requests":
            return min(ranks, key=lambda at: self._ranks[at].requests)
        if self.policy == "total_tokens":
            return min(ranks, key=lambda at: (self._ranks[at].tokens, self._ranks[at].requests))
        before = [self._future(rank, 0, ()) for rank in self._ranks]
        sums = [sum(_power(future[part]) for future in before) for part in range(PARTS)]

        def slowest(at: int) -> tuple[float, int]:
            after = self._future(self._ranks[at], queued[at], work)
            parts = zip(sums, before[at], after, strict=True)
            powers = (total - _power(old) + _power(new) for total, old, new in parts)
            # The 4-norm over the ranks with this rank's load replaced, summed over the parts. On a tie the rank with
            # the emptier prefix index is chosen.
            return sum(math.sqrt(math.sqrt(max(0.0, power))) for power in powers), len(self._ranks[at].index)

        return min(ranks, key=slowest)

    def _future(self, rank: _Rank, queued: int, work: Work) -> list[int]:
        """Return a rank's work in each part of the horizon, after adding `queued` prompt rows and decoding `work`."""
        rows, start, future = rank.queued + queued, 0, []
        for part, end in enumerate((*HORIZON, UNLIMITED)):
            room = min(rows, self._chunk_rows * (end - start))  # at most one chunk per step
            future.append(UNIT * room + rank.work[part] + (work[part] if work else 0))
            rows, start = rows - room, end
        return future


def _power(work: int) -> float:
    """Return `work` to the power of 4."""
    square = float(work) * work
    return square * square
