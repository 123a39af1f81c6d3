"""The tokenizer of the REST layer: encodes text off the event loop, and renders chats with the model's template.

It reads local folders only, and runs no code from them: a template is sandboxed Jinja, everything else is data.

Some templates refuse a second system message, or two calls in one message; others silently omit messages. If a template
refuses a conversation or omits a system text, the conversation is rendered in an equivalent form.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cluster.api.core.conversation import ChatMessage, ConversationFields
from cluster.api.core.errors import ApiError, invalid_value, unsupported_parameter
from cluster.api.core.limits import run_off_loop
from cluster.chat.formats.choose import ChosenFormat, choose
from cluster.config import ConfigError
from cluster.tokenizer.token_floor import TokenFloor
from cluster.tokenizer.tokenizer import TextTokenizer

CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
WORD = re.compile(r"(?<![.\w])[a-z_]+(?![\w(])")
# Arguments of transformers' `apply_chat_template` that are not allowed in chat_template_kwargs.
RESERVED_ARGUMENTS = frozenset(
    {"tokenize", "chat_template", "conversation", "messages", "tools", "documents", "return_dict"}
)
# Template variables that switch reasoning off when they are false.
REASONING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template. `identifiers` are the lower-case words in the code of `text`, with the names of variables."""

    text: str
    identifiers: frozenset[str]

    @classmethod
    def of(cls, template: Any) -> "ChatTemplate":
        """Read the `chat_template` of a tokenizer: one text, or a mapping from names to texts."""
        text = "\n".join(template.values()) if isinstance(template, Mapping) else str(template or "")
        return cls(text, frozenset(word for code in CODE.findall(text) for word in WORD.findall(STRING.sub("", code))))

    def arguments(self, fields: ConversationFields) -> dict[str, Any]:
        """Return the template's arguments for a request, without the messages.

        Raises:
            ApiError: 400 for tools or an effort that this template cannot express, or a reserved argument.
        """
        template_arguments = dict(fields.chat_template_kwargs)
        if reserved := sorted(RESERVED_ARGUMENTS & set(template_arguments)):
            path = f"chat_template_kwargs.{reserved[0]}"
            raise invalid_value(path, "not allowed; leave it out")
        if fields.template_tools:
            if "tools" not in self.identifiers:
                raise _template_unsupported("tools", "does not know tools; leave them out, or send tool_choice: none")
            template_arguments["tools"] = fields.template_tools
        if fields.reasoning_effort is not None:
            template_arguments = {**self._effort_argument(fields.reasoning_effort), **template_arguments}
        if fields.continue_final_message:
            template_arguments["continue_final_message"] = True
        template_arguments["add_generation_prompt"] = fields.add_generation_prompt and not fields.continue_final_message
        return template_arguments

    def _effort_argument(self, effort: str) -> dict[str, Any]:
        """Return the template's argument for a reasoning effort, or {} if the template has none.

        Raises:
            ApiError: 400 if `effort` is none and the template cannot switch reasoning off.
        """
        switch = next((name for name in REASONING_SWITCHES if name in self.identifiers), None)
        if effort == "none" and switch is not None:
            return {switch: False}
        if "reasoning_effort" in self.identifiers:
            return {"reasoning_effort": effort}
        if effort != "none":
            return {}  # `ignored_field_warnings` gives a warning
        if "<think>" not in self.text:
            return {}
        raise _template_unsupported("reasoning_effort", "cannot do without thinking; leave it out")

    def with_supported_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages. The role developer becomes system if the template does not know developer."""
        if "developer" in self.text:
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    def ignored_field_warnings(self, fields: ConversationFields) -> list[str]:
        """Return warnings about fields that have no effect on this template."""
        effort = fields.reasoning_effort
        if effort in (None, "none") or "reasoning_effort" in self.identifiers:
            return []
        return [f"reasoning_effort: this model's chat template does not read {effort!r}"]


def template_messages(messages: Sequence[ChatMessage], reasoning_field: str | None) -> list[dict[str, Any]]:
    """Return the messages as arguments for a chat template. The reasoning is copied to `reasoning_field`, the field in
    which the model's template expects it; with None it is not copied.

    gpt-oss's template refuses a call that follows both reasoning and text, so the text is appended to the reasoning.
    """
    dialogue = plain_template_messages(messages)
    for message, source in zip(dialogue, messages, strict=True):
        if reasoning_field and source.reasoning_text:
            message[reasoning_field] = source.reasoning_text
        if reasoning_field == "thinking" and source.reasoning_text and source.tool_calls and message["content"]:
            message |= {"thinking": f"{source.reasoning_text}\n\n{message['content']}", "content": ""}
    return dialogue


def _template_unsupported(field: str, reason: str) -> ApiError:
    return unsupported_parameter(field, f"this model's chat template {reason}")


def has_template(folder: Path) -> bool:
    """Whether the folder has a chat template: in tokenizer_config.json, chat_template.jinja or chat_template.json.

    Raises:
        ConfigError: one of the JSON files cannot be read, or is not a JSON object.
    """
    jinja = (folder / "chat_template.jinja").is_file()
    return jinja or bool(_read_template(folder / "tokenizer_config.json")) or template_of_processor(folder) is not None


def template_of_processor(folder: Path) -> str | None:
    """Return the chat template in chat_template.json, or None. Older versions of Transformers wrote this file.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    template = _read_template(folder / "chat_template.json")
    return template if isinstance(template, str) and template else None


def _read_template(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from error


def model_type_of(folder: Path) -> str:
    """Return the `model_type` in the folder's config.json, or an empty string if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


def plain_template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages for a chat template. The arguments of calls become objects, because most templates expect
    objects.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    result |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    if message.reasoning_text:
        result |= {"reasoning_content": message.reasoning_text, "reasoning": message.reasoning_text}
    if message.tool_calls:
        result["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")},
            }
            for call in message.tool_calls
        ]
    return result


Messages = list[dict[str, Any]]
INSTRUCTION_ROLES = ("system", "developer")
"""Roles whose messages are instructions; `render_prompt` checks that the prompt has the text of each such message."""


def render_prompt(render: Callable[[Messages], str], messages: Messages) -> tuple[str, list[str]]:
    """Render the conversation in its equivalent forms (`_equivalent_forms`) in turn. Return a prompt and warnings.

    The prompt is the first one that contains every instruction. If there is none, it is the first one that the template
    renders without an error, and a warning counts the lost instructions.

    Raises:
        TemplateError: the template refuses every form. This is the error for the original messages.
    """
    first_error: TemplateError | None = None
    best: tuple[str, list[str]] | None = None
    instructions = [text for m in messages if m["role"] in INSTRUCTION_ROLES and (text := m["content"].strip())]
    for form in _equivalent_forms(messages):
        try:
            text = render(form)
        except TemplateError as error:
            first_error = first_error or error
            continue
        lost = sum(instruction not in text for instruction in instructions)
        if not lost:
            return text, []
        best = best or (text, [f"messages: this model's chat template leaves out {lost} of role system or developer"])
    if best is None:
        assert first_error is not None
        raise first_error
    return best


def _equivalent_forms(messages: Messages) -> Iterator[Messages]:
    """Yield the messages, then each different form of them: system texts merged, parallel calls split, and both."""
    yielded: list[Messages] = []
    for form in (
        messages,
        merge_system_messages(messages),
        split_parallel_calls(messages),
        split_parallel_calls(merge_system_messages(messages)),
    ):
        if form not in yielded:
            yielded.append(form)
            yield form


def merge_system_messages(messages: Messages) -> Messages:
    """Return the messages with all system and developer texts joined into one system message at the beginning."""
    texts = [message["content"] for message in messages if message["role"] in INSTRUCTION_ROLES]
    others = [message for message in messages if message["role"] not in INSTRUCTION_ROLES]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def split_parallel_calls(messages: Messages) -> Messages:
    """Return the messages with each tool call in a separate message, followed by the result of the call."""
    result: Messages = []
    remaining = list(messages)
    while remaining:
        message = remaining.pop(0)
        calls = message.get("tool_calls", ())
        results = _pop_tool_results(remaining) if len(calls) > 1 else []
        for index, call in enumerate(calls if len(calls) > 1 else ()):
            first = message if index == 0 else {"role": message["role"], "content": ""}
            # Results are matched by id; where no id matches, they are taken in order.
            call_results = [r for r in results if r.get("tool_call_id") == call.get("id")] or results[:1]
            result += [{**first, "tool_calls": [call]}, *call_results]
            results = [r for r in results if r not in call_results]
        result += results if len(calls) > 1 else [message]
    return result


def _pop_tool_results(remaining: Messages) -> Sequence[dict[str, Any]]:
    """Remove the tool results at the beginning of `remaining` and return them."""
    results: Messages = []
    while remaining and remaining[0]["role"] == "tool":
        results.append(remaining.pop(0))
    return results


logger = logging.getLogger(__name__)

ParserNames = tuple[str | None, str | None]
"""The settings tool_call_parser and reasoning_parser, as returned by `canonical_parser_names`."""


class EncodedChat(NamedTuple):
    """A conversation in the model's format. `warnings` name fields without effect, and count omitted system texts."""

    ids: list[int]
    text: str
    warnings: list[str]


class ChatTokenizer:
    """Encodes and decodes text, and renders chats. `template` is None for a model without a chat template;
    `chosen_format` is the model's format of reasoning and tool calls.
    """

    def __init__(
        self, text_tokenizer: TextTokenizer, template: PreTrainedTokenizerBase | None, chosen_format: ChosenFormat
    ) -> None:
        self.text_tokenizer = text_tokenizer
        self.chosen_format = chosen_format
        self._template = template
        self._chat_template = ChatTemplate.of(None if template is None else template.chat_template)
        self._special_tokens = text_tokenizer.special_tokens
        self._token_floor = TokenFloor.from_tokenizer(text_tokenizer.backend_tokenizer)

    @classmethod
    def load(cls, path: str, parsers: ParserNames = (None, None)) -> Self:
        """Load a tokenizer folder. A None in `parsers` means that the chat template decides the format.

        Raises:
            ConfigError: the folder has no usable tokenizer, or its chat template cannot be loaded.
        """
        text_tokenizer = TextTokenizer.load(path)
        if not has_template(Path(path)):
            logger.warning("%s has no chat template: conversations are refused, prompts are served", path)
            return cls(text_tokenizer, None, ChosenFormat(None))
        try:
            # This object only renders the template. AutoTokenizer would import torch, which takes each replica seconds.
            template = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a broken folder
            raise ConfigError(f"the chat template in {path} cannot be loaded: {error}") from error
        template.chat_template = template.chat_template or template_of_processor(Path(path))
        template_text = ChatTemplate.of(template.chat_template).text
        added_tokens = {token.content for token in text_tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
        return cls(text_tokenizer, template, choose(template_text, added_tokens, model_type_of(Path(path)), parsers))

    @property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id."""
        return self._special_tokens

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template, so that conversations can be encoded."""
        return self._template is not None

    async def encode(
        self,
        text: str,
        add_special_tokens: bool,
        body_bytes: int,
        context_length: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Return the token ids of a text. The work runs in a thread if the request body (`body_bytes` bytes) is long.

        Raises:
            ApiError: 400 that names `param` if the text cannot fit into `context_length` tokens (None: no limit).
        """

        def encode_text() -> list[int]:
            self._check_length(text, context_length, param)
            return self.text_tokenizer.encode(text, add_special_tokens)

        return await run_off_loop(body_bytes, encode_text)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Long lists are decoded in a thread."""
        return await run_off_loop(len(ids), lambda: self.text_tokenizer.decode_without_gil(ids))

    def _check_length(self, text: str, context_length: int | None, param: str) -> None:
        if context_length is not None and (min_tokens := self._token_floor.lower_bound(text)) >= context_length:
            raise invalid_value(
                param,
                f"prompt is too long: {min_tokens} tokens > {context_length - 1} maximum (at least so many), as "
                f"this model's maximum context length is {context_length} tokens here; shorten the prompt",
                "context_length_exceeded",
            )

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        fields: ConversationFields,
        body_bytes: int,
        *,
        add_special_tokens: bool = False,
        context_length: int | None = None,
    ) -> EncodedChat:
        """Return a conversation in the model's format; `body_bytes` is the length of its request body in bytes.

        Raises:
            ApiError: 400 if there is no template, the template refuses the conversation or cannot express a field, or
                the text cannot fit into `context_length` tokens (None: no limit).
        """
        template = self._template
        if template is None:
            raise unsupported_parameter(
                "messages", "this model has no chat template; use /v1/completions with a prompt"
            )
        reasoning_field = None if self.chosen_format.format is None else self.chosen_format.format.reasoning_field

        def render_and_encode() -> EncodedChat:
            arguments: dict[str, Any] = self._chat_template.arguments(fields)
            template_dialogue = self._chat_template.with_supported_roles(template_messages(messages, reasoning_field))
            try:
                text, warnings = render_prompt(
                    lambda form: str(template.apply_chat_template(form, tokenize=False, **arguments)), template_dialogue
                )
                text.encode()  # raises if a template argument holds half of a surrogate pair
            except Exception as error:  # a template may raise any error on a client's arguments
                reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
                raise invalid_value(
                    "messages", f"the model's chat template refuses this conversation: {reason}"
                ) from None
            self._check_length(text, context_length, "messages")
            return EncodedChat(
                self.text_tokenizer.encode(text, add_special_tokens),
                text,
                [*self._chat_template.ignored_field_warnings(fields), *warnings],
            )

        return await run_off_loop(body_bytes, render_and_encode)
