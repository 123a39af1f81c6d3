"""The arguments that a model's chat template gets, and the checkpoint files that may hold a template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.api.core.content import ChatMessage, conversation
from cluster.api.core.conversation import ConversationFields
from cluster.api.core.errors import ApiError
from cluster.config import ConfigError

CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
WORD = re.compile(r"(?<![.\w])[a-z_]+(?![\w(])")
# Arguments of transformers' `apply_chat_template` that are not allowed in chat_template_kwargs.
TAKEN = frozenset({"tokenize", "chat_template", "conversation", "messages", "tools", "documents", "return_dict"})
# Template variables that switch reasoning off when they are false.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The text of a chat template. `words` are the lower-case identifiers in its code, and so include its variables."""

    text: str
    words: frozenset[str]

    @classmethod
    def of(cls, template: Any) -> "ChatTemplate":
        """Read the `chat_template` of a tokenizer: one text, or a mapping from names to texts."""
        text = "\n".join(template.values()) if isinstance(template, Mapping) else str(template or "")
        return cls(text, frozenset(word for code in CODE.findall(text) for word in WORD.findall(QUOTED.sub("", code))))

    def arguments(self, fields: ConversationFields) -> dict[str, Any]:
        """Return the template's arguments for a request, without the messages.

        Raises:
            ApiError: 400 for tools or an effort that this template cannot express, or a reserved argument.
        """
        extra = dict(fields.chat_template_kwargs)
        if taken := sorted(TAKEN & set(extra)):
            path = f"chat_template_kwargs.{taken[0]}"
            raise ApiError(f"{path}: not allowed; leave it out", param=path, code="invalid_value")
        if fields.shown_tools:
            if "tools" not in self.words:
                raise _not_read("tools", "does not know tools", "leave them out, or send tool_choice: none")
            extra["tools"] = fields.shown_tools
        if fields.reasoning_effort is not None:
            extra = {**self._effort(fields.reasoning_effort), **extra}
        if fields.continue_final_message:
            extra["continue_final_message"] = True
        extra["add_generation_prompt"] = fields.add_generation_prompt and not fields.continue_final_message
        return extra

    def _effort(self, effort: str) -> dict[str, Any]:
        """Return the template's argument for a reasoning effort, or {} if the template has none.

        Raises:
            ApiError: 400 if `effort` is none and the template cannot switch reasoning off.
        """
        switch = next((name for name in SWITCHES if name in self.words), None)
        if effort == "none" and switch is not None:
            return {switch: False}
        if "reasoning_effort" in self.words:
            return {"reasoning_effort": effort}
        if effort != "none":
            return {}  # `unread` gives a warning
        if "<think>" not in self.text:
            return {}
        raise _not_read("reasoning_effort", "cannot do without thinking", "leave it out")

    def roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages. The role developer becomes system if the template does not know developer."""
        if "developer" in self.text:
            return messages
        return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]

    def unread(self, fields: ConversationFields) -> list[str]:
        """Return warnings about fields that have no effect on this template."""
        effort = fields.reasoning_effort
        if effort in (None, "none") or "reasoning_effort" in self.words:
            return []
        return [f"reasoning_effort: this model's chat template does not read {effort!r}"]


def messages_for(messages: Sequence[ChatMessage], thought_field: str | None) -> list[dict[str, Any]]:
    """Return the messages as a template reads them. The reasoning is also in `thought_field`, the field that the
    model's template reads.

    gpt-oss's template refuses a call that follows both reasoning and text, so the text is appended to the reasoning.
    """
    made = conversation(messages)
    for message, given in zip(made, messages, strict=True):
        if thought_field and given.thought:
            message[thought_field] = given.thought
        if thought_field == "thinking" and given.thought and given.tool_calls and message["content"]:
            message |= {"thinking": f"{given.thought}\n\n{message['content']}", "content": ""}
    return made


def _not_read(field: str, why: str, remedy: str) -> ApiError:
    message = f"{field}: this model's chat template {why}; {remedy}"
    return ApiError(message, param=field, code="unsupported_parameter")


def has_template(folder: Path) -> bool:
    """Whether the folder has a chat template: in tokenizer_config.json, chat_template.jinja or chat_template.json.

    Raises:
        ConfigError: one of the JSON files cannot be read, or is not a JSON object.
    """
    jinja = (folder / "chat_template.jinja").is_file()
    return jinja or bool(_template_in(folder / "tokenizer_config.json")) or template_of_processor(folder) is not None


def template_of_processor(folder: Path) -> str | None:
    """Return the chat template in chat_template.json, which image processors wrote before 2025; tokenizers skip it.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    found = _template_in(folder / "chat_template.json")
    return found if isinstance(found, str) and found else None


def _template_in(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from error


def model_type_of(folder: Path) -> str:
    """Return the `model_type` in the folder's config.json, or an empty string if it cannot be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(found.get("model_type", "")) if isinstance(found, dict) else ""
