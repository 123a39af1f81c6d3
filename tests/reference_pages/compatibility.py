"""Generates docs/compatibility.md: how each API route treats every request field of OpenAI, Anthropic, vLLM and SGLang.

The treatment of each field is read from the code. `python -m tests.reference_pages.compatibility` writes the file, and
`tests/unit/api/test_compatibility.py` checks that the file matches the code.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from cluster.api.anthropic.fields import TABLE as MESSAGES_TABLE
from cluster.api.anthropic.request import MessagesRequest
from cluster.api.core.conversation import ChatRequest
from cluster.api.core.fields import FIELD_ALIASES, GENERATION_TABLE, FieldTable
from cluster.api.core.generation import CompletionRequest
from cluster.api.openai.responses.fields import TABLE as RESPONSES_TABLE
from cluster.api.openai.responses.request import ResponseRequest
from tests.reference_pages.peer_fields import PEERS

FILE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
HEAD = """# Compatibility

Every request field of the servers named, and what becomes of it here. *Honoured*: it does what its documentation says.
*Harmless*: taken, and it cannot change the answer. *Refused*: a 400 that names it, unless it has a value that asks for
nothing; the remedy is in the message. An unknown field goes through with a warning in `x-aerie-warning`.

- `logit_bias` may name 1,024 ids, as any object of a body may have 1,024 fields. OpenAI takes 300 to 1,024 by model.
- `seed` is any whole number of 64 bits of either sign, -2^63 to 2^64 - 1, and is taken modulo 2^64: -2 and 2^64 - 2 are
  one seed. -1 asks for none, as with vLLM; 2^64 - 1 is the seed with these bits.

Written by `python -m tests.reference_pages.compatibility` from the code that reads requests.
"""


@dataclass(frozen=True)
class Route:
    """One API route: the fields that it honours, and the table of the fields that it refuses or ignores."""

    path: str
    honoured: Collection[str]
    table: FieldTable

    def treatment(self, name: str) -> str:
        """Return how the route treats a field, as Markdown text.

        Raises:
            LookupError: the code has no rule for the field.
        """
        if FIELD_ALIASES.get(name, name) in self.honoured:
            aerie_name = FIELD_ALIASES.get(name, name)
            return "honoured" if aerie_name == name else f"honoured, as `{aerie_name}`"
        if name in self.table.refused or name in self.table.remedies:
            accepted_values = ", ".join(f"`{_json(value)}`" for value in self.table.refused.get(name, ()))
            remedy = self.table.remedies.get(name, "")
            details = "; ".join(
                part for part in (remedy, f"passes as {accepted_values}" if accepted_values else "") if part
            )
            return f"refused{': ' if details else ''}{details}"
        if name in self.table.harmless:
            return "harmless"
        raise LookupError(f"{self.path}: {name}")


def _json(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) or '""'


ROUTES = {
    "/v1/chat/completions": Route("/v1/chat/completions", set(ChatRequest.model_fields), GENERATION_TABLE),
    "/v1/completions": Route("/v1/completions", set(CompletionRequest.model_fields), GENERATION_TABLE),
    "/v1/responses": Route("/v1/responses", ResponseRequest.honoured(), RESPONSES_TABLE),
    "/v1/messages": Route("/v1/messages", MessagesRequest.honoured(), MESSAGES_TABLE),
}


def documented_fields() -> dict[str, dict[str, set[str]]]:
    """Return the documented field names, by route and by the server that documents them."""
    openai, anthropic = f"OpenAI (client {version('openai')})", f"Anthropic (client {version('anthropic')})"
    fields_by_route: dict[str, dict[str, set[str]]] = {path: {} for path in ROUTES}
    fields_by_route["/v1/chat/completions"][openai] = _names(chat_create_params.CompletionCreateParamsBase) | {"stream"}
    fields_by_route["/v1/completions"][openai] = _names(completion_create_params.CompletionCreateParamsBase) | {
        "stream"
    }
    fields_by_route["/v1/responses"][openai] = _names(response_create_params.ResponseCreateParamsBase) | {"stream"}
    fields_by_route["/v1/messages"][anthropic] = _names(message_create_params.MessageCreateParamsBase) | {"stream"}
    for (server, path), names in PEERS.items():
        fields_by_route[path][server] = set(names.split())
    return fields_by_route


def _names(params: Any) -> set[str]:
    return set(params.__annotations__)


def unhandled_fields() -> list[str]:
    """Return the fields that some server documents and for which the code has no rule."""
    missing = []
    for path, servers in documented_fields().items():
        for name in sorted(set().union(*servers.values())):
            try:
                ROUTES[path].treatment(name)
            except LookupError as error:
                missing.append(str(error).strip("'"))
    return missing


def page_text() -> str:
    """Return the text of docs/compatibility.md."""
    parts = [HEAD]
    for path, servers in documented_fields().items():
        parts.append(f"## {path}\n\n| field | | {' | '.join(servers)} |\n|---|---|{'---|' * len(servers)}")
        parts += [_row(ROUTES[path], name, servers) for name in sorted(set().union(*servers.values()))]
        parts.append("")
    return "\n".join(parts)


def _row(route: Route, name: str, servers: Mapping[str, Collection[str]]) -> str:
    marks = " | ".join("x" if name in names else "" for names in servers.values())
    return f"| `{name}` | {route.treatment(name)} | {marks} |"


if __name__ == "__main__":
    FILE.write_text(page_text(), encoding="utf-8")
