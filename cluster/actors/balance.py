"""Chooses a data-parallel rank for each request. Plain bookkeeping: no clock, no Ray, deterministic.

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

from cluster.actors.open_requests import OpenRequest, RankChoice
from cluster.actors.prefix_estimates import PrefixIndex, page_hashes_of
from cluster.config.resolved import UNLIMITED, ResolvedSettings
from cluster.request import Request

POLICIES = ("expected_load", "round_robin", "total_tokens", "total_requests")
WORK_UNIT = 1024  # work is an integer number of 1/WORK_UNIT rows, so that additions and subtractions cancel exactly
KV_READ = 1 / 1024  # the cost of reading one KV token in one step, in rows
HORIZON = (8, 32, 128, 512)  # steps from now at which future steps are split into parts; the last part has no end
INTERVALS = len(HORIZON) + 1
STEPS_BETWEEN_ESTIMATES = 4  # steps of a request between two estimates of its remaining work
PRIOR_STEPS = 4  # after this many steps a request's own accept length counts as much as the gang's mean
INDEX_PAGES = 32768  # capacity of a prefix index until the gang says how many KV pages a rank has
LEARNING_RATE = 1 / 256  # weight of one step of a request in the gang's mean accept length

Work = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one rank: sums over its open requests, as the router counts them.

    `requests` is the number of open requests. `tokens` counts their prompt and generated tokens, `queued_tokens` their
    prompt tokens that are not computed yet. `work` is their expected decoding work in 1 / `WORK_UNIT` rows, for each
    part of `HORIZON`. `pages` is the number of pages in the rank's prefix index.
    """

    requests: int = 0
    tokens: int = 0
    queued_tokens: int = 0
    work: Work = (0,) * INTERVALS
    pages: int = 0


@dataclass(slots=True)
class _RankState:
    """Totals over the open requests of one rank. `open_prompt_pages[page]` is the number of open requests whose prompt
    contains that page.
    """

    index: PrefixIndex
    open_prompt_pages: Counter[int] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    queued_tokens: int = 0
    work: list[int] = field(default_factory=lambda: [0] * INTERVALS)

    def matched_pages(self, page_hashes: Sequence[int]) -> tuple[int, int]:
        """Return two counts of pages at the start of `page_hashes`: pages that are cached or belong to prompts of open
        requests, and pages that belong to prompts of open requests. Both are 0 if the prefix index is disabled.
        """
        if not self.index.capacity:
            return 0, 0
        num_shared = next(
            (n for n, page in enumerate(page_hashes) if page not in self.open_prompt_pages), len(page_hashes)
        )
        is_known = (page in self.open_prompt_pages or page in self.index for page in page_hashes[num_shared:])
        return num_shared + sum(takewhile(bool, is_known)), num_shared


class Balancer:
    """Chooses a dp rank for each request, and counts the load of each rank.

    The caller calls `choose`, `on_first_output`, `on_tokens` (for each output, after `OpenRequest.record`) and
    `on_ended` for each request, and `on_restart` after a restart of the gang. Calls for requests that are not open
    change nothing, so late or repeated calls are harmless.
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
        """`step_rows` is N, the target rows of a decoding request per step. `chunk_rows` is the largest number of
        prompt rows of a rank per step. `index_pages` is the capacity of each rank's prefix index (about 150 bytes per
        page), ideally the number of the rank's KV pages; 0 disables the index.

        Raises:
            ValueError: the policy does not exist.
        """
        if policy not in POLICIES:
            raise ValueError(f"routing_policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
        self.policy, self.dp_size, self.page_size = policy, dp_size, page_size
        self._step_rows, self._chunk_rows = step_rows, chunk_rows
        self._ranks = [_RankState(PrefixIndex(index_pages)) for _ in range(dp_size)]
        self._open: dict[str, OpenRequest] = {}
        self._round_robin_count = 0
        self._mean_accept_len = 0.0  # the gang's mean accept length; 0.0 before the first verified tree

    @classmethod
    def of(cls, resolved: ResolvedSettings) -> Self:
        """Return the balancer of a gang with these settings."""
        config, rows = resolved.settings, resolved.shape.drafted_shape.num_draft_tokens
        size, pages = (config.attn_dp_size, config.page_size), 0 if config.disable_radix_cache else INDEX_PAGES
        return cls(config.routing_policy, *size, step_rows=rows, chunk_rows=resolved.chunk_rows, index_pages=pages)

    def propose(self, request: Request, expected_new: float) -> RankChoice:
        """Return the rank that `request` would go to now, and change nothing. `expected_new` is the expected number of
        new tokens. An open request with the same id is not counted as load.

        Raises:
            ValueError: `routed_dp_rank` is out of range.
        """
        pinned, tokens = self._pinned_rank(request), request.prompt_token_ids
        earlier = self._open.get(request.request_id)
        if earlier is not None:
            self._add_to_rank(earlier, -1)
        page_hashes = page_hashes_of(tokens, self.page_size, request.cache_salt)
        needs_all_rows = request.params.prompt_logprobs is not None  # prompt logprobs need every row, cached or not
        queued = [
            len(tokens) - (0 if needs_all_rows else self.page_size * state.index.count_cached(page_hashes))
            for state in self._ranks
        ]
        dp_rank = self._best_rank(self._expected_work(request, expected_new), queued) if pinned is None else pinned
        matched, shared = self._ranks[dp_rank].matched_pages(() if needs_all_rows else page_hashes)
        if earlier is not None:
            self._add_to_rank(earlier, 1)
        return RankChoice(dp_rank, self.page_size * matched, self.page_size * shared, queued[dp_rank], page_hashes)

    def choose(self, opened: OpenRequest, expected_new: float, choice: RankChoice | None = None) -> int:
        """Return the dp rank for the latest submission of `opened`, and count the request as queued on that rank.
        `expected_new` is the expected number of new tokens. `choice` is the result of `propose` for this submission; if
        it is None, this method calls `propose`.

        If a request with the same id is open, it no longer counts on its old rank.

        Raises:
            ValueError: `routed_dp_rank` is out of range; nothing is changed then.
        """
        request = opened.latest_request
        pinned = self._pinned_rank(request)
        self.on_ended(opened.name)
        opened.choice = choice or self.propose(request, expected_new)
        self._round_robin_count += pinned is None
        opened.queued_tokens, opened.expected_new_tokens = opened.choice.queued_tokens, expected_new
        opened.work = self._expected_work(request, expected_new)
        opened.estimated_at_step = opened.steps_since_estimate = 0
        self._open[opened.name] = opened
        self._add_to_rank(opened, 1)
        return opened.choice.rank

    def on_first_output(self, request_id: str, cached_tokens: int | None = None) -> None:
        """Record that the prompt of a request is computed: its first output came. `cached_tokens` tokens of the prompt
        were found in the rank's cache; the prefix index drops the prompt's later pages. If `cached_tokens` is None, the
        index does not change.
        """
        opened = self._open.get(request_id)
        if opened is None or not opened.queued_tokens:
            return
        rank = self._ranks[opened.choice.rank]
        rank.queued_tokens -= opened.queued_tokens
        opened.queued_tokens = 0
        if cached_tokens is not None:
            rank.index.drop(opened.choice.page_hashes[cached_tokens // self.page_size :])

    def on_tokens(self, request_id: str, tokens: int, steps: int) -> None:
        """Record that a request got `tokens` tokens from `steps` verified trees. `steps` is 0 for its first token."""
        opened = self._open.get(request_id)
        if opened is None:
            return
        self.on_first_output(request_id)
        if steps:
            mean = tokens / steps
            self._mean_accept_len += (
                min(1.0, LEARNING_RATE * steps) * (mean - self._mean_accept_len) if self._mean_accept_len else mean
            )
        opened.steps_since_estimate += steps
        rank = self._ranks[opened.choice.rank]
        rank.tokens += tokens
        if opened.steps_since_estimate < STEPS_BETWEEN_ESTIMATES and opened.estimated_at_step:
            return
        opened.estimated_at_step, opened.steps_since_estimate = (
            opened.estimated_at_step + opened.steps_since_estimate,
            0,
        )
        request, old_work = opened.latest_request, opened.work
        opened.work = self._expected_work(
            request,
            opened.expected_new_tokens,
            opened.length - len(request.prompt_token_ids),
            opened.estimated_at_step,
        )
        for interval, work in enumerate(opened.work):
            rank.work[interval] += work - old_work[interval]

    def on_ended(self, request_id: str, token_ids: Sequence[int] = ()) -> None:
        """Record that a request has ended, for any reason. The rank of the request keeps the KV. So if
        the prompt was computed, add the pages of the prompt and of `token_ids` to the rank's prefix index. `token_ids`
        are all tokens that the request got, on any rank; if it is empty, add the pages of the prompt alone.
        """
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        self._add_to_rank(opened, -1)
        if not opened.queued_tokens:
            page_hashes = opened.choice.page_hashes
            if token_ids:
                all_tokens = (*opened.request.prompt_token_ids, *token_ids)
                page_hashes = page_hashes_of(all_tokens, self.page_size, opened.request.cache_salt)
            self._ranks[opened.choice.rank].index.add(page_hashes)

    def on_restart(self, kv_pages: int) -> None:
        """Record that the gang starts with empty caches of `kv_pages` pages per rank. The whole prompt of each open
        request counts as queued until its first output or the next call of `choose` for it.
        """
        for rank in self._ranks:
            rank.index.reset(kv_pages)
        for opened in self._open.values():
            prompt_tokens = len(opened.latest_request.prompt_token_ids)
            self._ranks[opened.choice.rank].queued_tokens += prompt_tokens - opened.queued_tokens
            opened.queued_tokens = prompt_tokens

    def load(self, dp_rank: int) -> RankLoad:
        """Return the present load of one rank."""
        rank = self._ranks[dp_rank]
        return RankLoad(rank.requests, rank.tokens, rank.queued_tokens, tuple(rank.work), len(rank.index))

    def _add_to_rank(self, opened: OpenRequest, sign: int) -> None:
        """Add a request to the sums of its rank (`sign` 1), or subtract it again (`sign` -1)."""
        rank = self._ranks[opened.choice.rank]
        rank.requests += sign
        rank.tokens += sign * opened.length
        rank.queued_tokens += sign * opened.queued_tokens
        for page_hash in opened.choice.page_hashes:
            rank.open_prompt_pages[page_hash] += sign
            if not rank.open_prompt_pages[page_hash]:
                del rank.open_prompt_pages[page_hash]
        for interval, work in enumerate(opened.work):
            rank.work[interval] += sign * work

    def _pinned_rank(self, request: Request) -> int | None:
        """Return the rank that a request names, or None if it names none. Raise ValueError for an unknown rank."""
        pinned = request.routed_dp_rank
        if pinned is not None and not 0 <= pinned < self.dp_size:
            raise ValueError(f"routed_dp_rank: must lie in [0, {self.dp_size - 1}], got {pinned}")
        return pinned

    def _expected_work(self, request: Request, expected_new: float, new_tokens: int = 0, steps: int = 0) -> Work:
        """Return the expected work of the steps that `request` still needs, for each part of `HORIZON`. The request got
        `new_tokens` tokens in `steps` steps since it was submitted, and `expected_new` tokens are expected in total.
        """
        max_new_tokens = max(1, request.params.max_tokens - request.resumed_tokens)
        expected_tokens = min(max(1.0, expected_new), max_new_tokens)
        # A request that exceeds its estimate is likely long: always expect at least half as many more tokens as it has.
        remaining_tokens = min(max_new_tokens - new_tokens, max(expected_tokens - new_tokens, new_tokens / 2))
        accept_len = (PRIOR_STEPS * (self._mean_accept_len or 1.0) + new_tokens) / (PRIOR_STEPS + steps)
        remaining_steps = max(1.0, remaining_tokens / max(1.0, accept_len))
        per_step = WORK_UNIT * (
            self._step_rows + KV_READ * (len(request.prompt_token_ids) + new_tokens + remaining_tokens / 2)
        )
        work, start = [], 0
        for end in (*HORIZON, UNLIMITED):
            work.append(int(per_step * max(0.0, min(remaining_steps, end) - start)))
            start = end
        return tuple(work)

    def _best_rank(self, work: Work, queued: Sequence[int]) -> int:
        """Return the rank that the policy prefers for a request with the decoding work `work` and `queued[rank]` prompt
        rows on each rank.
        """
        ranks = range(self.dp_size)
        if self.policy == "round_robin":
            return self._round_robin_count % self.dp_size
        if self.policy == "total_requests":
            return min(ranks, key=lambda dp_rank: self._ranks[dp_rank].requests)
        if self.policy == "total_tokens":
            return min(ranks, key=lambda dp_rank: (self._ranks[dp_rank].tokens, self._ranks[dp_rank].requests))
        before = [self._work_by_interval(rank, 0, ()) for rank in self._ranks]
        sums = [sum(_fourth_power(future[interval]) for future in before) for interval in range(INTERVALS)]

        def slowest(dp_rank: int) -> tuple[float, int]:
            after = self._work_by_interval(self._ranks[dp_rank], queued[dp_rank], work)
            intervals = zip(sums, before[dp_rank], after, strict=True)
            powers = (total - _fourth_power(old) + _fourth_power(new) for total, old, new in intervals)
            # The 4-norm over the ranks, with this rank's work as it would be after the choice, summed over the parts.
            # On a tie the rank with fewer pages in its prefix index is chosen.
            return sum(math.sqrt(math.sqrt(max(0.0, power))) for power in powers), len(self._ranks[dp_rank].index)

        return min(ranks, key=slowest)

    def _work_by_interval(self, state: _RankState, queued: int, work: Work) -> list[int]:
        """Return a rank's work in each part of `HORIZON`, with `queued` more prompt rows and the decoding work `work`
        (empty for none).
        """
        rows, start, future = state.queued_tokens + queued, 0, []
        for interval, end in enumerate((*HORIZON, UNLIMITED)):
            chunk_rows = min(rows, self._chunk_rows * (end - start))  # at most one chunk per step
            future.append(WORK_UNIT * chunk_rows + state.work[interval] + (work[interval] if work else 0))
            rows, start = rows - chunk_rows, end
        return future


def _fourth_power(work: int) -> float:
    """Return `work` to the power of 4."""
    square = float(work) * work
    return square * square
