"""The requests this server honours, in OpenAI's names with vLLM's and SGLang's extensions.

What is not honoured is in `.fields`; what a prompt or a message may be, in `.content`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, PlainValidator

from cluster.api.core.constraints import FIELDS, NAMES, OutputConstraint, constraint_of
from cluster.api.core.content import Strict, Text, list_of_prompts, list_of_stops
from cluster.api.core.conversation import ConversationFields, Messages
from cluster.api.core.errors import ApiError, shown
from cluster.api.core.penalties import PenaltyFields
from cluster.api.core.service import ModelInfo, RequestLimits
from cluster.request import GREEDY_BELOW, RequestParams, signed_seed

MAX_TEMPERATURE = 100.0
NO_SEED = -1  # what clients of vLLM send for none
Prompts = str | list[str] | list[int] | list[list[int]]
Stops = str | list[str]
# A client may send lists of any length, so their validation ends at the first mistake.
Ids = Annotated[list[int], FailFast()]


def check_model(model: ModelInfo, asked: str | None) -> None:
    """Refuse a model name other than the served one; a missing name is accepted.

    Raises:
        ApiError: 404.
    """
    if asked is not None and asked != model.model_id:
        message = f"the model {shown(asked)} does not exist; this server has {model.model_id!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")


class StreamOptions(Strict):
    """`continuous_usage_stats` puts the usage so far into every chunk. `include_obfuscation` is taken and does nothing:
    it adds noise to hide how long chunks are, of which the tokens of a step tell more.
    """

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


def too_long(model: ModelInfo, prompt: int, wanted: int) -> str:
    """That a request does not fit, in the sentences by which clients know it: OpenAI's, which LiteLLM looks for, and
    Anthropic's two, by which its clients shorten a prompt or ask for less.
    """
    has = f"this model's maximum context length is {model.context_length} tokens"
    if model.room < model.context_length:
        has = f"this model's maximum context length is {model.room} tokens here, for which the KV cache has room"
    if prompt >= model.room:
        return f"prompt is too long: {prompt} tokens > {model.room - 1} maximum, as {has}"
    return f"input length and `max_tokens` exceed context limit: {prompt} + {wanted} > {model.room}, as {has}"


class GenerationFields(PenaltyFields):
    """What both endpoints share."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[Text], FailFast(), BeforeValidator(list_of_stops, json_schema_input_type=Stops)] = Field(
        default_factory=list
    )
    stop_token_ids: Ids = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, json_schema_extra={"not": {"const": 0}})
    return_tree: bool = False
    routed_dp_rank: int | None = Field(default=None, ge=0)
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,64}$")
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def filled(self, defaults: Mapping[str, float]) -> Self:
        """The same, with `defaults` for what was left out."""
        missing = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing) if missing else self

    def top_logprobs_wanted(self) -> int | None:
        """How many alternatives beside each token's log-probability; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def samples(self) -> int:
        """How many outputs each prompt gets, whether or not all of them are answered."""
        return self.n

    def prompt_logprobs_wanted(self) -> int | None:
        """How many alternatives beside the log-probability of each token of the prompt; None for none of these."""
        return self.prompt_logprobs

    def kept(self, ids: tuple[int, ...], room: int, default_tokens: int) -> tuple[int, ...]:
        """The tokens of a prompt that are left by `truncate_prompt_tokens`: its last ones. With -1 they are as many as
        fit into `room` tokens beside the output, or where that may have any length, beside one token.
        """
        most = self.truncate_prompt_tokens
        if most is not None and most < 0:
            asked = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
            least = default_tokens if default_tokens < room else 1
            most = max(1, room - (least if asked is None else asked))
        return ids if most is None else ids[-most:]

    def sequences(self) -> int:
        """How many sequences are asked for."""
        return self.n

    def constraint(self) -> OutputConstraint | None:
        """What is asked of the form of the output.

        Raises:
            ApiError: as `constraint_of`.
        """
        return constraint_of({name: getattr(self, name) for name in (*NAMES, *FIELDS)})

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check what the types of the fields cannot.

        Raises:
            ApiError: 404 for another model, 400 for a value beyond a limit or fields that contradict each other.
        """
        check_model(model, self.model)
        self.check_adjustments(model.vocab_size, limits)
        tops = self.top_logprobs_wanted()
        field = "logprobs" if isinstance(self, CompletionRequest) else "top_logprobs"
        scores, cut = self.prompt_logprobs, self.truncate_prompt_tokens
        long_stop = max((len(stop) for stop in self.stop), default=0)
        vocab = model.vocab_size
        checks = (
            (self.n <= limits.choices, "n", f"must be at most {limits.choices}, got {self.n}"),
            (len(self.stop) <= limits.stops, "stop", f"at most {limits.stops} strings, got {len(self.stop)}"),
            (all(self.stop), "stop", "an empty string would stop everything; leave it out"),
            (long_stop <= limits.stop_characters, "stop", f"at most {limits.stop_characters} characters per string"),
            (
                len(self.stop_token_ids) <= limits.stop_token_ids,
                "stop_token_ids",
                f"at most {limits.stop_token_ids} ids",
            ),
            (
                all(0 <= token < vocab for token in self.stop_token_ids),
                "stop_token_ids",
                f"ids must lie in [0, {vocab})",
            ),
            (tops is None or tops <= limits.logprobs, field, f"must be at most {limits.logprobs}, got {tops}"),
            (self.stream_options is None or self.stream, "stream_options", "only allowed when stream is true"),
            (
                scores is None or scores <= limits.logprobs,
                "prompt_logprobs",
                f"must be at most {limits.logprobs}, got {scores}",
            ),
            (
                scores is None or not self.stream,
                "prompt_logprobs",
                "not in a stream; leave out stream, or send echo and logprobs to /v1/completions",
            ),
            (cut != 0, "truncate_prompt_tokens", "must be positive, or -1 for as many tokens as fit, got 0"),
            (
                not self.return_tree or (self.stream and self.sequences() == 1),
                "return_tree",
                "only allowed when stream is true, n is 1 and there is one prompt",
            ),
            (
                None in (self.max_tokens, self.max_completion_tokens) or self.max_tokens == self.max_completion_tokens,
                "max_tokens",
                f"differs from max_completion_tokens ({self.max_completion_tokens}); send one of them",
            ),
        )
        for ok, name, message in checks:
            if not ok:
                raise ApiError(f"{name}: {message}", param=name, code="invalid_value")

    def sampling(self, model: ModelInfo, prompt_tokens: int, default_tokens: int, prompt: str) -> RequestParams:
        """Sampling settings for one prompt; `prompt` is the field to blame when it leaves no room by itself. Without
        `max_tokens` the output may have `default_tokens`, or as many as fit. Adjustments are left to the caller.

        Raises:
            ApiError: 400 when prompt and output do not fit into the context, or the KV cache, together, or the output
                cannot have `min_tokens`.
        """
        room = model.room - prompt_tokens
        asked = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        wanted = min(default_tokens, max(room, 1)) if asked is None else asked
        if wanted > room:
            param = prompt if room < 1 else ("max_completion_tokens" if self.max_tokens is None else "max_tokens")
            raise ApiError(
                f"{param}: {too_long(model, prompt_tokens, wanted)}; "
                + ("shorten the prompt" if room < 1 else f"ask for at most {room}"),
                param=param,
                code="context_length_exceeded",
            )
        if self.min_tokens > wanted:
            message = f"min_tokens: must be at most max_tokens ({wanted}), got {self.min_tokens}"
            raise ApiError(message, param="min_tokens", code="invalid_value")
        return RequestParams(
            temperature=0.0 if self.temperature < GREEDY_BELOW or self.top_p == 0 else self.temperature,
            top_k=0 if self.top_k < 0 or self.top_k >= model.vocab_size else self.top_k,
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            max_tokens=wanted,
            stop=tuple(dict.fromkeys(self.stop)),
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids)),
            ignore_eos=self.ignore_eos,
            logprobs=self.top_logprobs_wanted(),
            prompt_logprobs=self.prompt_logprobs_wanted(),
            return_tree=self.return_tree,
        )

    def seed_of(self, sample: int) -> int | None:
        """The seed of sample i of a prompt: the request's own for the first, one derived from it for the others.

        None without a seed, or with -1, as vLLM has it: the router draws one for each sequence that it admits, from the
        server's `random_seed`. Other seeds are taken modulo 2**64, so 2**64 - 1 is a seed, the one whose bits -1 has.
        """
        if self.seed is None or self.seed == NO_SEED:
            return None
        seed = signed_seed(self.seed)
        if sample == 0:
            return seed
        digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


class CompletionRequest(GenerationFields):
    """The body of /v1/completions; `logprobs` is the number of alternatives to report.

    With `echo` the text and its log-probabilities begin with those of the prompt. Of `best_of` outputs the `n` of the
    highest log-probability are answered. `max_tokens` 0 asks for nothing but the prompt.
    """

    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1)
    prompt: Annotated[list[str | list[int]], PlainValidator(list_of_prompts, json_schema_input_type=Prompts)]
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True

    def top_logprobs_wanted(self) -> int | None:
        """The value of `logprobs` itself."""
        return self.logprobs

    @property
    def samples(self) -> int:
        """The value of `best_of`, or of `n` without it."""
        return self.best_of or self.n

    def prompt_logprobs_wanted(self) -> int | None:
        """As many as the prompt's own field or its echo needs."""
        echoed = self.logprobs if self.echo else None
        return max((most for most in (self.prompt_logprobs, echoed) if most is not None), default=None)

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check `best_of` too."""
        super().check(model, limits)
        best, n = self.best_of or self.n, self.n
        checks = (
            (best <= limits.choices, f"must be at most {limits.choices}, got {best}"),
            (best >= n, f"must be at least n ({n}), got {best}"),
            (best == n or not self.stream, "which output is best is known at the end; leave out best_of or stream"),
        )
        for ok, message in checks:
            if not ok:
                raise ApiError(f"best_of: {message}", param="best_of", code="invalid_value")

    def sampling(self, model: ModelInfo, prompt_tokens: int, default_tokens: int, prompt: str) -> RequestParams:
        """As in `GenerationFields`; to choose between outputs, their log-probabilities are needed."""
        params = super().sampling(model, prompt_tokens, default_tokens, prompt)
        return replace(params, logprobs=params.logprobs or 0) if self.samples > self.n else params

    def sequences(self) -> int:
        """`n` of each prompt."""
        return self.n * len(self.prompt)


class ChatRequest(ConversationFields, GenerationFields):
    """The body of /v1/chat/completions. What is thought is left out without `include_reasoning`, and is a part of the
    answer's text without `separate_reasoning`.
    """

    messages: Messages = Field(min_length=1)
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = False

    def top_logprobs_wanted(self) -> int | None:
        """None unless `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check the messages and the tools too."""
        super().check(model, limits)
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs: needs logprobs: true", param="top_logprobs", code="invalid_value")
        self.check_conversation(self.messages, limits.messages, limits.tools)


class TokenizeRequest(ConversationFields):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = None

    @property
    def special(self) -> bool:
        """Whether special tokens are added; by default to a prompt, as templates write their own."""
        return not self.messages if self.add_special_tokens is None else self.add_special_tokens

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """The request and warnings; exactly one of prompt and messages has to be there."""
        fields, warnings = super().read(body)
        if (fields.prompt is None) == (not fields.messages):
            raise ApiError("prompt: send either prompt or messages", param="prompt", code="invalid_value")
        return fields, warnings

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check what the types of the fields cannot; see `GenerationFields.check`."""
        check_model(model, self.model)
        if self.messages:
            self.check_conversation(self.messages, limits.messages, limits.tools)


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids
