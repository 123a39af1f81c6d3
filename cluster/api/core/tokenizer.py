"""The tokenizer of the REST layer: encodes text off the event loop, and renders chats with the model's template.

It reads local folders only, and runs no code from them: a template is sandboxed Jinja, everything else is data.

Some templates refuse a second system message, or two calls in one message; others silently omit messages that they do
not support. So a conversation that is refused, or loses a system text, is rendered again in equivalent forms.
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
from cluster.api.core.errors import ApiError, unsupported, wrong
from cluster.api.core.limits import off_loop
from cluster.chat.formats.choose import ChosenFormat, choose
from cluster.config import ConfigError
from cluster.tokenizer.token_floor import TokenFloor
from cluster.tokenizer.tokenizer import TextTokenizer

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
            raise wrong(path, "not allowed; leave it out")
        if fields.shown_tools:
            if "tools" not in self.words:
                raise _not_read("tools", "does not know tools; leave them out, or send tool_choice: none")
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
        raise _not_read("reasoning_effort", "cannot do without thinking; leave it out")

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


def _not_read(field: str, why: str) -> ApiError:
    return unsupported(field, f"this model's chat template {why}")


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


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages for a chat template. The arguments of calls become objects, because most templates expect
    objects.
    """
    return [_for_template(message) for message in messages]


def _for_template(message: ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    made |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    if message.thought:
        made |= {"reasoning_content": message.thought, "reasoning": message.thought}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")},
            }
            for call in message.tool_calls
        ]
    return made


Messages = list[dict[str, Any]]
ORDERING = ("system", "developer")
"""Roles whose messages are instructions; `rendered` checks that none of these texts is lost."""


def rendered(render: Callable[[Messages], str], messages: Messages) -> tuple[str, list[str]]:
    """Return the rendered prompt and warnings. The forms of the conversation are tried in order.

    The result is the first prompt that contains every instruction. If there is none, it is the first prompt that the
    template accepts, and a warning counts the lost instructions.

    Raises:
        TemplateError: the template refuses every form; the error is that of the original messages.
    """
    refusal: TemplateError | None = None
    found: tuple[str, list[str]] | None = None
    orders = [text for each in messages if each["role"] in ORDERING and (text := each["content"].strip())]
    for form in _forms(messages):
        try:
            text = render(form)
        except TemplateError as error:
            refusal = refusal or error
            continue
        lost = sum(order not in text for order in orders)
        if not lost:
            return text, []
        found = found or (text, [f"messages: this model's chat template leaves out {lost} of role system or developer"])
    if found is None:
        assert refusal is not None
        raise refusal
    return found


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the original messages, then each different equivalent form."""
    tried: list[Messages] = []
    for form in (
        messages,
        with_one_system(messages),
        one_call_each(messages),
        one_call_each(with_one_system(messages)),
    ):
        if form not in tried:
            tried.append(form)
            yield form


def with_one_system(messages: Messages) -> Messages:
    """Return the messages with all system and developer texts joined into one system message at the beginning."""
    said = [each["content"] for each in messages if each["role"] in ORDERING]
    others = [each for each in messages if each["role"] not in ORDERING]
    return [{"role": "system", "content": "\n\n".join(said)}, *others] if said else others


def one_call_each(messages: Messages) -> Messages:
    """Return the messages with each tool call in a separate message, followed by the result of the call."""
    made: Messages = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        results = _results(rest) if len(calls) > 1 else []
        for at, call in enumerate(calls if len(calls) > 1 else ()):
            first = message if at == 0 else {"role": message["role"], "content": ""}
            # Results are matched by id; where no id matches, they are taken in order.
            own = [each for each in results if each.get("tool_call_id") == call.get("id")] or results[:1]
            made += [{**first, "tool_calls": [call]}, *own]
            results = [each for each in results if each not in own]
        made += results if len(calls) > 1 else [message]
    return made


def _results(rest: Messages) -> Sequence[dict[str, Any]]:
    """Remove the tool results at the beginning of `rest` and return them."""
    results: Messages = []
    while rest and rest[0]["role"] == "tool":
        results.append(rest.pop(0))
    return results


logger = logging.getLogger(__name__)

Parsers = tuple[str | None, str | None]
"""The settings tool_call_parser and reasoning_parser, as returned by `cluster.chat.formats.choose.named`."""


class Encoded(NamedTuple):
    """A conversation in the model's format, as tokens and as text, and warnings about fields without effect."""

    ids: list[int]
    text: str
    warnings: list[str]


class ChatTokenizer:
    """Encodes and decodes text, and renders chats. `text` is the text tokenizer; `template` is None for a model without
    a chat template; `chosen` is the model's format of reasoning and tool calls.
    """

    def __init__(self, text: TextTokenizer, template: PreTrainedTokenizerBase | None, chosen: ChosenFormat) -> None:
        self.text = text
        self.chosen = chosen
        self._template = template
        self._reads = ChatTemplate.of(None if template is None else template.chat_template)
        self._special = text.special
        self._floor = TokenFloor.of(text.library)

    @classmethod
    def load(cls, path: str, parsers: Parsers = (None, None)) -> Self:
        """Load a tokenizer folder.

        Raises:
            ConfigError: the folder has no usable tokenizer, or its chat template cannot be loaded.
        """
        text = TextTokenizer.load(path)
        if not has_template(Path(path)):
            logger.warning("%s has no chat template: conversations are refused, prompts are served", path)
            return cls(text, None, ChosenFormat(None))
        try:
            # Only for the template. AutoTokenizer would import torch: seconds of start-up in each replica.
            template = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a broken folder
            raise ConfigError(f"the chat template in {path} cannot be loaded: {error}") from error
        template.chat_template = template.chat_template or template_of_processor(Path(path))
        source = ChatTemplate.of(template.chat_template).text
        added = {token.content for token in text.library.get_added_tokens_decoder().values()}
        return cls(text, template, choose(source, added, model_type_of(Path(path)), parsers))

    @property
    def special(self) -> dict[int, str]:
        """Special tokens by id."""
        return self._special

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template, so that conversations can be encoded."""
        return self._template is not None

    async def encode(
        self, text: str, add_special_tokens: bool, length: int, context_length: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a text. The work runs in a thread if the request body (`length` bytes) is long.

        Raises:
            ApiError: 400 that names `param` if the text cannot fit into the context. The text is then not encoded.
        """

        def work() -> list[int]:
            self._check_length(text, context_length, param)
            return self.text.encode(text, add_special_tokens)

        return await off_loop(length, work)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Long lists are decoded in a thread."""
        return await off_loop(len(ids), lambda: self.text.decode_freely(ids))

    def _check_length(self, text: str, context_length: int | None, param: str) -> None:
        if context_length is not None and (fewest := self._floor.fewest(text)) >= context_length:
            raise wrong(
                param,
                f"prompt is too long: {fewest} tokens > {context_length - 1} maximum (at least so many), as "
                f"this model's maximum context length is {context_length} tokens here; shorten the prompt",
                "context_length_exceeded",
            )

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        fields: ConversationFields,
        length: int,
        *,
        add_special_tokens: bool = False,
        context_length: int | None = None,
    ) -> Encoded:
        """Return a conversation in the model's format; `length` is the length of its request body in bytes.

        Raises:
            ApiError: 400 if there is no template, the template refuses the conversation, or the text cannot fit into
                the context.
        """
        template = self._template
        if template is None:
            raise unsupported("messages", "this model has no chat template; use /v1/completions with a prompt")
        thought_field = None if self.chosen.format is None else self.chosen.format.thought_field

        def work() -> Encoded:
            given: dict[str, Any] = self._reads.arguments(fields)
            made = self._reads.roles(messages_for(messages, thought_field))
            try:
                text, warnings = rendered(
                    lambda form: str(template.apply_chat_template(form, tokenize=False, **given)), made
                )
                text.encode()  # raises if a template argument holds half of a surrogate pair
            except Exception as error:  # a template may raise any error on a client's arguments
                reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
                raise wrong("messages", f"the model's chat template refuses this conversation: {reason}") from None
            self._check_length(text, context_length, "messages")
            return Encoded(self.text.encode(text, add_special_tokens), text, [*self._reads.unread(fields), *warnings])

        return await off_loop(length, work)
