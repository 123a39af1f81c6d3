"""Check the arguments of `LLM` (prompts, conversations, parameters, settings) and bring each into one shape."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api.core.adapter import Origins
from cluster.api.core.errors import shown
from cluster.config import ConfigError, EngineConfig
from cluster.offline.sampling_params import SamplingParams, params_of

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Mapping[str, Any] | None
OF_A_SERVER = (
    *("routing_policy", "max_queued_tokens", "max_queued_requests", "max_queue_wait_s"),
    *("start_timeout_s", "restart_timeout_s"),
)
"""Settings of a server's routing, queue and restarts; `LLM` refuses them."""


class PromptPlace:
    """The position of one prompt in the caller's argument, such as `prompts[3]`, for error messages."""

    def __init__(self, field: str, argument: str, at: int | None) -> None:
        """`field` is the prompt's name in the body of a REST request, `argument` the name of the caller's argument.
        `at` is the prompt's index in the caller's list, or None if the caller gave a single prompt.
        """
        self.name = argument if at is None else f"{argument}[{at}]"
        self.origins = Origins({field: self.name})
        self._listed = at is not None

    def told(self, message: str) -> str:
        """Return `message`, prefixed with the prompt's name if the caller gave a list."""
        return message if not self._listed or message.startswith(self.name) else f"{self.name}: {message}"


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
    given: dict[str, Any] = {"model": os.fspath(model)}
    if draft is not None:
        given["speculative_draft_model"] = os.fspath(draft)
    if tokenizer is not None:
        given["tokenizer"] = os.fspath(tokenizer)
    config = EngineConfig.from_kwargs({**given, **settings})
    for name in OF_A_SERVER:
        if name in config.model_fields_set:
            raise ConfigError(f"{name} is a setting of a server and does nothing here; leave it out")
    return config


def prompts_of(given: Any) -> tuple[list[str | list[int]], bool]:
    """Return the prompts as texts or lists of token ids, and whether `given` is a list of prompts.

    Raises:
        ValueError: an entry is not a prompt; the message names it.
    """
    if isinstance(given, str | Mapping) or _is_ids(given):
        return [_prompt(given, "prompts")], False
    if not isinstance(given, Sequence):
        raise ValueError(f"prompts must be a text, a list of token ids, or a list of prompts, got {shown(given)}")
    return [_prompt(one, f"prompts[{at}]") for at, one in enumerate(given)], True


def _is_ids(given: Any) -> bool:
    """Return whether `given` is the token ids of one prompt, not a list of prompts; the first entry decides."""
    return isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], int)


def _prompt(given: Any, name: str) -> str | list[int]:
    if isinstance(given, Mapping):  # vLLM's form of a prompt
        if len(given) != 1 or not given.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                f"{name} must have one of prompt and prompt_token_ids and nothing else, got {shown(given)}"
            )
        (key, given), *_ = given.items()
        if isinstance(given, str) != (key == "prompt"):
            raise ValueError(
                f"{name}: {key} must be {'a text' if key == 'prompt' else 'token ids'}, got {shown(given)}"
            )
    if isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise ValueError(f"{name} must be a text or a list of token ids, got {shown(given)}")
    return list(given)


def conversations_of(given: Any) -> tuple[list[list[Any]], bool]:
    """Return the conversations, each a list of messages, and whether `given` is a list of conversations.

    Raises:
        ValueError: `given` is neither a list of messages nor a list of such lists.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"messages must be a list of messages, or a list of such lists, got {shown(given)}")
    if given and isinstance(given[0], Mapping):
        return [list(given)], False
    for at, one in enumerate(given):
        if not isinstance(one, Sequence) or isinstance(one, str):
            raise ValueError(f"messages[{at}] must be a list of messages like the others, got {shown(one)}")
    return [list(one) for one in given], True


def params_for(given: Params | Sequence[Params], count: int, field: str) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts in the argument `field`. `given` is a list with one value per
    prompt, or one value for all.

    Raises:
        ValueError: the list has another length than `count`, or an entry has an unknown field or a bad value.
    """
    if not isinstance(given, list | tuple):
        if isinstance(given, Sequence):  # a text, say
            raise ValueError(
                f"sampling_params must be SamplingParams, a mapping or a list of these, got {shown(given)}"
            )
        return [params_of(given)] * count
    if len(given) != count:
        raise ValueError(
            f"sampling_params has {len(given)} entries for {count} of {field}; give one for all, or one for each"
        )
    return [params_of(one) for one in given]
