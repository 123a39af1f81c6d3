"""The state of one request on the host, waiting or running: its tokens, its lease, its committed tokens."""

from dataclasses import dataclass, field

from cluster.batch import UNLIMITED_DRAFT, RowGrammar, RowPenalties, RowSampling, RowTokens
from cluster.config.tree_shape import TreeShape
from cluster.engine.finish import FinishCheck
from cluster.engine.request_times import RequestTimes
from cluster.kv.cache import Lease
from cluster.request import Request, SpeculationCounts, TokenLogprob


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request, from its submission to its end.

    - `tokens`: prompt and output. The request ends when it has `max_tokens` of them, prompt included.
    - `committed`: how many tokens have KV in every pool, by the results read so far. `max_committed`: how many tokens
      may have KV at most when all steps in flight are over. `steps_in_flight`: the number of steps in flight that each
      give the request at least one token.
    - `prefilling`: True until a step with the last prompt row has begun. After that the request decodes, and its last
      token is the bonus token, whose KV is not computed yet. `prompt_committed`: the results of all prompt rows have
      been read.
    - `lease`: the pages of the request; None while it waits. `cached_tokens`: number of tokens found in the cache at
      the first admission; None before that. `steps`, `drafted`, `accepted`: see `SpeculationCounts`.
    - `scores`: log-probabilities of the prompt's tokens from the second on, if requested and as far as computed.
      `scores_returned`: whether they have been returned, which happens once.
    """

    request: Request
    finish: FinishCheck
    tokens: list[int]
    prompt_len: int
    accepted: list[int]
    committed: int = 0
    max_committed: int = 0
    steps_in_flight: int = 0
    prefilling: bool = True
    prompt_committed: bool = False
    lease: Lease | None = None
    cached_tokens: int | None = None
    steps: int = 0
    drafted: int = 0
    scores: list[TokenLogprob] = field(default_factory=list)
    scores_returned: bool = False
    times: RequestTimes = field(default_factory=RequestTimes)
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_tokens = self.prompt_len + self.request.params.max_tokens

    @property
    def row(self) -> int:
        """The table row of the request. Only a running request has one."""
        assert self.lease is not None, "only running requests have a row"
        return self.lease.row

    def sampling(self) -> RowSampling:
        """The sampling parameters, as an entry of `StepInput`."""
        params = self.request.params
        assert params.seed is not None, "`submit` gives every request a seed"
        limit = UNLIMITED_DRAFT if params.max_draft_tokens is None else params.max_draft_tokens
        return RowSampling(self.row, params.temperature, params.top_k, params.top_p, params.min_p, params.seed, limit)

    def penalties(self) -> RowPenalties:
        """The logit adjustments, as an entry of `StepInput`."""
        adjustments = self.request.params.adjustments
        assert adjustments is not None, "only for requests with logit adjustments"
        return RowPenalties(
            row=self.row,
            presence=adjustments.presence_penalty,
            frequency=adjustments.frequency_penalty,
            repetition=adjustments.repetition_penalty,
            min_tokens_left=max(0, adjustments.min_tokens - (len(self.tokens) - self.prompt_len)),
            prompt_len=self.prompt_len,
            tokens=tuple(self.tokens),
            stop_tokens=tuple(sorted(self.finish.end_tokens)) if adjustments.min_tokens else (),
            bias=adjustments.bias,
            allowed=adjustments.allowed_token_ids,
            bad_words=adjustments.bad_words_token_ids,
        )

    def constraint(self) -> RowGrammar:
        """The grammar and the output so far, as an entry of `StepInput`."""
        grammar = self.request.params.grammar
        assert grammar is not None, "only for requests with a grammar"
        return RowGrammar(self.row, grammar, tuple(self.tokens[self.prompt_len :]))

    def history(self) -> RowTokens:
        """The tokens so far, as an entry of `StepInput`."""
        return RowTokens(self.row, tuple(self.tokens))

    @property
    def max_cached_tokens(self) -> int | None:
        """How many tokens of the request may come from the cache; None means no limit. A row whose prompt
        log-probability is still missing has to be computed, because the cache holds no logits.
        """
        return len(self.scores) if self.missing_scores(0, self.prompt_len) else None

    def missing_scores(self, start: int, stop: int) -> int:
        """How many of prompt rows `start` to `stop - 1` must return log-probabilities. The prompt's last row never
        does: the token after it is not part of the prompt.
        """
        if (
            self.request.params.prompt_logprobs is None
            or self.scores_returned
            or len(self.scores) == self.prompt_len - 1
        ):
            return 0
        return max(0, min(stop, self.prompt_len - 1) - start)

    def take_scores(self) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the prompt and drop them; they are returned only once."""
        scores, self.scores, self.scores_returned = tuple(self.scores), [], True
        return scores

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens that the request may still generate."""
        return self.max_tokens - len(self.tokens)

    @property
    def max_running_tokens(self) -> int:
        """The largest number of committed tokens that this request can have while it runs. It then has at most
        `max_tokens - 1` tokens, and the last of them, the bonus token, is not committed.
        """
        return self.max_tokens - 2

    @property
    def will_end(self) -> bool:
        """Whether the steps in flight are certain to end the request by max_tokens."""
        return self.max_tokens - len(self.tokens) <= self.steps_in_flight

    def attach(self, lease: Lease) -> None:
        """Begin to run with the pages of `lease`. The tokens found in the cache count as committed from the start."""
        self.lease, self.committed, self.max_committed, self.steps_in_flight = (
            lease,
            lease.cached_tokens,
            lease.cached_tokens,
            0,
        )
        if self.cached_tokens is None:
            self.cached_tokens = lease.cached_tokens

    def detach(self) -> None:
        """Record that the lease is closed. If the request is admitted again, its tokens are prompt rows again."""
        self.lease, self.prefilling, self.prompt_committed = None, True, False
        self.committed = self.max_committed = self.steps_in_flight = 0

    def begin_prompt(self, stop: int, final: bool) -> None:
        """Record that a step with prompt rows up to `stop` is in flight. If `final`, the request decodes after it."""
        self.max_committed, self.prefilling = stop, not final
        self.steps_in_flight += final

    def commit_prompt(self, stop: int, final: bool) -> None:
        """Record that the results of a step from `begin_prompt` were read: tokens up to `stop` are committed."""
        self.committed, self.prompt_committed = stop, final
        self.steps_in_flight -= final

    def max_new_tokens(self, shape: TreeShape) -> int:
        """The most tokens that a tree of this shape commits. Levels for tokens that a grammar forces count only if the
        request has a grammar.
        """
        return shape.num_steps + 1 - (shape.forced_nodes if self.request.params.grammar is None else 0)

    def begin_tree(self, shape: TreeShape) -> None:
        """Record that a step with a tree of this shape is in flight."""
        self.max_committed += self.max_new_tokens(shape)
        self.steps_in_flight += 1

    def commit_tree(self, count: int, shape: TreeShape) -> None:
        """Record that a tree's results were read. `count` more tokens are now committed: the previous bonus token and
        the accepted draft tokens.
        """
        self.committed += count
        self.max_committed -= self.max_new_tokens(shape) - count  # `begin_tree` assumed that all levels are accepted
        self.steps_in_flight -= 1

    def count_tree(self, accept_len: int, drafted: int) -> None:
        """Count one verified tree with `drafted` nodes besides the root, which gave `accept_len` tokens."""
        self.steps += 1
        self.drafted += drafted
        self.accepted[accept_len - 1] += 1

    def speculation(self) -> SpeculationCounts | None:
        """The counts so far. None if no tree had a node to verify besides its root."""
        return SpeculationCounts(self.steps, self.drafted, tuple(self.accepted)) if self.drafted else None
