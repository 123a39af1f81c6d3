"""Items about tools of other servers and clients, as a client sends them back: calls, and what the tools gave back.

The model is told of each as of the call of a function. An item that holds no text of use to it, such as an image, is
left out with a warning.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ConfigDict

from cluster.api.core.content import Strict
from cluster.chat.json_text import loaded

CallKind = Literal["local_shell_call", "shell_call", "apply_patch_call", "tool_search_call", "program"]
OutputKind = Literal[
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "tool_search_output",
    "program_output",
]
WholeKind = Literal["mcp_call", "file_search_call", "code_interpreter_call", "web_search_call"]
SilentKind = Literal[
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
]
OtherKind = Literal[CallKind, OutputKind, WholeKind, SilentKind]
OTHER_KINDS: tuple[str, ...] = get_args(OtherKind)
ARGUMENTS: Mapping[str, str] = {
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "tool_search_call": "arguments",
    "program": "code",
    "mcp_call": "arguments",
    "file_search_call": "queries",
    "code_interpreter_call": "code",
    "web_search_call": "action",
}
"""By the type of an item that is a call: the field that holds what the tool was given."""
GIVEN_BACK: Mapping[str, tuple[str, ...]] = {
    "local_shell_call_output": ("output",),
    "shell_call_output": ("output",),
    "apply_patch_call_output": ("output", "status"),
    "tool_search_output": ("tools",),
    "program_output": ("result",),
    "mcp_call": ("output", "error"),
    "file_search_call": ("results",),
    "code_interpreter_call": ("outputs",),
    "web_search_call": ("results",),
}
"""By the type of an item that holds what a tool gave back: the fields for it; the first with a value counts."""


class CalledTool(NamedTuple):
    """A call of a tool; `arguments` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str


class ToolResult(NamedTuple):
    """What a tool that was called gave back, as text."""

    call_id: str
    text: str


class OtherItem(Strict):
    """A call, or the output, of a tool that is no function; its fields are those that OpenAI gives an item of its
    type.
    """

    model_config = ConfigDict(extra="allow")

    type: OtherKind

    @property
    def parts(self) -> list[CalledTool | ToolResult]:
        """The item as the call of a function, as its output, or as both; empty where it is left out."""
        fields = self.model_extra or {}
        found = next((fields[name] for name in GIVEN_BACK.get(self.type, ()) if fields.get(name)), None)
        if self.type in get_args(WholeKind) and found is None:
            return []  # a call without its output would wait for one for ever
        call_id = str(fields.get("call_id") or fields.get("id") or self.type)
        made: list[CalledTool | ToolResult] = []
        if self.type in ARGUMENTS:
            name = fields.get("name") or self.type.removesuffix("_call")
            made.append(
                CalledTool(call_id, str(name), _arguments(fields.get(ARGUMENTS[self.type]), ARGUMENTS[self.type]))
            )
        if self.type in GIVEN_BACK:
            made.append(ToolResult(call_id, _text(found)))
        return made


def _arguments(given: Any, field: str) -> str:
    """What a tool was given as the JSON text of an object: the object itself, or one with the value as its field."""
    found = loaded(given) if isinstance(given, str) and field == "arguments" else given
    return json.dumps(found if isinstance(found, dict) else {field: given}, ensure_ascii=False)


def _text(given: Any) -> str:
    """What a tool gave back as text: the texts of parts, or JSON."""
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in given):
        return "".join(part["text"] for part in given)
    return json.dumps(given, ensure_ascii=False)
