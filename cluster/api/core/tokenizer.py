"""The tokenizer of the REST layer: encodes text off the event loop, and renders chats with the model's template.

It reads local folders only, and runs no code from them: a template is sandboxed Jinja, everything else is data.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cluster.api.core.content import ChatMessage
from cluster.api.core.conversation import ConversationFields
from cluster.api.core.errors import ApiError
from cluster.api.core.offload import off_loop
from cluster.api.core.template_rendering import rendered
from cluster.api.core.templates import ChatTemplate, has_template, messages_for, model_type_of, template_of_processor
from cluster.api.core.token_floor import TokenFloor
from cluster.chat.formats.choose import ChosenFormat, choose
from cluster.config import ConfigError
from cluster.tokenizer.tokenizer import TextTokenizer

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
