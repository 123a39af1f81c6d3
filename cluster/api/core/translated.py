"""Bodies of other APIs that become chat requests, and the chat messages that are built from their items or blocks."""

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict

from cluster.api.core import constraints, fields
from cluster.api.core.adapter import Origins
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError, path_of, shown, unsupported
from cluster.api.core.fields import FieldTable, Strict
from cluster.api.core.generation import PenaltyFields
from cluster.api.core.limits import RequestLimits
from cluster.api.core.service import Served

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos")
OTHERS = ("stop", "include_stop_str_in_output", "routed_dp_rank", "request_id", "cache_salt")
CHATS = ("chat_template_kwargs", "include_reasoning", "separate_reasoning")
FORMS = ("structured_outputs", *constraints.FIELDS)
EXTENSIONS = frozenset({*PenaltyFields.model_fields, *FORMS, *SAMPLING, *OTHERS, *CHATS})
"""Fields of a chat request that every API takes under the same name, with the same meaning and the same errors."""


class Translated(NamedTuple):
    """A body as a chat request, and the fields of the body that its parts came from."""

    chat: ChatRequest
    origins: Origins


class TranslatedBody(Strict):
    """Base of the bodies that become chat requests. `model_extra` holds the extensions, unchanged."""

    model_config = ConfigDict(extra="allow")
    extensions: ClassVar[frozenset[str]] = EXTENSIONS

    @classmethod
    def honoured(cls) -> Collection[str]:
        """The names of the API's own fields and of the extensions."""
        return {*cls.model_fields, *cls.extensions}

    def asked_beside(self) -> dict[str, Any]:
        """Return the extensions in this body, unchanged."""
        return dict(self.model_extra or {})

    def checked(self, service: Served, limits: RequestLimits) -> Translated:
        """Return this body as a chat request that is checked against the model and the limits.

        Raises:
            ApiError: the body cannot be served; the error names the field of this body.
        """
        chat, origins = self.translated()
        with origins.named():
            chat.check(service.model, limits)
        return Translated(chat.filled(service.model.sampling), origins)

    def translated(self) -> Translated:
        """Return this body as a chat request.

        Raises:
            ApiError: 400 that names the field of this body.
        """
        raise NotImplementedError


def translation(chat: Mapping[str, Any], origins: Origins) -> Translated:
    """Validate `chat`, the translation of a body, as a chat request; a 400 names the field of the body."""
    with origins.named():
        read, _ = ChatRequest.read(chat)
    return Translated(read, origins)


def table_of(
    harmless: Collection[str], refused: Mapping[str, tuple[Any, ...]], remedies: Mapping[str, str]
) -> FieldTable:
    """Return the table of an API. A field that only other endpoints honour is refused, never ignored."""
    elsewhere: dict[str, tuple[Any, ...]] = {}  # for each such field its default, which is accepted
    for name, field in ChatRequest.model_fields.items():
        default = field.get_default(call_default_factory=True)
        plain = isinstance(default, bool | int | str | list)
        elsewhere[name] = (default,) if plain and not field.is_required() else ()
    both = {**elsewhere, **fields.REFUSED, **refused}
    return FieldTable(
        frozenset({*fields.HARMLESS, *harmless}),
        {name: values for name, values in both.items() if name in refused or name not in harmless},
        {**{name: fields.REMEDIES[name] for name in fields.REFUSED if name in fields.REMEDIES}, **remedies},
    )


def readable_json(value: Any) -> Any:
    """Return a JSON value of a body unchanged, if UTF-8 can encode all its strings.

    Raises:
        ValueError: a string holds half of a surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is not text") from None
    return value


def not_taken(path: str, value: Any, remedy: str) -> ApiError:
    """Return a 400 for a part of a body that this server knows and does not honour."""
    return unsupported(path, f"{shown(value)} is not supported by this server; {remedy}")


class Dialogue:
    """Chat messages, built from parts in order. An assistant's turn (reasoning, text, tool calls) becomes one message.

    `origins` maps the path of each message and part to the path of its source in the other API's body. The methods take
    the path of the source as `origin`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}
        self._turn: dict[str, Any] | None = None

    def say(self, role: str, text: str, origin: str, at: str = "content") -> None:
        """Add a message, or the text of the assistant's turn. The text came from the field `at` of `origin`, or from
        `origin` itself if `at` is empty.
        """
        if role == "assistant":
            turn = self._assistant(origin, not_after=("content", "tool_calls"))
            turn["content"] = text
        else:
            self._add({"role": role, "content": text}, origin)
        self.origins[f"{self._last}.content"] = path_of(origin, at) if at else origin

    def think(self, text: str, origin: str) -> None:
        """Add the reasoning that precedes the assistant's next text or tool call."""
        turn = self._assistant(origin, not_after=("reasoning_content", "content", "tool_calls"))
        turn["reasoning_content"] = text
        self.origins[f"{self._last}.reasoning_content"] = origin

    def call(self, call_id: str, name: str, arguments: str, origin: str, id_at: str) -> None:
        """Add a tool call of the assistant; its id came from the field `id_at` of `origin`."""
        turn = self._assistant(origin, not_after=())
        calls = turn.setdefault("tool_calls", [])
        path = f"{self._last}.tool_calls.{len(calls)}"
        self.origins |= {path: origin, f"{path}.function": origin, f"{path}.id": path_of(origin, id_at)}
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str, origin: str, id_at: str, at: str) -> None:
        """Add the result of a tool; text and id came from the fields `at` and `id_at` of `origin`."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, origin)
        self.origins[f"{self._last}.tool_call_id"] = path_of(origin, id_at)
        self.origins[f"{self._last}.content"] = path_of(origin, at)

    def end_turn(self) -> None:
        """End the assistant's turn: its next part begins a new message."""
        self._turn = None

    @property
    def _last(self) -> str:
        return f"messages.{len(self.messages) - 1}"

    def _add(self, message: dict[str, Any], origin: str) -> dict[str, Any]:
        self._turn = None
        self.messages.append(message)
        self.origins[self._last] = origin
        return message

    def _assistant(self, origin: str, not_after: tuple[str, ...]) -> dict[str, Any]:
        """Return the assistant's open message. If no message is open, or the open one already has a part in
        `not_after`, add a new message and return that.
        """
        turn = self._turn
        if turn is None or any(turn.get(part) for part in not_after):
            turn = self._add({"role": "assistant", "content": ""}, origin)
            self._turn = turn
        return turn
