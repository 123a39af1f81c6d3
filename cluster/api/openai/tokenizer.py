"""The tokenizer of the REST layer: text to ids off the event loop, and chat messages through the model's template.

Local folders only, and no code from them: a template is Jinja in a sandbox, everything else is data.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cluster.api.openai.content import ChatMessage, conversation
from cluster.api.openai.errors import ApiError
from cluster.api.openai.offload import off_loop
from cluster.api.openai.token_floor import TokenFloor
from cluster.config import ConfigError
from cluster.text import TextTokenizer

TEMPLATE_WORDS = frozenset(
    {"tokenize", "chat_template", "conversation", "messages", "tools", "documents", "return_dict"}
)


class ChatTokenizer:
    """`text` turns text and ids into each other; `template` is None for a model without a chat template."""

    def __init__(self, text: TextTokenizer, template: PreTrainedTokenizerBase | None) -> None:
        self.text = text
        self._template = template
        self._floor = TokenFloor.of(text.library)

    @classmethod
    def load(cls, path: str) -> Self:
        """Read a tokenizer folder.

        Raises:
            ConfigError: the folder has no usable tokenizer.
        """
        text = TextTokenizer.load(path)
        if not _has_template(Path(path)):
            return cls(text, None)
        try:
            # Only the template is wanted: AutoTokenizer would import torch for it, seconds of start-up in each replica.
            template = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a broken folder
            raise ConfigError(f"the chat template in {path} cannot be loaded: {error}") from error
        return cls(text, template)

    @property
    def has_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    async def encode(
        self, text: str, add_special_tokens: bool, length: int, context_length: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text, encoded in a thread where the body that it came in is long (`length` bytes).

        Raises:
            ApiError: 400 that blames `param` when the text cannot fit into the context; the text is not encoded then.
        """

        def work() -> list[int]:
            self._check_length(text, context_length, param)
            return self.text.encode(text, add_special_tokens)

        return await off_loop(length, work)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; many are decoded in a thread."""
        return await off_loop(len(ids), lambda: self.text.decode_freely(ids))

    def _check_length(self, text: str, context_length: int | None, param: str) -> None:
        if context_length is not None and (fewest := self._floor.fewest(text)) >= context_length:
            raise ApiError(
                f"{param}: the context length of this model is {context_length} tokens, but the prompt has at least "
                f"{fewest}; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        length: int,
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        context_length: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's own format; `length` is that of the body that it came in.

        Raises:
            ApiError: 400 when there is no template, the template refuses the conversation, or the text cannot fit into
                the context.
        """
        template = self._template
        if template is None:
            raise ApiError(
                "messages: this model has no chat template; use /v1/completions with a prompt",
                param="messages",
                code="unsupported_parameter",
            )
        extra = dict(template_kwargs or {})
        if taken := sorted(TEMPLATE_WORDS & set(extra)):
            path = f"chat_template_kwargs.{taken[0]}"
            raise ApiError(f"{path}: not allowed; leave it out", param=path, code="invalid_value")

        def work() -> list[int]:
            try:
                text = template.apply_chat_template(
                    conversation(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **extra
                )
                str(text).encode()  # raises where an argument brought half of a surrogate pair
            except Exception as error:  # a template may raise anything on a client's arguments
                reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
                raise ApiError(
                    f"messages: the model's chat template refuses this conversation: {reason}",
                    param="messages",
                    code="invalid_value",
                ) from None
            self._check_length(str(text), context_length, "messages")
            return self.text.encode(str(text), add_special_tokens)

        return await off_loop(length, work)


def _has_template(folder: Path) -> bool:
    """Whether the folder has a chat template, in the tokenizer's config or in a file beside it."""
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    try:
        return bool(config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{config} is not a JSON object: {error}") from error
