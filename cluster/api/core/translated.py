"""What the Responses and Messages APIs share: their bodies become chat requests, and their items or blocks messages."""

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict

from cluster.api.core import constraints, fields
from cluster.api.core.adapter import Origins
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError, field_path, truncated_repr, unsupported_parameter
from cluster.api.core.fields import FieldTable, StrictModel
from cluster.api.core.generation import PenaltyFields
from cluster.api.core.limits import RequestLimits
from cluster.api.core.service import ServedModel

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos")
OTHER_FIELDS = ("stop", "include_stop_str_in_output", "routed_dp_rank", "request_id", "cache_salt", "speculation")
CHAT_FIELDS = ("chat_template_kwargs", "include_reasoning", "separate_reasoning")
CONSTRAINT_FIELDS = ("structured_outputs", *constraints.TOP_LEVEL_KINDS)
EXTENSIONS = frozenset({*PenaltyFields.model_fields, *CONSTRAINT_FIELDS, *SAMPLING_FIELDS, *OTHER_FIELDS, *CHAT_FIELDS})
"""Fields of a chat request that bodies of other APIs may have too: same name, same meaning, same errors."""


class ChatTranslation(NamedTuple):
    """A body as a chat request. `origins` maps the fields of the chat request to the fields of the body."""

    chat: ChatRequest
    origins: Origins


class TranslatedBody(StrictModel):
    """Base of the bodies that become chat requests. `model_extra` holds the extensions, unchanged."""

    model_config = ConfigDict(extra="allow")
    extensions: ClassVar[frozenset[str]] = EXTENSIONS

    @classmethod
    def honoured(cls) -> Collection[str]:
        """The names of the API's own fields and of the extensions."""
        return {*cls.model_fields, *cls.extensions}

    def extension_fields(self) -> dict[str, Any]:
        """Return the extensions in this body, unchanged."""
        return dict(self.model_extra or {})

    def to_checked_chat(self, service: ServedModel, limits: RequestLimits) -> ChatTranslation:
        """Return this body as a chat request that is checked against the model and the limits.

        Raises:
            ApiError: the body cannot be served; the error names the field of this body.
        """
        chat, origins = self.to_chat()
        with origins.translate_errors():
            chat.check(service.model, limits)
        return ChatTranslation(chat.with_defaults(service.model.sampling_defaults), origins)

    def to_chat(self) -> ChatTranslation:
        """Return this body as a chat request.

        Raises:
            ApiError: 400 that names the field of this body.
        """
        raise NotImplementedError


def validate_chat(chat: Mapping[str, Any], origins: Origins) -> ChatTranslation:
    """Validate `chat`, the translation of a body, as a chat request; a 400 names the field of the body."""
    with origins.translate_errors():
        request, _ = ChatRequest.read(chat)
    return ChatTranslation(request, origins)


def build_field_table(
    harmless: Collection[str], refused: Mapping[str, tuple[Any, ...]], remedies: Mapping[str, str]
) -> FieldTable:
    """Return the field table of an API: the common table with the API's own `harmless`, `refused` and `remedies`. A
    field that only other endpoints honour is refused, never ignored.
    """
    chat_defaults: dict[str, tuple[Any, ...]] = {}  # maps fields of a chat request to accepted values
    for name, field in ChatRequest.model_fields.items():
        default = field.get_default(call_default_factory=True)
        has_json_default = isinstance(default, bool | int | str | list)
        chat_defaults[name] = (default,) if has_json_default and not field.is_required() else ()
    all_refused = {**chat_defaults, **fields.REFUSED, **refused}
    return FieldTable(
        frozenset({*fields.HARMLESS, *harmless}),
        {name: values for name, values in all_refused.items() if name in refused or name not in harmless},
        {**{name: fields.REMEDIES[name] for name in fields.REFUSED if name in fields.REMEDIES}, **remedies},
    )


def require_utf8_json(value: Any) -> Any:
    """Check that UTF-8 can encode all strings of a JSON value, and return the value unchanged.

    Raises:
        ValueError: a string holds half of a surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is not text") from None
    return value


def unsupported_part(path: str, value: Any, remedy: str) -> ApiError:
    """Return a 400 for a part of a body that this server does not support. `remedy` tells the client what to do."""
    return unsupported_parameter(path, f"{truncated_repr(value)} is not supported by this server; {remedy}")


class Dialogue:
    """Builds chat messages from parts, in order. The parts of an assistant's turn (reasoning, text, tool calls) form
    one message.

    `origins` maps the path of each message and part to the path of its source in the other API's body. The methods take
    the path of the source as `origin`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}
        self._open_message: dict[str, Any] | None = None

    def add_text(self, role: str, text: str, origin: str, text_field: str = "content") -> None:
        """Add a message. With the role assistant, add the text to the assistant's turn. The text came from the field
        `text_field` of `origin`, or from `origin` itself if `text_field` is empty.
        """
        if role == "assistant":
            message = self._assistant_message(origin, blocking_fields=("content", "tool_calls"))
            message["content"] = text
        else:
            self._add_message({"role": role, "content": text}, origin)
        self.origins[f"{self._last_path}.content"] = field_path(origin, text_field) if text_field else origin

    def add_reasoning(self, text: str, origin: str) -> None:
        """Add the reasoning that precedes the assistant's next text or tool call."""
        message = self._assistant_message(origin, blocking_fields=("reasoning_content", "content", "tool_calls"))
        message["reasoning_content"] = text
        self.origins[f"{self._last_path}.reasoning_content"] = origin

    def add_tool_call(self, call_id: str, name: str, arguments: str, origin: str, id_field: str) -> None:
        """Add a tool call of the assistant; its id came from the field `id_field` of `origin`."""
        message = self._assistant_message(origin, blocking_fields=())
        calls = message.setdefault("tool_calls", [])
        path = f"{self._last_path}.tool_calls.{len(calls)}"
        self.origins |= {path: origin, f"{path}.function": origin, f"{path}.id": field_path(origin, id_field)}
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_tool_result(self, call_id: str, text: str, origin: str, id_field: str, text_field: str) -> None:
        """Add the result of a tool. Its id came from the field `id_field` of `origin`, and its text from the field
        `text_field`, or from `origin` itself if `text_field` is empty.
        """
        self._add_message({"role": "tool", "tool_call_id": call_id, "content": text}, origin)
        self.origins[f"{self._last_path}.tool_call_id"] = field_path(origin, id_field)
        self.origins[f"{self._last_path}.content"] = field_path(origin, text_field) if text_field else origin

    def end_turn(self) -> None:
        """End the assistant's turn: its next part begins a new message."""
        self._open_message = None

    @property
    def _last_path(self) -> str:
        return f"messages.{len(self.messages) - 1}"

    def _add_message(self, message: dict[str, Any], origin: str) -> dict[str, Any]:
        self._open_message = None
        self.messages.append(message)
        self.origins[self._last_path] = origin
        return message

    def _assistant_message(self, origin: str, blocking_fields: tuple[str, ...]) -> dict[str, Any]:
        """Return the open message of the assistant's turn. If no message is open, or if the open message has a value in
        one of `blocking_fields`, add a new message and return it.
        """
        message = self._open_message
        if message is None or any(message.get(field) for field in blocking_fields):
            message = self._add_message({"role": "assistant", "content": ""}, origin)
            self._open_message = message
        return message
