"""What may be in a request: strict types, text that UTF-8 can encode, prompts of four kinds, messages of text.

Strict: `"5"`, `true` and `5.5` are not the integer 5.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, ValidationError

from cluster.api.openai.errors import ApiError, invalid, path_of, shown
from cluster.api.openai.fields import GENERATION, Table, sort_fields

ROLES = ("system", "developer", "user", "assistant")
ROLES_SHOWN = ", ".join(ROLES)


class Strict(BaseModel):
    """Base of the request models."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())
    table: ClassVar[Table] = GENERATION

    @classmethod
    def honoured(cls) -> Collection[str]:
        """The names of the fields that this body honours."""
        return cls.model_fields

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """The request in a JSON body, and warnings about unknown fields.

        Raises:
            ApiError: 400 that names the first field at fault.
        """
        kept, warnings = sort_fields(body, cls.honoured(), cls.table)
        try:
            return cls.model_validate(kept), warnings
        except ValidationError as error:
            raise invalid(error) from None


def readable(text: str) -> str:
    """A string that UTF-8 can encode; JSON escapes may hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not text") from None
    return text


def list_of_stops(value: Any) -> Any:
    """One stop string as a list of one."""
    return [value] if isinstance(value, str) else value


def list_of_prompts(value: Any) -> list[Any]:
    """`str | list[str] | list[int] | list[list[int]]` as a list of prompts."""
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


def _plain_text(value: Any) -> str:
    """The content of a message: a string, or text parts that are joined."""
    if isinstance(value, str):
        return readable(value)
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of text parts, got {shown(value)}")
    texts = []
    for at, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(
                f"part {at} must be {{'type': 'text', 'text': ...}}: this model reads text, not {shown(kind)}"
            )
        texts.append(readable(part["text"]))
    return "".join(texts)


Text = Annotated[str, AfterValidator(readable)]


class ChatMessage(Strict):
    """One message; other fields of an assistant's answer, such as tool_calls, may be sent back only empty."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Annotated[str, PlainValidator(_plain_text, json_schema_input_type=str | list[dict[str, str]])]
    name: Text | None = None


def check_messages(messages: Sequence[ChatMessage], most: int) -> None:
    """Refuse more than `most` messages, and roles and parts of messages that this server does not read.

    Raises:
        ApiError: 400 that names the message and the field.
    """
    if len(messages) > most:
        raise ApiError(f"messages: at most {most}, got {len(messages)}", param="messages", code="invalid_value")
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        if message.role not in ROLES:
            raise ApiError(
                f"{path}.role: must be one of {ROLES_SHOWN}, got {shown(message.role)}",
                param=f"{path}.role",
                code="invalid_value",
            )
        for name, value in (message.model_extra or {}).items():
            if value:
                extra = path_of(path, name)
                raise ApiError(
                    f"{extra}: {shown(value)} is not supported by this server; leave it out",
                    param=extra,
                    code="unsupported_parameter",
                )


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """The messages as a chat template takes them."""
    return [message.model_dump(include={"role", "content", "name"}, exclude_none=True) for message in messages]
