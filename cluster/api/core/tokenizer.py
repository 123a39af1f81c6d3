"""The tokenizer of the REST layer: encodes text off the event loop, and renders chats with the model's template.

It reads local folders only, and runs no code from them: a template is sandboxed Jinja, everything else is data.
"""

import json
import logging
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cluster.api.core.conversation import ChatMessage, ConversationFields
from cluster.api.core.errors import ApiError
from cluster.api.core.limits import off_loop
from cluster.api.core.templates import (
    ChatTemplate,
    has_template,
    messages_for,
    model_type_of,
    rendered,
    template_of_processor,
)
from cluster.chat.formats.choose import ChosenFormat, choose
from cluster.config import ConfigError
from cluster.tokenizer.tokenizer import BYTE_OF_CHARACTER, TextTokenizer

LETTERS = string.ascii_letters.encode() + bytes(range(0x80, 0x100))  # bytes beyond ASCII count as letters
NFC_SHRINKS = 3  # NFC turns at most 3 bytes of UTF-8 into 1: the Kelvin sign into K
KEEPING = frozenset({"ByteLevel", "Metaspace", "Split", "Digits", "Sequence"})  # pre-tokenizers that drop no text


class TokenFloor:
    """The bound for one tokenizer: the most bytes, and the most letters, that one token covers; both 0 if unknown."""

    def __init__(self, bytes_per_token: int, letters_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._letters_per_token = letters_per_token

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Derive the bound from a tokenizer's vocabulary, normalizer and pre-tokenizer."""
        shrinks = _shrinks(tokenizer)
        if not shrinks:
            return cls(0, 0)
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        byte_level = _is_byte_level(tokenizer)
        longest = letters = 0
        for token in tokenizer.get_vocab(with_added_tokens=True):
            whole = token in added or not byte_level
            raw = token.encode() if whole else bytes(BYTE_OF_CHARACTER.get(character, 0) for character in token)
            longest = max(longest, len(raw))
            letters = max(letters, _letters(raw))
        return cls(shrinks * longest, shrinks * letters)

    def fewest(self, text: str) -> int:
        """Return a lower bound on the number of tokens of the text."""
        if not self._bytes_per_token:
            return 0
        raw = text.encode("utf-8", "replace")
        fewest = -(-len(raw) // self._bytes_per_token)  # rounded up
        return max(fewest, -(-_letters(raw) // self._letters_per_token)) if self._letters_per_token else fewest


def _letters(raw: bytes) -> int:
    return len(raw) - len(raw.translate(None, LETTERS))


def _shrinks(tokenizer: Tokenizer) -> int:
    """Return the factor by which the normalizer may shorten a text, or 0 if the tokenizer may drop text."""
    if type(tokenizer.model).__name__ != "BPE":
        return 0
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return 0  # such a token absorbs any length of white space next to it
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    names = BYTE_OF_CHARACTER if _is_byte_level(tokenizer) else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(name in vocabulary for name in names):
        return 0
    if not (_is_byte_level(tokenizer) or tokenizer.model.byte_fallback):
        return 0
    for node in _nodes(tokenizer.pre_tokenizer):
        if node["type"] not in KEEPING or node.get("behavior") == "Removed":
            return 0
    factor = 1
    for node in _nodes(tokenizer.normalizer):
        if node["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif node["type"] == "Replace":
            pattern = node["pattern"].get("String")
            if pattern is None or len(node["content"].encode()) < len(pattern.encode()):
                return 0
        elif node["type"] not in ("Prepend", "Sequence"):
            return 0
    return factor


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return any(node["type"] == "ByteLevel" for node in _nodes(tokenizer.pre_tokenizer))


def _nodes(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a tokenizer's component, and of all components inside it."""
    waiting = [json.loads(part.__getstate__())] if part is not None else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict):
            if isinstance(node.get("type"), str):
                yield node
            waiting.extend(value for value in node.values() if isinstance(value, list | dict))


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
            raise ApiError(
                f"{param}: prompt is too long: {fewest} tokens > {context_length - 1} maximum (at least so many), as "
                f"this model's maximum context length is {context_length} tokens here; shorten the prompt",
                param=param,
                code="context_length_exceeded",
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
            raise ApiError(
                "messages: this model has no chat template; use /v1/completions with a prompt",
                param="messages",
                code="unsupported_parameter",
            )
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
                raise ApiError(
                    f"messages: the model's chat template refuses this conversation: {reason}",
                    param="messages",
                    code="invalid_value",
                ) from None
            self._check_length(text, context_length, "messages")
            return Encoded(self.text.encode(text, add_special_tokens), text, [*self._reads.unread(fields), *warnings])

        return await off_loop(length, work)
