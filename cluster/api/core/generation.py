"""The fields that steer a generation, with the names that OpenAI, vLLM and SGLang use; the body of /v1/completions."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, FailFast, Field, PlainValidator

from cluster.api.core.errors import ApiError, invalid_value, truncated_repr
from cluster.api.core.fields import StrictModel, Text, list_of_prompts, list_of_stops, require
from cluster.api.core.limits import ModelInfo, RequestLimits
from cluster.api.core.options import Speculation, StreamOptions
from cluster.request import GREEDY_BELOW, TOKEN_COUNT_LIMIT, LogitAdjustments, RequestParams, signed_seed
from cluster.tokenizer.tokenizer import TextTokenizer

MAX_BIAS = 100  # the largest absolute value in logit_bias, as at OpenAI


def _read_biases(value: Any) -> Any:
    """Return `logit_bias` with integer keys (strings in JSON). Raise ValueError at the first wrong entry."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must map token ids to numbers, got {truncated_repr(value)}")
    biases = {}
    for name, bias in value.items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10):
            raise ValueError(f"must map token ids to numbers, got the id {truncated_repr(name)}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"{name}: must be a number in [-{MAX_BIAS}, {MAX_BIAS}], got {truncated_repr(bias)}")
        biases[int(name)] = float(bias)
    return biases


Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class PenaltyFields(StrictModel):
    """Penalties, biases and banned tokens; the default of each field means off."""

    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_read_biases, json_schema_input_type=dict[str, Bias])] = (
        Field(default_factory=dict)
    )
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, min_length=1)
    bad_words: Annotated[list[Text], FailFast()] = Field(default_factory=list)
    min_tokens: int = Field(default=0, ge=0, lt=TOKEN_COUNT_LIMIT)

    def check_logit_adjustments(self, vocab_size: int, limits: RequestLimits) -> None:
        """Check what the types of these fields cannot express: token ids and limits.

        Raises:
            ApiError: 400 that names the field.
        """
        allowed = self.allowed_token_ids
        longest = max((len(word) for word in self.bad_words), default=0)
        require(
            (all(t < vocab_size for t in self.logit_bias), "logit_bias", f"ids must lie in [0, {vocab_size})"),
            (len(allowed) <= vocab_size, "allowed_token_ids", f"at most {vocab_size} ids"),
            (all(0 <= t < vocab_size for t in allowed), "allowed_token_ids", f"ids must lie in [0, {vocab_size})"),
            (len(self.bad_words) <= limits.bad_words, "bad_words", f"at most {limits.bad_words} words"),
            (longest <= limits.stop_characters, "bad_words", f"at most {limits.stop_characters} characters per word"),
            (all(word.strip() for word in self.bad_words), "bad_words", "an empty word cannot be banned; leave it out"),
        )

    def logit_adjustments(self, tokenizer: TextTokenizer | None, vocab_size: int) -> LogitAdjustments | None:
        """Return the requested adjustments, or None if there are none.

        A bad word is banned in two tokenizations: at the start of a text, and after a space. A tokenization with an id
        of `vocab_size` or more is skipped, because the model cannot generate it. If `tokenizer` is None, no bad word is
        banned.
        """
        word_tokens = []
        for word in self.bad_words if tokenizer is not None else ():
            assert tokenizer is not None
            word_tokens += [tuple(tokenizer.encode(prefix + word.lstrip(), False)) for prefix in ("", " ")]
        adjustments = LogitAdjustments(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            bias=tuple((token, bias) for token, bias in self.logit_bias.items() if bias),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids)) or None,
            bad_words_token_ids=tuple(dict.fromkeys(word for word in word_tokens if word and max(word) < vocab_size)),
            min_tokens=self.min_tokens,
        )
        return None if adjustments == LogitAdjustments() else adjustments


MAX_TEMPERATURE = 100.0
NO_SEED = -1  # what vLLM's clients send for "no seed"
Prompts = str | list[str] | list[int] | list[list[int]]
Stops = str | list[str]
# Validation stops at the first wrong item, since a client may send a list of any length.
TokenIds = Annotated[list[int], FailFast()]


def check_model(model: ModelInfo, requested_model: str | None) -> None:
    """Refuse a model name other than the served one; a missing name is accepted.

    Raises:
        ApiError: 404.
    """
    if requested_model is not None and requested_model != model.model_id:
        message = f"the model {truncated_repr(requested_model)} does not exist; this server has {model.model_id!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def context_exceeded_message(model: ModelInfo, prompt_tokens: int, output_tokens: int) -> str:
    """Return the message for a request of `prompt_tokens` + `output_tokens` tokens, which does not fit. Clients search
    the message for known sentences. LiteLLM searches for OpenAI's sentence. Anthropic's clients search for two
    sentences of Anthropic's API, and then shorten the prompt or lower `max_tokens`.
    """
    limit_text = f"this model's maximum context length is {model.context_length} tokens"
    if model.max_request_tokens < model.context_length:
        limit_text = (
            f"this model's maximum context length is {model.max_request_tokens} tokens here, for which the KV cache "
            "has room"
        )
    if prompt_tokens >= model.max_request_tokens:
        return f"prompt is too long: {prompt_tokens} tokens > {model.max_request_tokens - 1} maximum, as {limit_text}"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {output_tokens} > "
        f"{model.max_request_tokens}, as {limit_text}"
    )


class GenerationFields(PenaltyFields):
    """The fields that /v1/completions and /v1/chat/completions share."""

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
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, json_schema_extra={"not": {"const": 0}})
    return_tree: bool = False
    speculation: Speculation | None = None
    routed_dp_rank: int | None = Field(default=None, ge=0)
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,64}$")
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """Return this request with `defaults` for the fields that the client left out."""
        missing_values = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing_values) if missing_values else self

    def requested_top_logprobs(self) -> int | None:
        """Return the number of alternatives to report for each output token, or None if the client wants no
        log-probabilities of output tokens.
        """
        raise NotImplementedError

    @property
    def samples_per_prompt(self) -> int:
        """The number of outputs generated for each prompt. With `best_of`, only the best `n` of them are returned."""
        return self.n

    def requested_prompt_logprobs(self) -> int | None:
        """Return the number of alternatives to report for each prompt token, or None if the client wants no
        log-probabilities of prompt tokens.
        """
        return self.prompt_logprobs

    @property
    def max_output_tokens(self) -> int | None:
        """The most output tokens that the client allows, or None if it set no limit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def truncated_prompt(self, ids: tuple[int, ...], max_request_tokens: int, default_tokens: int) -> tuple[int, ...]:
        """Return the last `truncate_prompt_tokens` tokens of a prompt, or the whole prompt if that field is not set.

        -1 keeps as many tokens as fit into `max_request_tokens` together with the output. The length of the output is
        `max_tokens` if it is set, else `default_tokens`. If `max_tokens` is not set and `default_tokens` fills
        `max_request_tokens`, one output token is assumed.
        """
        max_prompt_tokens = self.truncate_prompt_tokens
        if max_prompt_tokens is not None and max_prompt_tokens < 0:
            requested_tokens = self.max_output_tokens
            assumed_tokens = default_tokens if default_tokens < max_request_tokens else 1
            max_prompt_tokens = max(
                1, max_request_tokens - (assumed_tokens if requested_tokens is None else requested_tokens)
            )
        return ids if max_prompt_tokens is None else ids[-max_prompt_tokens:]

    def returned_sequences(self) -> int:
        """Return the number of sequences in the answer: `n` for each prompt. Here there is one prompt."""
        return self.n

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check what the field types cannot express: limits, and fields that contradict each other.

        Raises:
            ApiError: 404 for another model, 400 for a value beyond a limit or fields that contradict each other.
        """
        check_model(model, self.model)
        self.check_logit_adjustments(model.vocab_size, limits)
        vocab, stops, ids = model.vocab_size, self.stop, self.stop_token_ids
        top_logprobs, prompt_logprobs = self.requested_top_logprobs(), self.prompt_logprobs
        top_logprobs_field = "logprobs" if isinstance(self, CompletionRequest) else "top_logprobs"
        longest = max((len(stop) for stop in stops), default=0)
        no_stream_message = "not in a stream; leave out stream, or send echo and logprobs to /v1/completions"
        is_single_stream = self.stream and self.returned_sequences() == 1
        tree_message = "only allowed when stream is true, n is 1 and there is one prompt"
        sent_limits = (self.max_tokens, self.max_completion_tokens)
        conflict_message = f"differs from max_completion_tokens ({sent_limits[1]}); send one of them"
        truncation_message = "must be positive, or -1 for as many tokens as fit, got 0"
        too_many = f"must be at most {limits.logprobs}, got"
        require(
            (self.n <= limits.choices, "n", f"must be at most {limits.choices}, got {self.n}"),
            (len(stops) <= limits.stops, "stop", f"at most {limits.stops} strings, got {len(stops)}"),
            (all(stops), "stop", "an empty string would stop everything; leave it out"),
            (longest <= limits.stop_characters, "stop", f"at most {limits.stop_characters} characters per string"),
            (len(ids) <= limits.stop_token_ids, "stop_token_ids", f"at most {limits.stop_token_ids} ids"),
            (all(0 <= token < vocab for token in ids), "stop_token_ids", f"ids must lie in [0, {vocab})"),
            (
                top_logprobs is None or top_logprobs <= limits.logprobs,
                top_logprobs_field,
                f"{too_many} {top_logprobs}",
            ),
            (self.stream_options is None or self.stream, "stream_options", "only allowed when stream is true"),
            (
                prompt_logprobs is None or prompt_logprobs <= limits.logprobs,
                "prompt_logprobs",
                f"{too_many} {prompt_logprobs}",
            ),
            (prompt_logprobs is None or not self.stream, "prompt_logprobs", no_stream_message),
            (self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", truncation_message),
            (not self.return_tree or is_single_stream, "return_tree", tree_message),
            (None in sent_limits or sent_limits[0] == sent_limits[1], "max_tokens", conflict_message),
        )

    def sampling_params(
        self, model: ModelInfo, prompt_tokens: int, default_tokens: int, prompt_path: str
    ) -> RequestParams:
        """Return the sampling parameters for one prompt; the caller adds seed, logit adjustments and grammar.

        `prompt_path` is the path of the prompt's field; the error names it if the prompt alone fills the context. If
        `max_tokens` is not set, the output may have `default_tokens` tokens, or fewer if fewer fit.

        Raises:
            ApiError: 400 if prompt and output together exceed the context or the KV cache, or if `min_tokens` exceeds
                the limit of output tokens.
        """
        available_tokens = model.max_request_tokens - prompt_tokens
        requested_tokens = self.max_output_tokens
        max_tokens = min(default_tokens, max(available_tokens, 1)) if requested_tokens is None else requested_tokens
        if max_tokens > available_tokens:
            param = (
                prompt_path
                if available_tokens < 1
                else ("max_completion_tokens" if self.max_tokens is None else "max_tokens")
            )
            remedy = "shorten the prompt" if available_tokens < 1 else f"ask for at most {available_tokens}"
            raise invalid_value(
                param,
                f"{context_exceeded_message(model, prompt_tokens, max_tokens)}; {remedy}",
                "context_length_exceeded",
            )
        if self.min_tokens > max_tokens:
            raise invalid_value("min_tokens", f"must be at most max_tokens ({max_tokens}), got {self.min_tokens}")
        return RequestParams(
            temperature=0.0 if self.temperature < GREEDY_BELOW or self.top_p == 0 else self.temperature,
            top_k=0 if self.top_k < 0 or self.top_k >= model.vocab_size else self.top_k,
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            max_tokens=max_tokens,
            stop=tuple(dict.fromkeys(self.stop)),
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids)),
            ignore_eos=self.ignore_eos,
            logprobs=self.requested_top_logprobs(),
            prompt_logprobs=self.requested_prompt_logprobs(),
            return_tree=self.return_tree,
            max_draft_tokens=self._max_draft_tokens,
        )

    @property
    def _max_draft_tokens(self) -> int | None:
        if self.speculation is None:
            return None
        return self.speculation.max_draft_tokens if self.speculation.enabled else 0

    def seed_of(self, sample: int) -> int | None:
        """Return the seed of output number `sample` of a prompt. Output 0 has the request's seed; others have derived
        seeds.

        Return None if the request has no seed, or the seed -1, which vLLM also treats as no seed. The server then draws
        a seed for each sequence, from its setting `random_seed`. Other seeds are taken modulo 2**64. So 2**64 - 1 is a
        valid seed, although it has the same bits as -1.
        """
        if self.seed is None or self.seed == NO_SEED:
            return None
        seed = signed_seed(self.seed)
        if sample == 0:
            return seed
        digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1  # 63 bits: a signed 64-bit seed


class CompletionRequest(GenerationFields):
    """The body of /v1/completions; `logprobs` is the number of alternatives to report.

    With `echo` each output begins with the text and the log-probabilities of its prompt. For each prompt `best_of`
    outputs are generated, and the `n` outputs with the highest total log-probability are returned. With `max_tokens` 0
    only the prompt is processed.
    """

    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1)
    prompt: Annotated[list[str | list[int]], PlainValidator(list_of_prompts, json_schema_input_type=Prompts)]
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True

    def requested_top_logprobs(self) -> int | None:
        """Return the value of `logprobs`."""
        return self.logprobs

    @property
    def samples_per_prompt(self) -> int:
        """The value of `best_of`, or the value of `n` if `best_of` is not set."""
        return self.best_of or self.n

    def requested_prompt_logprobs(self) -> int | None:
        """Return the number of alternatives to report for each prompt token: the larger of `prompt_logprobs` and, with
        `echo`, `logprobs`. Return None if there is no such number.
        """
        echo_logprobs = self.logprobs if self.echo else None
        return max((count for count in (self.prompt_logprobs, echo_logprobs) if count is not None), default=None)

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check the fields of `GenerationFields`, and `best_of`; raise the same errors as `GenerationFields.check`."""
        super().check(model, limits)
        best_of, n = self.best_of or self.n, self.n
        stream_message = "which output is best is known at the end; leave out best_of or stream"
        require(
            (best_of <= limits.choices, "best_of", f"must be at most {limits.choices}, got {best_of}"),
            (best_of >= n, "best_of", f"must be at least n ({n}), got {best_of}"),
            (best_of == n or not self.stream, "best_of", stream_message),
        )

    def sampling_params(
        self, model: ModelInfo, prompt_tokens: int, default_tokens: int, prompt_path: str
    ) -> RequestParams:
        """Return the parameters of `GenerationFields.sampling_params`. If `best_of` exceeds `n`, the engine also
        computes the log-probabilities of the outputs, because they rank the outputs.
        """
        params = super().sampling_params(model, prompt_tokens, default_tokens, prompt_path)
        return replace(params, logprobs=params.logprobs or 0) if self.samples_per_prompt > self.n else params

    def returned_sequences(self) -> int:
        """Return the number of sequences in the answer: `n` for each prompt."""
        return self.n * len(self.prompt)


class DetokenizeRequest(StrictModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
