"""Bodies of other APIs that become chat requests."""

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict

from cluster.api.core import constraints, fields
from cluster.api.core.adapter import Origins
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError, shown, unsupported
from cluster.api.core.fields import FieldTable, Strict
from cluster.api.core.generation import PenaltyFields

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
