"""How the answers to a prompt are sampled, in the names of vLLM. The code that reads the bodies of REST requests checks
the values, so that both refuse the same with the same words.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from cluster.api.core.errors import ApiError, shown
from cluster.api.core.fields import REMEDIES, SPELLINGS
from cluster.api.core.protocol import CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output is held to: one of the first six.

    `json` is a JSON schema, as an object or as text; `json_object` asks for any JSON object; `regex` is a regular
    expression that matches the whole output; `choice` lists the texts of which one is the output; `grammar` is an EBNF
    grammar; `structural_tag` is vLLM's. `disable_any_whitespace` leaves white space out between the parts of JSON.
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
    """How the answers to a prompt are sampled, and when they end. All fields have the names, the meaning and the bounds
    that /v1/completions gives them (docs/compatibility.md).

    A field that is None is left out, as a field that is missing in a REST request: then temperature, top_p, top_k,
    min_p and repetition_penalty are those of the model's generation_config.json, or else 1, 1, 0, 0 and 1. Without
    `max_tokens` `LLM.generate` gives 16 tokens, and `LLM.chat` as many as fit. Without `seed` the seeds are drawn from
    the setting `random_seed`. `logprobs` is how many alternatives to report beside each token, 0 to 20; None reports
    none.
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
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what no model serves.

        Raises:
            ValueError: naming the field.
        """
        try:
            CompletionRequest.read({**self.body(), "prompt": ""})[0].constraint()
        except ApiError as error:
            raise ValueError(error.message) from None

    def body(self) -> dict[str, Any]:
        """The fields that are set, as the body of a request to /v1/completions has them."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            given["structured_outputs"] = asdict(self.structured_outputs)
        if isinstance(self.structured_outputs, StructuredOutputsParams | Mapping):
            held = {name: value for name, value in given["structured_outputs"].items() if value is not None}
            given["structured_outputs"] = {name: _as_json(value) for name, value in held.items()}
        if isinstance(self.logit_bias, Mapping):
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return {name: _as_json(value) for name, value in given.items() if value is not None}

    def chat_body(self) -> dict[str, Any]:
        """The same, as the body of a request to /v1/chat/completions has them."""
        given = self.body()
        if (alternatives := given.pop("logprobs", None)) is not None:
            given |= {"logprobs": True, "top_logprobs": alternatives}
        return given


def _as_json(value: Any) -> Any:
    """Sequences and mappings of Python as JSON has them: lists and objects."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def params_of(given: Any) -> SamplingParams:
    """The parameters of one prompt; a mapping has the names of the fields.

    Raises:
        ValueError: an unknown field, with what to write instead, or a value that no model serves.
    """
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"sampling_params must be SamplingParams, or a list with one per prompt, got {shown(given)}")
    known = [field.name for field in fields(SamplingParams)]
    for name in given:
        if name not in known:
            close = [SPELLINGS[name]] if name in SPELLINGS else difflib.get_close_matches(str(name), known, n=1)
            remedy = REMEDIES.get(name) or (f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}")
            raise ValueError(f"sampling_params: unknown field {shown(name)}; {remedy}")
    return SamplingParams(**given)
