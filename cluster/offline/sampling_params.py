"""`SamplingParams`, with vLLM's names. The parser of REST requests checks the values, so that this class and a server
refuse the same values with the same messages.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from cluster.api.core.constraints import constraint_of_request
from cluster.api.core.errors import ApiError, truncated_repr
from cluster.api.core.fields import FIELD_ALIASES, REMEDIES
from cluster.api.core.generation import CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the form of the output. Set exactly one of the first six fields.

    `json` is a JSON schema, as an object or as text. `json_object` asks for any JSON object. `regex` must match the
    whole output. `choice` lists the allowed outputs. `grammar` is an EBNF grammar. `structural_tag` has the same form
    as in vLLM. `disable_any_whitespace` forbids white space between JSON tokens.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters of one prompt. All fields have the names, the meaning and the bounds that
    /v1/completions gives them (docs/compatibility.md).

    None means the same as a missing field of a REST request. If one of temperature, top_p, top_k, min_p and
    repetition_penalty is None, its value in the model's generation_config.json is used. If the file has no value, or
    `sampling_defaults` is "openai", the default is used: 1, 1, 0, 0 and 1, in this order. If `max_tokens` is None,
    `LLM.generate` generates at most 16 tokens, and `LLM.chat` as many as fit. If `seed` is None, a generator draws the
    seed; the setting `random_seed` is the seed of this generator. `logprobs` is the number of alternatives per token, 0
    to 20; None reports no log-probabilities.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    speculation: Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the values that can be checked without a model.

        Raises:
            ValueError: a value is invalid for every model; the message names the field.
        """
        try:
            constraint_of_request(CompletionRequest.read({**self.body(), "prompt": ""})[0])
        except ApiError as error:
            raise ValueError(error.message) from None

    def body(self) -> dict[str, Any]:
        """Return the fields that are not None, as in the body of a /v1/completions request."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            values["structured_outputs"] = asdict(self.structured_outputs)
        if isinstance(self.structured_outputs, StructuredOutputsParams | Mapping):
            constraint = {name: value for name, value in values["structured_outputs"].items() if value is not None}
            values["structured_outputs"] = {name: _as_json(value) for name, value in constraint.items()}
        if isinstance(self.logit_bias, Mapping):
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {name: _as_json(value) for name, value in values.items() if value is not None}

    def chat_body(self) -> dict[str, Any]:
        """Return the fields that are not None, as in the body of a /v1/chat/completions request."""
        values = self.body()
        if (alternatives := values.pop("logprobs", None)) is not None:
            values |= {"logprobs": True, "top_logprobs": alternatives}
        return values


def _as_json(value: Any) -> Any:
    """Return `value` with a tuple turned into a list and a mapping into a dict, as `json` would decode them."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def params_of(value: Any) -> SamplingParams:
    """Return the parameters of one prompt from `SamplingParams`, a mapping of its fields, or None (the defaults).

    Raises:
        ValueError: a field is unknown (the message says what to write instead), or a value is invalid.
    """
    if value is None:
        return SamplingParams()
    if isinstance(value, SamplingParams):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(
            f"sampling_params must be SamplingParams, or a list with one per prompt, got {truncated_repr(value)}"
        )
    known_fields = [field.name for field in fields(SamplingParams)]
    for name in value:
        if name not in known_fields:
            suggestions = (
                [FIELD_ALIASES[name]]
                if name in FIELD_ALIASES
                else difflib.get_close_matches(str(name), known_fields, n=1)
            )
            remedy = REMEDIES.get(name) or (
                f"did you mean {suggestions[0]!r}?" if suggestions else f"known are {', '.join(known_fields)}"
            )
            raise ValueError(f"sampling_params: unknown field {truncated_repr(name)}; {remedy}")
    return SamplingParams(**value)
