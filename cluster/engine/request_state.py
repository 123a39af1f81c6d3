"""The state of one request on the host, waiting or running: its tokens, its lease, its committed tokens."""

from dataclasses import dataclass, field

from cluster.batch import RowGrammar, RowPenalties, RowSampling
from cluster.config.tree_shape import TreeShape
from cluster.engine.finish import FinishCheck
from cluster.engine.request_times import RequestTimes
from cluster.kv.cache import Lease
from cluster.request import Request, SpeculationCounts, TokenLogprob


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request, from its submission to its end.

    - `tokens`: prompt and output. The request ends at `limit` tokens.
    - `committed`: how many tokens have KV in every pool, by the results read so far. `reach`: the most that may have it
      when all steps in flight are over. `unread`: the steps in flight that each give at least one token.
    - `prefilling`: until the last prompt row is in a step. Then the request decodes, and its last token is the bonus
      token. `known`: the results of all prompt rows have been read.
    - `cached_tokens`: number of tokens found in the cache at the first admission. `steps`, `drafted`, `accepted`: see
      `SpeculationCounts`.
    - `scores`: log-probabilities of the prompt's tokens from the second on, if requested and as far as computed.
      `told`: they have been returned, which happens once.
    """

    request: Request
    finish: FinishCheck
    tokens: list[int]
    prompt_len: int
    accepted: list[int]
    committed: int = 0
    reach: int = 0
    unread: int = 0
    prefilling: bool = True
    known: bool = False
    lease: Lease | None = None
    cached_tokens: int | None = None
    steps: int = 0
    drafted: int = 0
    scores: list[TokenLogprob] = field(default_factory=list)
    told: bool = False
    times: RequestTimes = field(default_factory=RequestTimes)
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = self.prompt_len + self.request.params.max_tokens

    @property
    def row(self) -> int:
        """The table row of the request. Only a running request has one."""
        assert self.lease is not None, "only running requests have a row"
        return self.lease.row

    def sampling(self) -> RowSampling:
        """The sampling parameters, as an entry of `StepInput`."""
        p = self.request.params
        assert p.seed is not None, "every request is given a seed when it is submitted"
        return RowSampling(self.row, p.temperature, p.top_k, p.top_p, p.min_p, p.seed)

    def adjusting(self) -> RowPenalties:
        """The logit adjustments, as an entry of `StepInput`."""
        a = self.request.params.adjustments
        assert a is not None, "only adjusted requests are asked"
        return RowPenalties(
            row=self.row,
            presence=a.presence_penalty,
            frequency=a.frequency_penalty,
            repetition=a.repetition_penalty,
            missing=max(0, a.min_tokens - (len(self.tokens) - self.prompt_len)),
            prompt_len=self.prompt_len,
            tokens=tuple(self.tokens),
            late=tuple(sorted(self.finish.ends)) if a.min_tokens else (),
            bias=a.bias,
            allowed=a.allowed_token_ids,
            bad_words=a.bad_words_token_ids,
        )

    def constraint(self) -> RowGrammar:
        """The grammar and the output so far, as an entry of `StepInput`."""
        grammar = self.request.params.grammar
        assert grammar is not None, "only constrained requests are asked"
        return RowGrammar(self.row, grammar, tuple(self.tokens[self.prompt_len :]))

    @property
    def cacheable(self) -> int | None:
        """How many tokens of the request may come from the cache; None means no limit. A row whose prompt
        log-probability is still missing has to be computed, because the cache holds no logits.
        """
        return len(self.scores) if self.scores_left(0, self.prompt_len) else None

    def scores_left(self, start: int, stop: int) -> int:
        """How many of prompt rows `start` to `stop - 1` must return log-probabilities. The last row never does."""
        if self.request.params.prompt_logprobs is None or self.told or len(self.scores) == self.prompt_len - 1:
            return 0
        return max(0, min(stop, self.prompt_len - 1) - start)

    def tell_scores(self) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the prompt and drop them; they are returned only once."""
        told, self.scores, self.told = tuple(self.scores), [], True
        return told

    @property
    def room(self) -> int:
        """The number of tokens that the request may still generate."""
        return self.limit - len(self.tokens)

    @property
    def longest(self) -> int:
        """The most committed tokens of a running request: it has fewer than `limit` tokens, the last is the bonus."""
        return self.limit - 2

    @property
    def ends(self) -> bool:
        """Whether the steps in flight are certain to end the request by max_tokens."""
        return self.limit - len(self.tokens) <= self.unread

    def join(self, lease: Lease) -> None:
        """Begin to run on a lease. Its cached tokens count as committed from the start."""
        self.lease, self.committed, self.reach, self.unread = lease, lease.cached, lease.cached, 0
        if self.cached_tokens is None:
            self.cached_tokens = lease.cached

    def leave(self) -> None:
        """Note that the lease is closed. If the request joins again, it prefills again."""
        self.lease, self.prefilling, self.known = None, True, False
        self.committed = self.reach = self.unread = 0

    def begin_prompt(self, stop: int, final: bool) -> None:
        """Note that a step with prompt rows up to `stop` is in flight. If `final`, the request decodes from now on."""
        self.reach, self.prefilling = stop, not final
        self.unread += final

    def prefilled(self, stop: int, final: bool) -> None:
        """Note that the results of a step from `begin_prompt` were read: tokens up to `stop` are committed."""
        self.committed, self.known = stop, final
        self.unread -= final

    def most_of(self, shape: TreeShape) -> int:
        """The most tokens that a tree of this shape commits. The forced levels count only with a grammar."""
        return (shape.drafted if self.request.params.grammar is None else shape).num_steps + 1

    def begin_tree(self, shape: TreeShape) -> None:
        """Note that a step with a tree of this shape is in flight."""
        self.reach += self.most_of(shape)
        self.unread += 1

    def accepted_run(self, count: int, shape: TreeShape) -> None:
        """Note that a tree's results were read: the last bonus and accepted draft tokens, `count` in all, commit."""
        self.committed += count
        self.reach -= self.most_of(shape) - count  # `begin_tree` assumed that all levels are accepted
        self.unread -= 1

    def count(self, accept_len: int, drafted: int) -> None:
        """Count one verified tree."""
        self.steps += 1
        self.drafted += drafted
        self.accepted[accept_len - 1] += 1

    def speculation(self) -> SpeculationCounts | None:
        """The counts so far; None if no drafted node was ever verified."""
        return SpeculationCounts(self.steps, self.drafted, tuple(self.accepted)) if self.drafted else None
