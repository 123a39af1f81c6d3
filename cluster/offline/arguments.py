"""Check the arguments of `LLM` (prompts, conversations, parameters, settings), and reduce each kind to one type."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api.core.adapter import Origins
from cluster.api.core.errors import truncated_repr
from cluster.config import ConfigError, EngineConfig
from cluster.offline.sampling_params import SamplingParams, params_of

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Mapping[str, Any] | None
SERVER_SETTINGS = (
    *("routing_policy", "max_queued_tokens", "max_queued_requests", "max_queue_wait_s"),
    *("start_timeout_s", "restart_timeout_s"),
)
"""Settings of a server's routing, queue and restarts; `LLM` refuses them."""


class PromptLocation:
    """The position of one prompt in the caller's argument, such as `prompts[3]`, for error messages."""

    def __init__(self, field: str, argument: str, index: int | None) -> None:
        """`field` is the prompt's name in the body of a REST request, `argument` the name of the caller's argument.
        `index` is the prompt's index in the caller's list, or None if the caller gave a single prompt.
        """
        self.name = argument if index is None else f"{argument}[{index}]"
        self.origins = Origins({field: self.name})
        self._in_list = index is not None

    def prefix_message(self, message: str) -> str:
        """Return `message`, prefixed with the prompt's name if the caller gave a list."""
        return message if not self._in_list or message.startswith(self.name) else f"{self.name}: {message}"


def config_of(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
) -> EngineConfig:
    """Return the engine's config. `settings` are the settings of docs/settings.md, in SGLang's or vLLM's names.

    Raises:
        ConfigError: a setting is unknown, is given twice, has a bad value, or applies only to a server.
    """
    engine_kwargs: dict[str, Any] = {"model": os.fspath(model)}
    if draft is not None:
        engine_kwargs["speculative_draft_model"] = os.fspath(draft)
    if tokenizer is not None:
        engine_kwargs["tokenizer"] = os.fspath(tokenizer)
    config = EngineConfig.from_kwargs({**engine_kwargs, **settings})
    for name in SERVER_SETTINGS:
        if name in config.model_fields_set:
            raise ConfigError(f"{name} is a setting of a server and does nothing here; leave it out")
    return config


def prompts_of(prompts: Any) -> tuple[list[str | list[int]], bool]:
    """Return the prompts as texts or lists of token ids, and whether `prompts` is a list of prompts.

    Raises:
        ValueError: an entry is not a prompt; the message names it.
    """
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_parse_prompt(prompts, "prompts")], False
    if not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts must be a text, a list of token ids, or a list of prompts, got {truncated_repr(prompts)}"
        )
    return [_parse_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)], True


def _is_ids(value: Any) -> bool:
    """Return whether `value` is the token ids of one prompt, not a list of prompts; the first entry decides."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], int)


def _parse_prompt(prompt: Any, name: str) -> str | list[int]:
    if isinstance(prompt, Mapping):  # vLLM's form of a prompt
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                f"{name} must have one of prompt and prompt_token_ids and nothing else, got {truncated_repr(prompt)}"
            )
        (key, prompt), *_ = prompt.items()
        if isinstance(prompt, str) != (key == "prompt"):
            raise ValueError(
                f"{name}: {key} must be {'a text' if key == 'prompt' else 'token ids'}, got {truncated_repr(prompt)}"
            )
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence):
        raise ValueError(f"{name} must be a text or a list of token ids, got {truncated_repr(prompt)}")
    return list(prompt)


def conversations_of(messages: Any) -> tuple[list[list[Any]], bool]:
    """Return the conversations, each a list of messages, and whether `messages` is a list of conversations.

    Raises:
        ValueError: `messages` is neither a list of messages nor a list of such lists.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(
            f"messages must be a list of messages, or a list of such lists, got {truncated_repr(messages)}"
        )
    if messages and isinstance(messages[0], Mapping):
        return [list(messages)], False
    for index, conversation in enumerate(messages):
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise ValueError(
                f"messages[{index}] must be a list of messages like the others, got {truncated_repr(conversation)}"
            )
    return [list(conversation) for conversation in messages], True


def params_for(sampling_params: Params | Sequence[Params], count: int, field: str) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts in the argument `field`. `sampling_params` is a list with one
    value per prompt, or one value for all.

    Raises:
        ValueError: the list has another length than `count`, or an entry has an unknown field or a bad value.
    """
    if not isinstance(sampling_params, list | tuple):
        if isinstance(sampling_params, Sequence):  # a text, say
            raise ValueError(
                "sampling_params must be SamplingParams, a mapping or a list of these, got "
                f"{truncated_repr(sampling_params)}"
            )
        return [params_of(sampling_params)] * count
    if len(sampling_params) != count:
        raise ValueError(
            f"sampling_params has {len(sampling_params)} entries for {count} of {field}; give one for all, or one for "
            "each"
        )
    return [params_of(params) for params in sampling_params]
