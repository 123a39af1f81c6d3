"""The types of a request and its outputs.

They travel between processes (REST replica -> shard and back), so they hold plain Python values only:
no tensors, no tokenizers, no Ray.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal["nonfinite_logits", "slow_grammar"]
MOST = 2**31  # what numbers of tokens stay below
HOTTEST = 1e6  # a temperature beyond which bans, which are finite, would no longer be any
GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them overflows, and the answer is the same


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Changes to a request's logits before its tokens are drawn, as vLLM has them.

    `bias` (token, number) is added first. `repetition_penalty` divides positive logits of tokens that occur in prompt
    or output and multiplies negative ones; `frequency_penalty` is subtracted for every time that a token was generated,
    `presence_penalty` once. Of `allowed_token_ids` one has to come; of `bad_words_token_ids` none comes in a row, even
    if it begins in the prompt. Before `min_tokens` tokens no stop token and no EOS comes, and no stop string counts.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their documented range, naming the field."""
        checks = (
            (abs(self.presence_penalty) <= 2.0, "presence_penalty", "lie in [-2, 2]"),
            (abs(self.frequency_penalty) <= 2.0, "frequency_penalty", "lie in [-2, 2]"),
            (0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "lie in [0.01, 100]"),
            (all(abs(number) <= 100.0 for _, number in self.bias), "bias", "have numbers in [-100, 100]"),
            (self.allowed_token_ids != (), "allowed_token_ids", "hold a token"),
            (all(self.bad_words_token_ids), "bad_words_token_ids", "hold no empty word"),
            (0 <= self.min_tokens < MOST, "min_tokens", f"lie in [0, {MOST})"),
        )
        for ok, name, remedy in checks:
            if not ok:
                raise ValueError(f"{name} must {remedy}, got {getattr(self, name)!r}")

    def token_ids(self) -> Iterator[int]:
        """Every token that is named."""
        yield from (token for token, _ in self.bias)
        yield from self.allowed_token_ids or ()
        for word in self.bad_words_token_ids:
            yield from word


@dataclass(frozen=True, slots=True)
class RequestParams:
    """How one request wants its tokens chosen and when it ends.

    `temperature` 0, or below `GREEDY_BELOW`, is greedy. `top_k` 0 and `top_p` 1.0 and `min_p` 0.0 switch a filter off;
    the filters apply to the tempered distribution in the order top_k, top_p, min_p. `logprobs` is None for none, else
    how many top alternatives to report beside each chosen token (0 to 20); they are log-softmax of the target's raw
    logits. `prompt_logprobs` asks the same for the tokens of the prompt. With `max_tokens` 0 a request ends where its
    prompt does. `adjustments` is None for a request that has none. `grammar` is a compiled grammar (`cluster.grammar`)
    that the output follows. `return_tree` asks for the tree of each step beside its tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adjustments: LogitAdjustments | None = None
    grammar: str | None = None
    return_tree: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        """Refuse values outside their documented range, naming the field."""
        checks = (
            (0.0 <= self.temperature <= HOTTEST, "temperature", f"lie in [0, {HOTTEST:.0f}]"),
            (0 <= self.top_k < MOST, "top_k", f"be 0 (off) or positive, and below {MOST}"),
            (0.0 < self.top_p <= 1.0, "top_p", "lie in (0, 1]"),
            (0.0 <= self.min_p <= 1.0, "min_p", "lie in [0, 1]"),
            (0 <= self.max_tokens < MOST, "max_tokens", f"lie in [0, {MOST})"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "lie in [-2**63, 2**63)"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "lie in [0, 20]"),
            (self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs", "lie in [0, 20]"),
            (all(self.stop), "stop", "hold no empty string"),
        )
        for ok, name, remedy in checks:
            if not ok:
                raise ValueError(f"{name} must {remedy}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. Sample i of an `n > 1` call is its own Request with its own derived seed.

    `resumed_tokens` counts tokens at the end of `prompt_token_ids` that a client has already been sent: they are part
    of the output (stop strings, max_tokens and seeds treat them as generated) but are not sent again.
    `routed_dp_rank` pins the request to one data-parallel rank; None leaves the choice to the router. Only requests of
    the same `cache_salt` share computed prefixes; 0 is that of requests without one.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: RequestParams = field(default_factory=RequestParams)
    resumed_tokens: int = 0
    routed_dp_rank: int | None = None
    cache_salt: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's log-probability of one token; `top` are the likeliest tokens in its place, best first.

    `rank` counts the tokens that are at least as likely, itself included; it is 0 where nobody asked, as of an output.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What speculation did for one request, over its life.

    `accepted[j]` counts steps that accepted exactly j draft tokens, so sum(accepted) == steps and a step commits
    j + 1 tokens; `drafted` counts verified nodes other than roots.
    """

    steps: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens accepted over all steps."""
        return sum(j * count for j, count in enumerate(self.accepted))

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per step, bonus included; 0.0 before the first step."""
        return 1.0 + self.accepted_tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class StepTree:
    """The tree that one step verified for one request, node by node, parents before their children.

    Node 0 is the root, the last token before the step, and its own parent. The last `forced` nodes are what a grammar
    leaves no choice about, beyond what the draft proposed. `accepted` are the nodes of the accepted path, root first;
    `bonus` is the token after it. A request that ends in the step gets no more of these tokens than it asked for.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    bonus: int
    forced: int = 0


@dataclass(slots=True)
class SequenceOutput:
    """What one step gave one request: the tokens committed in it, and whether that ended the request.

    Nobody changes it; it is not frozen because that makes it three times as dear, for every request in every step.
    The final output of a request has `finish_reason` set and `speculation` filled in; `stop_reason` is the stop string
    or the stop/EOS token id that ended it. When a stop string ended it, `token_ids` includes the token that completed
    the string (the text layer cuts the text at the string). `prompt_logprobs` are of the prompt's tokens from the
    second on, and come once, with the first output. `error` explains finish_reason "error";
    `error_code` is set where the request itself caused the error, and then `error` may be shown to its client.
    `tree` is set where the request asked for it and a tree gave the tokens: the first token follows the prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    speculation: SpeculationCounts | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tree: StepTree | None = None


def signed_seed(seed: int) -> int:
    """A whole number in [-2**63, 2**64) modulo 2**64, as a seed in [-2**63, 2**63).

    Raises:
        ValueError: it is outside.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must lie in [-2**63, 2**64), got {seed}")
    return seed - 2**64 if seed >= 2**63 else seed


class Seeds:
    """Draws seeds for requests without one; the same `source` gives the same seeds in the same order."""

    def __init__(self, source: int | str) -> None:
        self._random = random.Random(source)

    def fill(self, request: Request) -> Request:
        """The request, with a seed if it had none, so that any of its tokens can be drawn again."""
        if request.params.seed is not None:
            return request
        return replace(request, params=replace(request.params, seed=self._random.getrandbits(62)))
