"""Input items of earlier answers about built-in tools (shell, web search, MCP, ...): calls and their outputs.

In the chat request, a call becomes a function call, and an output becomes the result of this call. An item without
useful text, such as an image, is left out with a warning.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ConfigDict

from cluster.api.core.fields import StrictModel
from cluster.chat.blocks import try_parse_json

CallKind = Literal["local_shell_call", "shell_call", "apply_patch_call", "tool_search_call", "program"]
OutputKind = Literal[
    "local_shell_call_output", "shell_call_output", "apply_patch_call_output", "tool_search_output", "program_output"
]
CallWithOutputKind = Literal["mcp_call", "file_search_call", "code_interpreter_call", "web_search_call"]
IgnoredKind = Literal[
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
]
OtherKind = Literal[CallKind, OutputKind, CallWithOutputKind, IgnoredKind]
OTHER_KINDS: tuple[str, ...] = get_args(OtherKind)
ARGUMENTS_FIELD: Mapping[str, str] = {
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
"""For each item type that is a call: the field with the arguments of the tool."""
OUTPUT_FIELDS: Mapping[str, tuple[str, ...]] = {
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
"""For each item type with the output of a tool: the fields that may hold the output; the first non-empty one counts."""


class CalledTool(NamedTuple):
    """A tool call; `arguments` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str


class ToolResult(NamedTuple):
    """The output of a tool call, as text."""

    call_id: str
    text: str


class OtherItem(StrictModel):
    """A call or an output of a tool that is not a function. `model_extra` holds the fields of OpenAI's item type."""

    model_config = ConfigDict(extra="allow")

    type: OtherKind

    @property
    def calls_and_results(self) -> list[CalledTool | ToolResult]:
        """What this item adds to the chat: a function call, an output, or both. The list is empty if the item is left
        out.
        """
        fields = self.model_extra or {}
        output = next((fields[name] for name in OUTPUT_FIELDS.get(self.type, ()) if fields.get(name)), None)
        if self.type in get_args(CallWithOutputKind) and output is None:
            return []  # no later item has the output, so the call would never get its result
        call_id = str(fields.get("call_id") or fields.get("id") or self.type)
        result: list[CalledTool | ToolResult] = []
        if self.type in ARGUMENTS_FIELD:
            name = fields.get("name") or self.type.removesuffix("_call")
            result.append(
                CalledTool(
                    call_id, str(name), _arguments(fields.get(ARGUMENTS_FIELD[self.type]), ARGUMENTS_FIELD[self.type])
                )
            )
        if self.type in OUTPUT_FIELDS:
            result.append(ToolResult(call_id, _output_text(output)))
        return result


def _arguments(value: Any, field: str) -> str:
    """Return a tool's arguments as the text of a JSON object. Any other value becomes an object with one field,
    `field`.
    """
    arguments = try_parse_json(value) if isinstance(value, str) and field == "arguments" else value
    return json.dumps(arguments if isinstance(arguments, dict) else {field: value}, ensure_ascii=False)


def _output_text(value: Any) -> str:
    """Return the output of a tool as text. A string is unchanged, null becomes "", a list of text parts becomes their
    joined texts, and anything else becomes JSON.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    return json.dumps(value, ensure_ascii=False)
