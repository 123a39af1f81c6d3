"""What a model's chat template reads of a request, and how a conversation is handed to it."""

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
TAKEN = frozenset({"tokenize", "chat_template", "conversation", "messages", "tools", "documents", "return_dict"})
# What switches the thinking off, in templates that read it.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template's text, and the variables in it."""

    text: str
    words: frozenset[str]

    @classmethod
    def of(cls, template: Any) -> "ChatTemplate":
        """The template of a tokenizer: a text, or several by name."""
        text = "\n".join(template.values()) if isinstance(template, Mapping) else str(template or "")
        return cls(text, frozenset(word for code in CODE.findall(text) for word in WORD.findall(QUOTED.sub("", code))))

    def arguments(self, fields: ConversationFields) -> dict[str, Any]:
        """The template's arguments for a request, besides the messages.

        Raises:
            ApiError: 400: it asks for what this template does not read.
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
        """The argument for how much to think; nothing to say where none is asked of a model that does not think."""
        switch = next((name for name in SWITCHES if name in self.words), None)
        if effort == "none" and switch is not None:
            return {switch: False}
        if "reasoning_effort" in self.words:
            return {"reasoning_effort": effort}
        if effort != "none":
            return {}  # and `unread` says so
        if "<think>" not in self.text:
            return {}
        raise _not_read("reasoning_effort", "cannot do without thinking", "leave it out")

    def roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, of a developer as of the system where the template does not know that role."""
        if "developer" in self.text:
            return messages
        return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]

    def unread(self, fields: ConversationFields) -> list[str]:
        """Warnings: what was asked for and makes no difference."""
        effort = fields.reasoning_effort
        if effort in (None, "none") or "reasoning_effort" in self.words:
            return []
        return [f"reasoning_effort: this model's chat template does not read {effort!r}"]


def messages_for(messages: Sequence[ChatMessage], thought_field: str | None) -> list[dict[str, Any]]:
    """The messages as a template takes them, with what was thought also under its own name for it.

    That of gpt-oss has one place before a call for what was thought and what was said, and refuses both.
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
    """Whether the folder has a chat template, in the tokenizer's config or in a file beside it.

    Raises:
        ConfigError: the tokenizer's config or such a file is no JSON object.
    """
    jinja = (folder / "chat_template.jinja").is_file()
    return jinja or bool(_template_in(folder / "tokenizer_config.json")) or template_of_processor(folder) is not None


def template_of_processor(folder: Path) -> str | None:
    """The chat template of chat_template.json, which processors of images wrote before 2025; tokenizers do not read it.

    Raises:
        ConfigError: the file is no JSON object.
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
    """The `model_type` in the folder's config.json; empty where there is none that can be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(found.get("model_type", "")) if isinstance(found, dict) else ""
