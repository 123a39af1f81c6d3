"""The base of all request bodies, and how each of their fields is treated: honoured, ignored, refused or unknown.

Types are strict: `"5"`, `true` and `5.5` are not the integer 5.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from cluster.api.core.errors import (
    ApiError,
    from_validation_error,
    invalid_type,
    invalid_value,
    truncated_repr,
    unsupported_parameter,
)

WARNING_HEADER = "x-aerie-warning"
MAX_WARNINGS = 8  # unknown fields that are named, with a suggestion; further ones are only counted
MAX_NAME = 64  # a longer name gets no suggestion, since the cost of the search grows with its length

FIELD_ALIASES: dict[str, str] = {
    "rid": "request_id",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "data_parallel_rank": "routed_dp_rank",
}

# Fields that are ignored because they cannot change the answer. They label, count or route a call, or they tune a
# feature that only a refused field can switch on.
HARMLESS = frozenset(
    (
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "session_id"),
        *("conversation_id", "parallel_tool_calls", "separate_reasoning", "stream_reasoning", "include_reasoning"),
        *("spaces_between_special_tokens", "return_cached_tokens_details", "guided_decoding_backend"),
    )
)

# Refused fields, with the neutral values that mean "off" and are accepted. null is accepted for every field.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("custom_logit_processor", "max_new_tokens", "stop_token", "max_time", "thinking_token_budget"),
            *("repetition_detection", "guided_whitespace_pattern", "web_search_options", "prediction", "moderation"),
            *("audio", "prompt_embeds", "input_ids", "input_embeds", "image_data", "video_data", "audio_data"),
            *("mm_payload", "min_dynamic_patch", "max_dynamic_patch", "task", "chat_template", "token_ids_logprob"),
            *("logprob_token_ids", "sampling_logprobs_mode", "lora_path", "lora_request", "adapter_id"),
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "extra_key"),
        ),
        (),
    ),
    **dict.fromkeys(
        (
            *("use_beam_search", "early_stopping", "echo", "return_mm_kwargs", "use_audio_in_video"),
            *("continue_final_message", "return_logprob", "return_text_in_logprobs", "return_hidden_states"),
            *("return_routed_experts", "return_prompt_text", "return_token_offsets", "return_sampling_mask"),
            *("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_flat_raw_output_top_logprobs"),
            *("return_flat_raw_top_logprobs_b64", "return_meta_info", "return_spec_tokens_details"),
            *("return_prompt_token_ids", "return_bytes", "store", "background", "watermark", "watermarking"),
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            *("custom_params", "thinking", "reasoning", "mm_processor_kwargs", "media_io_kwargs", "images_config"),
            *("video_config", "kv_transfer_params", "ec_transfer_params", "custom_labels", "session_params"),
            *("sampling_params", "vllm_xargs", "extra_body", "nvext"),
        ),
        ({},),
    ),
    **dict.fromkeys(
        (
            *("no_repeat_ngram_size", "top_a", "epsilon_cutoff", "eta_cutoff", "dry_multiplier", "xtc_probability"),
            *("mirostat", "mirostat_mode", "dynatemp_range", "top_logprobs_num", "routed_experts_prompt_start"),
            *("routed_experts_start_len", "priority"),
        ),
        (0,),
    ),
    **dict.fromkeys(
        (*("repeat_penalty", "length_penalty", "typical_p", "tfs", "best_of", "num_beams", "stream_interval"),), (1,)
    ),
    **dict.fromkeys(("bad_words_token_ids", "logits_processors", "tools", "functions", "documents"), ([],)),
    **dict.fromkeys(("stop_regex", "grammar"), ("", [], {})),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": ("",),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "logprob_start_len": (-1,),
    "truncation_side": ("left",),
    "service_tier": ("auto", "default"),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
}

REMEDIES: dict[str, str] = {
    "thinking": "use chat_template_kwargs or reasoning_effort",
    "truncation_side": "the last tokens of a prompt are kept; leave it out or send 'left'",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "chat_template": "the model's own is used; leave it out",
    "reasoning": "use reasoning_effort",
    "extra_body": "put its fields at the top level of the body",
    "sampling_params": "put its fields at the top level of the body",
    "max_new_tokens": "use max_tokens",
    "top_logprobs_num": "use top_logprobs",
    "return_logprob": "use logprobs, and prompt_logprobs for the prompt",
    "return_prompt_token_ids": "use return_token_ids",
    "input_ids": "send token ids as `prompt` to /v1/completions",
    "best_of": "use n",
    "echo": "send the prompt to /v1/completions",
    "suffix": "models here continue a text and do not fill one in; send what comes before as prompt",
    "logprob_start_len": "use prompt_logprobs, which begins with the first token",
    "repeat_penalty": "use repetition_penalty",
    "bad_words_token_ids": "use bad_words",
    "prompt": "this endpoint takes messages; use /v1/completions",
    "messages": "this endpoint takes a prompt; use /v1/chat/completions",
    "top_logprobs": "this endpoint takes the number as logprobs",
    "guided_whitespace_pattern": "use structured_outputs with disable_any_whitespace",
}


class FieldTable(NamedTuple):
    """How an API treats the fields that it does not honour. `harmless` fields are ignored. `refused` maps each refused
    field to its neutral values, which are accepted. `remedies` maps fields to advice for the error message; a field
    that is only there is refused with any value. A field in none of the three is unknown, and ignored with a warning.
    """

    harmless: Collection[str]
    refused: Mapping[str, tuple[Any, ...]]
    remedies: Mapping[str, str]


GENERATION_TABLE = FieldTable(HARMLESS, REFUSED, REMEDIES)


def select_honoured_fields(
    body: Mapping[str, Any], honoured: Collection[str], table: FieldTable = GENERATION_TABLE
) -> tuple[dict[str, Any], list[str]]:
    """Return the honoured fields that are not null, in the server's spelling, and warnings about unknown fields.

    Raises:
        ApiError: 400 for a refused field whose value is not neutral, or a field sent in two spellings with different
            values.
    """
    selected: dict[str, Any] = {}
    warnings = []
    unknown_count = 0
    for name, value in body.items():
        if value is None:
            continue
        canonical_name = FIELD_ALIASES.get(name, name)
        if canonical_name in honoured:
            if canonical_name in selected and selected[canonical_name] != value:
                raise invalid_value(name, f"given twice, as {canonical_name} too; send one")
            selected[canonical_name] = value
        elif name in table.refused or name in table.remedies:
            if not any(_json_equal(value, neutral) for neutral in table.refused.get(name, ())):
                raise _refused_field_error(name, value, table)
        elif name not in table.harmless:
            unknown_count += 1
            if unknown_count <= MAX_WARNINGS:
                warnings.append(_unknown_field_warning(name, honoured))
    if unknown_count > MAX_WARNINGS:
        warnings.append(f"and {unknown_count - MAX_WARNINGS} more")
    return selected, warnings


def _unknown_field_warning(name: str, honoured: Collection[str]) -> str:
    similar_names = difflib.get_close_matches(name, honoured, n=1, cutoff=0.75) if len(name) <= MAX_NAME else []
    return f"unknown field {truncated_repr(name)} ignored" + (
        f"; did you mean {similar_names[0]!r}?" if similar_names else ""
    )


def warning_headers(warnings: list[str]) -> dict[str, str]:
    """Return the warnings as one response header in ASCII, or {} if there are no warnings."""
    if not warnings:
        return {}
    return {WARNING_HEADER: "; ".join(warnings).encode("ascii", "backslashreplace").decode("ascii")}


def _refused_field_error(name: str, value: Any, table: FieldTable) -> ApiError:
    neutral_values = table.refused.get(name, ())
    remedy = table.remedies.get(name) or (
        f"leave it out or send {truncated_repr(neutral_values[0])}" if neutral_values else "leave it out"
    )
    return unsupported_parameter(name, f"{truncated_repr(value)} is not supported by this server; {remedy}")


def _json_equal(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0, but 0 does not equal false."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")


class StrictModel(BaseModel):
    """Base of the request models. `table` says which fields are ignored, and which are refused."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())
    table: ClassVar[FieldTable] = GENERATION_TABLE

    @classmethod
    def honoured(cls) -> Collection[str]:
        """Return the names of the fields that this body honours."""
        return cls.model_fields

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Return the request in a JSON body, and warnings about unknown fields.

        Raises:
            ApiError: 400 that names the first wrong field.
        """
        selected, warnings = select_honoured_fields(body, cls.honoured(), cls.table)
        try:
            return cls.model_validate(selected), warnings
        except ValidationError as error:
            raise from_validation_error(error) from None


def validate_at(model_class: type[Model], value: Any, path: str) -> Model:
    """Validate a part of a body as a `model_class`; `path` is the path of the part.

    Raises:
        ApiError: 400 that names the wrong field, with `path` before it.
    """
    if not isinstance(value, dict):
        raise invalid_type(path, "an object", value)
    try:
        return model_class.model_validate(value)
    except ValidationError as error:
        raise from_validation_error(error, path) from None


def read_list(value: Any, read_item: Callable[[Any, str], Item], path: str) -> list[Item]:
    """Return the items of a list. `read_item` gets the value and the path of each item, and returns the item. Raise
    ValueError if `value` is not a list.
    """
    if not isinstance(value, list):
        raise ValueError(f"must be a list, got {truncated_repr(value)}")
    return [read_item(item, f"{path}.{index}") for index, item in enumerate(value)]


def require(*checks: tuple[object, str, str]) -> None:
    """Raise a 400 for the first check that fails. A check is (condition, path of the field, text that says what must
    hold).
    """
    for is_satisfied, param, reason in checks:
        if not is_satisfied:
            raise invalid_value(param, reason)


def require_utf8(text: str) -> str:
    """Return `text`. Raise ValueError if UTF-8 cannot encode it, as when a JSON escape is half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not text") from None
    return text


def list_of_stops(value: Any) -> Any:
    """Return `[value]` if the value is a single stop string, and any other value unchanged."""
    return [value] if isinstance(value, str) else value


def list_of_prompts(value: Any) -> list[Any]:
    """Return a `str | list[str] | list[int] | list[list[int]]` as a list of prompts. Raise ValueError for any other
    value.
    """
    if isinstance(value, str):
        return [require_utf8(value)]
    allowed_types = "must be a string, a list of strings, a list of token ids or a list of such lists"
    if not isinstance(value, list):
        raise ValueError(f"{allowed_types}, got {truncated_repr(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    first = value[0]
    if isinstance(first, str):
        _check_item_types(str, value, "strings")
        return [require_utf8(text) for text in value]
    if isinstance(first, list):
        for index, ids in enumerate(value):
            if not isinstance(ids, list):
                raise ValueError(f"item {index} must be a list of token ids like the first, got {truncated_repr(ids)}")
            _check_item_types(int, ids, "token ids", f"item {index}: ")
        return value
    if not isinstance(first, int) or isinstance(first, bool):
        raise ValueError(f"{allowed_types}, got a list that begins with {truncated_repr(first)}")
    _check_item_types(int, value, "token ids")
    return [value]


def _check_item_types(expected_type: type, items: list[Any], type_name: str, prefix: str = "") -> None:
    for index, item in enumerate(items):
        if type(item) is not expected_type:
            raise ValueError(f"{prefix}must hold {type_name} only, got {truncated_repr(item)} at position {index}")


def text_of_parts(value: Any, text_field_of_type: Mapping[str, str]) -> str:
    """Return `value` if it is a string, or the joined texts if it is a list of content parts. `text_field_of_type` maps
    the type of a part to the name of the field that holds the part's text.

    Raises:
        ValueError: the value has another type, a part is of another type (such as an image), or a text is invalid.
    """
    if isinstance(value, str):
        return require_utf8(value)
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of text parts, got {truncated_repr(value)}")
    texts = []
    for index, part in enumerate(value):
        part_type = part.get("type") if isinstance(part, dict) else None
        text_field = text_field_of_type.get(part_type) if isinstance(part_type, str) else None
        if text_field is None:
            received = truncated_repr(part if part_type is None else part_type)
            raise ValueError(
                f"part {index} must be of type {' or '.join(text_field_of_type)}: this model reads text, not {received}"
            )
        if not isinstance(part.get(text_field), str):
            raise ValueError(f"part {index}: {text_field} must be a string, got {truncated_repr(part.get(text_field))}")
        texts.append(require_utf8(part[text_field]))
    return "".join(texts)


Text = Annotated[str, AfterValidator(require_utf8)]
