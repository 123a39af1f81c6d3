"""The types of a request and of its outputs.

They travel between processes (replica -> rank and back), so they hold plain Python values only: no tensors, no
tokenizers, no Ray.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal["nonfinite_logits", "slow_grammar"]
TOKEN_COUNT_LIMIT = 2**31  # exclusive upper bound of token counts
MAX_TEMPERATURE = 1e6  # logits are divided by the temperature, and a ban (a logit of -1e30) must stay effective
GREEDY_BELOW = 1e-5  # lower temperatures are served as greedy: dividing by them overflows, and the result is the same


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Changes to the logits of a request before its tokens are drawn. They have the meaning that vLLM gives them.

    - `bias`: (token, number) pairs. The numbers are added to the logits first.
    - `repetition_penalty`: for each token of prompt or output, divide a positive logit by it and multiply a negative
      logit by it.
    - `frequency_penalty`, `presence_penalty`: for each generated token, subtract `frequency_penalty` times its count,
      and `presence_penalty` once.
    - `allowed_token_ids`: only these tokens are generated; None allows all.
    - `bad_words_token_ids`: sequences of tokens. None of them is ever completed, even if it begins in the prompt.
    - `min_tokens`: until this number of tokens is generated, stop tokens and EOS are banned and stop strings ignored.
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
            (0 <= self.min_tokens < TOKEN_COUNT_LIMIT, "min_tokens", f"lie in [0, {TOKEN_COUNT_LIMIT})"),
        )
        for ok, name, requirement in checks:
            if not ok:
                raise ValueError(f"{name} must {requirement}, got {getattr(self, name)!r}")

    def token_ids(self) -> Iterator[int]:
        """All token ids in `bias`, `allowed_token_ids` and `bad_words_token_ids`, for range checks."""
        yield from (token for token, _ in self.bias)
        yield from self.allowed_token_ids or ()
        for word in self.bad_words_token_ids:
            yield from word


@dataclass(frozen=True, slots=True)
class RequestParams:
    """How the tokens of one request are chosen, and when it ends.

    A `temperature` below `GREEDY_BELOW` is greedy. Filters apply after the temperature, in the order top_k, top_p,
    min_p; `top_k` 0, `top_p` 1.0 and `min_p` 0.0 mean no filter. If `logprobs` is None, no log-probabilities are
    returned. If it is n (0 to 20), those of each generated token and of the n likeliest tokens are returned:
    log-softmax of the target's raw logits. `prompt_logprobs` is the same for the tokens of the prompt. With
    `max_tokens` 0 a request ends with its prompt. `grammar` is a compiled grammar (`cluster.grammar`) that the output
    follows. With `return_tree`, each output of a decoding step has the tree that the step verified. A step accepts at
    most `max_draft_tokens` drafted tokens for the request (None: no limit); with 0, the request gets one token in each
    step, as without speculation. A request without a `seed` is given one when it is submitted.
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
    max_draft_tokens: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        """Refuse values outside their documented range, naming the field."""
        checks = (
            (0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"lie in [0, {MAX_TEMPERATURE:.0f}]"),
            (0 <= self.top_k < TOKEN_COUNT_LIMIT, "top_k", f"be 0 (off) or positive, and below {TOKEN_COUNT_LIMIT}"),
            (0.0 < self.top_p <= 1.0, "top_p", "lie in (0, 1]"),
            (0.0 <= self.min_p <= 1.0, "min_p", "lie in [0, 1]"),
            (0 <= self.max_tokens < TOKEN_COUNT_LIMIT, "max_tokens", f"lie in [0, {TOKEN_COUNT_LIMIT})"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "lie in [-2**63, 2**63)"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "lie in [0, 20]"),
            (self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs", "lie in [0, 20]"),
            (all(self.stop), "stop", "hold no empty string"),
            (
                self.max_draft_tokens is None or 0 <= self.max_draft_tokens < TOKEN_COUNT_LIMIT,
                "max_draft_tokens",
                f"lie in [0, {TOKEN_COUNT_LIMIT})",
            ),
        )
        for ok, name, requirement in checks:
            if not ok:
                raise ValueError(f"{name} must {requirement}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. Sample i of an API call with `n > 1` is a Request of its own, with a derived seed.

    The last `resumed_tokens` of `prompt_token_ids` are output that the client has received before (a resumed stream).
    These tokens count as generated for stop strings, max_tokens and seeds, but are not sent again. `routed_dp_rank`
    pins the request to one data-parallel rank; if it is None, the router chooses. Requests share cached prefixes only
    with requests of the same `cache_salt`; 0 stands for no salt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: RequestParams = field(default_factory=RequestParams)
    resumed_tokens: int = 0
    routed_dp_rank: int | None = None
    cache_salt: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's log-probability of one token. `top` are the most likely tokens at its position, best first.

    For a prompt token, `rank` counts the tokens that are at least as likely, including the token itself. For a
    generated token it is 0.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Counters of speculation of one request, from its admission to its end.

    `steps` counts the steps that verified a tree for the request, and `drafted` the nodes of these trees without the
    roots. `accepted[j]` counts the steps that gave the request j + 1 tokens: j accepted nodes and the bonus token.
    sum(accepted) == steps. Tokens after the end of the request do not count.
    """

    steps: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens accepted in all steps."""
        return sum(j * count for j, count in enumerate(self.accepted))

    @property
    def accept_length(self) -> float:
        """Mean number of tokens per step with a tree, bonus token included; 0.0 before the first such step."""
        return 1.0 + self.accepted_tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class StepTree:
    """The tree that one step verified for one request. A node comes after its parent.

    Node 0 is the root: the last token before the step. The root is its own parent. The last `forced` nodes were added
    by a grammar that allows only one continuation. `accepted` are the nodes of the accepted path, root first; `bonus`
    is the token after it. If the request ends in this step, its output may have fewer of these tokens.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    bonus: int
    forced: int = 0


@dataclass(slots=True)
class SequenceOutput:
    """The tokens that one step committed for one request, and whether the request has ended.

    Treat an output as immutable. The class is not frozen, because making a frozen object takes three times as long, and
    each step makes one for each request. The last output of a request has `finish_reason` and, if a tree was verified
    for the request, `speculation`. `stop_reason` is the stop string or the stop/EOS token id that ended the request. If
    a stop string ended it, `token_ids` includes the token that completed the string (the text layer cuts the text
    there). `cached_tokens` counts the prompt tokens whose KV was in the cache. Only the first output has
    `prompt_logprobs`: those of the prompt's tokens from the second on. `error` explains finish_reason "error";
    `error_code` is set if the request itself caused the error, and only then may clients see `error`. `tree` is set if
    the request has `return_tree` and the tokens are those of a decoding step. The first token after a prompt is chosen
    without a tree.
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
    """Return `seed` as a signed 64-bit number, in [-2**63, 2**63). A `seed` of 2**63 or more is reduced by 2**64.

    Raises:
        ValueError: `seed` is not in [-2**63, 2**64).
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must lie in [-2**63, 2**64), got {seed}")
    return seed - 2**64 if seed >= 2**63 else seed


class Seeds:
    """Draws seeds for requests without a seed. The same `source` gives the same seeds in the same order."""

    def __init__(self, source: int | str) -> None:
        self._random = random.Random(source)

    def fill(self, request: Request) -> Request:
        """Return the request, with a seed if it had none. A seed lets the same tokens be drawn after a retraction."""
        if request.params.seed is not None:
            return request
        return replace(request, params=replace(request.params, seed=self._random.getrandbits(62)))
