"""The fields that steer a generation, named as by OpenAI, vLLM and SGLang, and the body of /v1/completions."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, PlainValidator

from cluster.api.core.errors import ApiError, shown, wrong
from cluster.api.core.fields import Strict, Text, list_of_prompts, list_of_stops, require
from cluster.api.core.limits import ModelInfo, RequestLimits
from cluster.request import GREEDY_BELOW, MOST, LogitAdjustments, RequestParams, signed_seed
from cluster.tokenizer.tokenizer import TextTokenizer

MOST_BIAS = 100  # the largest absolute value in logit_bias, as at OpenAI


def _biases(value: Any) -> Any:
    """Return `logit_bias` with integer keys, which JSON can only write as strings; stops at the first wrong entry."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must map token ids to numbers, got {shown(value)}")
    made = {}
    for name, bias in value.items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10):
            raise ValueError(f"must map token ids to numbers, got the id {shown(name)}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ValueError(f"{name}: must be a number in [-{MOST_BIAS}, {MOST_BIAS}], got {shown(bias)}")
        made[int(name)] = float(bias)
    return made


Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


class PenaltyFields(Strict):
    """Penalties, biases and banned tokens; the default of each field means off."""

    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases, json_schema_input_type=dict[str, Bias])] = Field(
        default_factory=dict
    )
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, min_length=1)
    bad_words: Annotated[list[Text], FailFast()] = Field(default_factory=list)
    min_tokens: int = Field(default=0, ge=0, lt=MOST)

    def check_adjustments(self, vocab_size: int, limits: RequestLimits) -> None:
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

    def adjustments(self, tokenizer: TextTokenizer | None, vocab_size: int) -> LogitAdjustments | None:
        """Return the requested adjustments, or None if there are none. A bad word is banned in two tokenizations: at
        the start of a text, and after a space. A tokenization with an id of `vocab_size` or more is skipped, because
        the model cannot generate it.
        """
        words = []
        for word in self.bad_words if tokenizer is not None else ():
            assert tokenizer is not None
            words += [tuple(tokenizer.encode(start + word.lstrip(), False)) for start in ("", " ")]
        made = LogitAdjustments(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            bias=tuple((token, bias) for token, bias in self.logit_bias.items() if bias),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids)) or None,
            bad_words_token_ids=tuple(dict.fromkeys(word for word in words if word and max(word) < vocab_size)),
            min_tokens=self.min_tokens,
        )
        return None if made == LogitAdjustments() else made


MAX_TEMPERATURE = 100.0
NO_SEED = -1  # what vLLM's clients send for "no seed"
Prompts = str | list[str] | list[int] | list[list[int]]
Stops = str | list[str]
# Validation stops at the first wrong item, since a client may send a list of any length.
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
    """`stream_options`. `continuous_usage_stats` puts the usage so far into every chunk. `include_obfuscation` asks for
    padding that hides the length of a chunk. It is accepted and does nothing: the number of tokens in a step reveals
    more than the length.
    """

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


def too_long(model: ModelInfo, prompt: int, wanted: int) -> str:
    """Return the message for a request that does not fit: `prompt` + `wanted` tokens. Clients search for known
    sentences in it. LiteLLM looks for OpenAI's. Anthropic's clients look for Anthropic's two, to shorten the prompt or
    lower `max_tokens`.
    """
    has = f"this model's maximum context length is {model.context_length} tokens"
    if model.room < model.context_length:
        has = f"this model's maximum context length is {model.room} tokens here, for which the KV cache has room"
    if prompt >= model.room:
        return f"prompt is too long: {prompt} tokens > {model.room - 1} maximum, as {has}"
    return f"input length and `max_tokens` exceed context limit: {prompt} + {wanted} > {model.room}, as {has}"


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
        """Return this request with `defaults` for the fields that the client left out."""
        missing = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing) if missing else self

    def top_logprobs_wanted(self) -> int | None:
        """The number of alternatives to report for each output token, or None if no log-probabilities are wanted."""
        raise NotImplementedError

    @property
    def samples(self) -> int:
        """The number of outputs generated for each prompt. With `best_of`, only the best `n` of them are returned."""
        return self.n

    def prompt_logprobs_wanted(self) -> int | None:
        """The number of alternatives to report for each prompt token, or None if no log-probabilities are wanted."""
        return self.prompt_logprobs

    @property
    def most_new_tokens(self) -> int | None:
        """The limit of the output in tokens that the client set, or None."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def kept(self, ids: tuple[int, ...], room: int, default_tokens: int) -> tuple[int, ...]:
        """Return the last `truncate_prompt_tokens` tokens of a prompt, or the whole prompt if that field is not set.

        -1 keeps as many tokens as fit into `room` together with the output. The length of the output is `max_tokens` if
        it is set, else `default_tokens`. If `max_tokens` is not set and `default_tokens` fills `room`, one output token
        is assumed.
        """
        most = self.truncate_prompt_tokens
        if most is not None and most < 0:
            asked = self.most_new_tokens
            least = default_tokens if default_tokens < room else 1
            most = max(1, room - (least if asked is None else asked))
        return ids if most is None else ids[-most:]

    def sequences(self) -> int:
        """The number of sequences that the request returns: prompts times `n`."""
        return self.n

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check what the field types cannot express: limits, and fields that contradict each other.

        Raises:
            ApiError: 404 for another model, 400 for a value beyond a limit or fields that contradict each other.
        """
        check_model(model, self.model)
        self.check_adjustments(model.vocab_size, limits)
        vocab, stops, ids = model.vocab_size, self.stop, self.stop_token_ids
        tops, scores = self.top_logprobs_wanted(), self.prompt_logprobs
        of_tops = "logprobs" if isinstance(self, CompletionRequest) else "top_logprobs"
        longest = max((len(stop) for stop in stops), default=0)
        unscored = "not in a stream; leave out stream, or send echo and logprobs to /v1/completions"
        one_stream = self.stream and self.sequences() == 1
        one_tree = "only allowed when stream is true, n is 1 and there is one prompt"
        both = (self.max_tokens, self.max_completion_tokens)
        two_limits = f"differs from max_completion_tokens ({both[1]}); send one of them"
        cut = "must be positive, or -1 for as many tokens as fit, got 0"
        most = f"must be at most {limits.logprobs}, got"
        require(
            (self.n <= limits.choices, "n", f"must be at most {limits.choices}, got {self.n}"),
            (len(stops) <= limits.stops, "stop", f"at most {limits.stops} strings, got {len(stops)}"),
            (all(stops), "stop", "an empty string would stop everything; leave it out"),
            (longest <= limits.stop_characters, "stop", f"at most {limits.stop_characters} characters per string"),
            (len(ids) <= limits.stop_token_ids, "stop_token_ids", f"at most {limits.stop_token_ids} ids"),
            (all(0 <= token < vocab for token in ids), "stop_token_ids", f"ids must lie in [0, {vocab})"),
            (tops is None or tops <= limits.logprobs, of_tops, f"{most} {tops}"),
            (self.stream_options is None or self.stream, "stream_options", "only allowed when stream is true"),
            (scores is None or scores <= limits.logprobs, "prompt_logprobs", f"{most} {scores}"),
            (scores is None or not self.stream, "prompt_logprobs", unscored),
            (self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", cut),
            (not self.return_tree or one_stream, "return_tree", one_tree),
            (None in both or both[0] == both[1], "max_tokens", two_limits),
        )

    def sampling(self, model: ModelInfo, prompt_tokens: int, default_tokens: int, prompt: str) -> RequestParams:
        """Return the sampling parameters for one prompt; the caller adds seed, logit adjustments and grammar.

        If the prompt alone fills the context, the error names `prompt`, the path of a field. If `max_tokens` is not
        set, the output may have `default_tokens` tokens, or fewer if fewer fit.

        Raises:
            ApiError: 400 if prompt and output together exceed the context or the KV cache, or if `min_tokens` exceeds
                the limit of output tokens.
        """
        room = model.room - prompt_tokens
        asked = self.most_new_tokens
        wanted = min(default_tokens, max(room, 1)) if asked is None else asked
        if wanted > room:
            param = prompt if room < 1 else ("max_completion_tokens" if self.max_tokens is None else "max_tokens")
            remedy = "shorten the prompt" if room < 1 else f"ask for at most {room}"
            raise wrong(param, f"{too_long(model, prompt_tokens, wanted)}; {remedy}", "context_length_exceeded")
        if self.min_tokens > wanted:
            raise wrong("min_tokens", f"must be at most max_tokens ({wanted}), got {self.min_tokens}")
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
        """Return the seed of output number `sample` of a prompt. Output 0 has the request's seed; others have derived
        seeds.

        Return None if the request has no seed, or the seed -1, which vLLM also treats as no seed. The router then draws
        a seed for each sequence that it admits, from the server's `random_seed`. Other seeds are taken modulo 2**64. So
        2**64 - 1 is a valid seed, although it has the same bits as -1.
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

    With `echo` the text and its log-probabilities begin with those of the prompt. For each prompt `best_of` outputs are
    generated, and the `n` outputs with the highest total log-probability are returned. With `max_tokens` 0 only the
    prompt is processed.
    """

    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1)
    prompt: Annotated[list[str | list[int]], PlainValidator(list_of_prompts, json_schema_input_type=Prompts)]
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True

    def top_logprobs_wanted(self) -> int | None:
        """Return the value of `logprobs`."""
        return self.logprobs

    @property
    def samples(self) -> int:
        """The value of `best_of`; without `best_of` that of `n`."""
        return self.best_of or self.n

    def prompt_logprobs_wanted(self) -> int | None:
        """The larger of `prompt_logprobs` and (only with `echo`) `logprobs`, or None if neither is set."""
        echoed = self.logprobs if self.echo else None
        return max((most for most in (self.prompt_logprobs, echoed) if most is not None), default=None)

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check the shared fields, and `best_of`."""
        super().check(model, limits)
        best, n = self.best_of or self.n, self.n
        unknown = "which output is best is known at the end; leave out best_of or stream"
        require(
            (best <= limits.choices, "best_of", f"must be at most {limits.choices}, got {best}"),
            (best >= n, "best_of", f"must be at least n ({n}), got {best}"),
            (best == n or not self.stream, "best_of", unknown),
        )

    def sampling(self, model: ModelInfo, prompt_tokens: int, default_tokens: int, prompt: str) -> RequestParams:
        """Return the parameters of `GenerationFields.sampling`. `best_of` turns log-probabilities on: they rank the
        outputs.
        """
        params = super().sampling(model, prompt_tokens, default_tokens, prompt)
        return replace(params, logprobs=params.logprobs or 0) if self.samples > self.n else params

    def sequences(self) -> int:
        """The number of returned sequences: `n` for each prompt."""
        return self.n * len(self.prompt)


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids
