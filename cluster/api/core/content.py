"""Types of the values in a request: text that UTF-8 can encode, prompts in four forms, messages, tool calls.

Types are strict: `"5"`, `true` and `5.5` are not the integer 5.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
)

from cluster.api.core.errors import ApiError, invalid, path_of, shown
from cluster.api.core.fields import GENERATION, FieldTable, sort_fields
from cluster.chat import custom

Part = TypeVar("Part", bound=BaseModel)
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLES_SHOWN = ", ".join(ROLES)


class Strict(BaseModel):
    """Base of the request models. `table` lists the fields that a body does not honour."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())
    table: ClassVar[FieldTable] = GENERATION

    @classmethod
    def honoured(cls) -> Collection[str]:
        """Return the names of the fields that this body honours."""
        return cls.model_fields

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Return the request in a JSON body, and warnings about unknown fields.

        Raises:
            ApiError: 400 that names the first wrong field.
        """
        kept, warnings = sort_fields(body, cls.honoured(), cls.table)
        try:
            return cls.model_validate(kept), warnings
        except ValidationError as error:
            raise invalid(error) from None


def read_at(kind: type[Part], value: Any, path: str) -> Part:
    """Validate a part of a body as a `kind`; `path` is the path of the part.

    Raises:
        ApiError: 400 that names the wrong field, with `path` before it.
    """
    if not isinstance(value, dict):
        raise ApiError(f"{path}: must be an object, got {shown(value)}", param=path, code="invalid_type")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid(error, path) from None


def readable(text: str) -> str:
    """Return `text`. Raise ValueError if UTF-8 cannot encode it: a JSON escape may be half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not text") from None
    return text


def list_of_stops(value: Any) -> Any:
    """Return a single stop string as a list of one; any other value unchanged."""
    return [value] if isinstance(value, str) else value


def list_of_prompts(value: Any) -> list[Any]:
    """Return `str | list[str] | list[int] | list[list[int]]` as a list of prompts. ValueError for anything else."""
    if isinstance(value, str):
        return [readable(value)]
    shape = "must be a string, a list of strings, a list of token ids or a list of such lists"
    if not isinstance(value, list):
        raise ValueError(f"{shape}, got {shown(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    first = value[0]
    if isinstance(first, str):
        _all_of(str, value, "strings")
        return [readable(text) for text in value]
    if isinstance(first, list):
        for at, ids in enumerate(value):
            if not isinstance(ids, list):
                raise ValueError(f"item {at} must be a list of token ids like the first, got {shown(ids)}")
            _all_of(int, ids, "token ids", f"item {at}: ")
        return value
    if not isinstance(first, int) or isinstance(first, bool):
        raise ValueError(f"{shape}, got a list that begins with {shown(first)}")
    _all_of(int, value, "token ids")
    return [value]


def _all_of(kind: type, items: list[Any], what: str, where: str = "") -> None:
    for at, item in enumerate(items):
        if type(item) is not kind:
            raise ValueError(f"{where}must hold {what} only, got {shown(item)} at position {at}")


def text_of_parts(value: Any, kinds: Mapping[str, str]) -> str:
    """Return a string, or the joined texts of a list of parts; `kinds` maps the type of a part to its text field.

    Raises:
        ValueError: the value has another type, a part is of another type (such as an image), or a text is invalid.
    """
    if isinstance(value, str):
        return readable(value)
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of text parts, got {shown(value)}")
    texts = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        name = kinds.get(kind) if isinstance(kind, str) else None
        if name is None:
            got = shown(part if kind is None else kind)
            raise ValueError(f"part {at} must be of type {' or '.join(kinds)}: this model reads text, not {got}")
        if not isinstance(part.get(name), str):
            raise ValueError(f"part {at}: {name} must be a string, got {shown(part.get(name))}")
        texts.append(readable(part[name]))
    return "".join(texts)


def _plain_text(value: Any) -> str:
    """Return the content of a message: a string, or the joined text of its parts."""
    return text_of_parts(value, {"text": "text"})


Text = Annotated[str, AfterValidator(readable)]
Content = Annotated[str, PlainValidator(_plain_text, json_schema_input_type=str | list[dict[str, str]])]


def _calls(value: Any) -> Any:
    """Return the calls of a message; null becomes []. A custom tool call becomes a function call whose `input` is its
    text.
    """
    if value is None:
        return []
    return [_as_function(call) for call in value] if isinstance(value, list) else value


def _as_function(call: Any) -> Any:
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    called = call.get("custom")
    if not isinstance(called, dict) or not isinstance(called.get("input"), str):
        raise ValueError("a call of type custom must have custom, an object with name and input, both strings")
    function = {"name": called.get("name"), "arguments": custom.arguments_of(called["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}


class CalledFunction(Strict):
    """The function in a tool call; `arguments` is a JSON object as text, as in answers."""

    name: Text
    arguments: Text = "{}"


class ToolCall(Strict):
    """A function call in an assistant's message, in the form that answers have."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(Strict):
    """The custom tool in a tool call, and its input text."""

    name: Text
    input: Text


class CustomToolCall(Strict):
    """A custom tool call in an assistant's message, in the form that answers have."""

    id: Text | None = None
    type: Literal["custom"]
    custom: CalledCustom


Calls = list[ToolCall | CustomToolCall]


class ChatMessage(Strict):
    """One message. `content` may be null in an assistant's message, which may have calls instead. `reasoning` and
    `reasoning_content` mean the same. Unknown fields are not read, except those in `WITH_MEANING`, which are refused.
    """

    model_config = ConfigDict(extra="allow")

    role: str
    content: Content | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], FailFast(), BeforeValidator(_calls, json_schema_input_type=Calls | None)] = (
        Field(default_factory=list)
    )
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @property
    def thought(self) -> str | None:
        """The reasoning of the assistant in this message."""
        return self.reasoning_content or self.reasoning


WITH_MEANING = frozenset({"audio", "function_call", "prefix", "partial"})
"""Unsupported fields of a message that would change the answer. They are refused; other fields give a warning."""


def unread(messages: Sequence[ChatMessage]) -> list[str]:
    """Return one warning for each unknown field name. It is no error: clients keep their own fields in messages."""
    names = {name: None for message in messages for name, value in (message.model_extra or {}).items() if value}
    return [f"messages: {shown(name)} is not read" for name in names]


OF_ROLE = dict.fromkeys(("tool_calls", "reasoning_content", "reasoning"), "assistant") | {"tool_call_id": "tool"}


def check_messages(messages: Sequence[ChatMessage], most: int) -> None:
    """Check the number, the roles and the fields of messages; `most` is the limit of messages.

    Raises:
        ApiError: 400 that names the message and the field.
    """
    if len(messages) > most:
        raise ApiError(f"messages: at most {most}, got {len(messages)}", param="messages", code="invalid_value")
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        if message.role not in ROLES:
            remedy = "; answer a call as role tool" if message.role == "function" else ""
            raise _wrong(f"{path}.role", f"must be one of {ROLES_SHOWN}, got {shown(message.role)}{remedy}")
        for name, role in OF_ROLE.items():
            if getattr(message, name) and message.role != role:
                raise _wrong(f"{path}.{name}", f"only a message of role {role} has it, not {message.role}")
        if message.content is None and message.role != "assistant":
            raise _missing(f"{path}.content")
        if message.role == "tool" and not message.tool_call_id:
            raise _missing(f"{path}.tool_call_id")
        for call_at, call in enumerate(message.tool_calls):
            _check_arguments(call, f"{path}.tool_calls.{call_at}.function.arguments")
        for name, value in (message.model_extra or {}).items():
            if value and name in WITH_MEANING:
                extra = path_of(path, name)
                raise ApiError(
                    f"{extra}: {shown(value)} is not supported by this server; leave it out",
                    param=extra,
                    code="unsupported_parameter",
                )


def _check_arguments(call: ToolCall, path: str) -> None:
    try:
        found = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _wrong(path, f"must be a JSON object as text, got {shown(call.function.arguments)}")


def _wrong(path: str, message: str) -> ApiError:
    return ApiError(f"{path}: {message}", param=path, code="invalid_value")


def _missing(path: str) -> ApiError:
    return ApiError(f"{path}: required", param=path, code="missing_required_parameter")


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
                "function": {
                    "name": call.function.name,
                    "arguments": json.loads(call.function.arguments or "{}"),
                },
            }
            for call in message.tool_calls
        ]
    return made
