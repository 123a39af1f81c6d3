"""The messages of /v1/messages (text, thinking, tool use and tool result blocks), and their chat messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, PlainValidator

from cluster.api.core.errors import wrong
from cluster.api.core.fields import Strict, Text, read_at, read_each, text_of_parts
from cluster.api.core.translated import Dialogue, not_taken, readable_json

Role = Literal["user", "assistant", "system"]
ServerResult = Literal[
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_result",
]


class TextBlock(Strict):
    """A text block."""

    type: Literal["text"]
    text: Text


class ToolReferenceBlock(Strict):
    """A tool that a tool search has found, in the result of the search."""

    type: Literal["tool_reference"]
    tool_name: Text


def _text(value: Any) -> str:
    return "" if value is None else text_of_parts(value, {"text": "text"})


def _result_text(value: Any) -> str:
    """Return the result of a tool as text: its texts, and the names of tools that a search has found."""
    return "" if value is None else text_of_parts(value, {"text": "text", "tool_reference": "tool_name"})


Texts = Annotated[str, PlainValidator(_text, json_schema_input_type=str | list[TextBlock])]
Given = Annotated[str, PlainValidator(_result_text, json_schema_input_type=str | list[TextBlock | ToolReferenceBlock])]
BILLING = "x-anthropic-billing-header:"


def _system(value: Any) -> str:
    """Return the system text without Claude Code's billing block. The block is meant for Anthropic's own servers and
    changes with every request, so no prefix of a prompt with it would be found in the prefix cache.
    """
    if isinstance(value, list):
        value = [part for part in value if not (isinstance(part, dict) and str(part.get("text")).startswith(BILLING))]
    return _text(value)


System = Annotated[str, PlainValidator(_system, json_schema_input_type=str | list[TextBlock])]


class ThinkingBlock(Strict):
    """Thinking of an earlier answer. This server signs nothing, so the signature is ignored."""

    type: Literal["thinking"]
    thinking: Text
    signature: str = ""


class ToolUseBlock(Strict):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(readable_json)]


class ServerToolUseBlock(Strict):
    """A call of a tool that another server ran during an earlier answer."""

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(readable_json)]


class ServerToolResultBlock(Strict):
    """The result of a tool that another server ran: pages found, output of code, or an error."""

    type: ServerResult
    tool_use_id: Text
    content: Annotated[Any, AfterValidator(readable_json)] = None

    @property
    def text(self) -> str:
        """The result as text: a string unchanged, texts joined, anything else as JSON without encrypted fields."""
        given = _readable_part(self.content)
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _readable_part(value: Any) -> Any:
    """Return a value without encrypted fields; a list of text blocks becomes one text."""
    if isinstance(value, list):
        if value and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
            return "".join(part["text"] for part in value)
        return [_readable_part(part) for part in value]
    if isinstance(value, dict):
        return {name: _readable_part(part) for name, part in value.items() if not name.startswith("encrypted_")}
    return value


class ToolResultBlock(Strict):
    """The result of a tool. `is_error` is ignored: chat templates have no field for it, so the content must say it."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Given = ""
    is_error: bool = False


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ServerToolUseBlock | ServerToolResultBlock
OF_ROLES: Mapping[str, Mapping[str, type[Block]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "tool_use": ToolUseBlock,
        **dict.fromkeys(("server_tool_use", "mcp_tool_use"), ServerToolUseBlock),
        **dict.fromkeys(get_args(ServerResult), ServerToolResultBlock),
    },
    "system": {"text": TextBlock},
}
REMEDIES: Mapping[str, str] = {
    "image": "this model reads text; leave it out",
    "document": "this model reads text; send the document's text",
    "redacted_thinking": "it was encrypted elsewhere; leave it out",
}


class Message(Strict):
    """A message of the user or the assistant, or a system message between them."""

    role: Role
    content: Annotated[Any, PlainValidator(lambda value: value, json_schema_input_type=str | list[Block])]


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A validated message. `blocks` has its content if that was a list; else `text` has it."""

    role: Role
    text: str
    blocks: Sequence[Block]


def messages_of(value: Any) -> list[MessageContent]:
    """Return the messages of a body.

    Raises:
        ApiError: 400 that names the message and the field.
        ValueError: `value` is not a list, or is empty.
    """
    if value == []:
        raise ValueError("must not be empty")
    return read_each(value, _message, "messages")


def _message(value: Any, path: str) -> MessageContent:
    message = read_at(Message, value, path)
    content, where = message.content, f"{path}.content"
    if not isinstance(content, list):
        try:
            return MessageContent(message.role, text_of_parts(content, {"text": "text"}), ())
        except ValueError as error:
            raise wrong(where, str(error), "invalid_type") from None
    blocks = [_block(one, message.role, f"{where}.{at}") for at, one in enumerate(content)]
    return MessageContent(message.role, "", blocks)


def _block(value: Any, role: str, path: str) -> Block:
    kind = value.get("type") if isinstance(value, dict) else None
    kinds = OF_ROLES[role]
    found = kinds.get(kind) if isinstance(kind, str) else None
    if isinstance(value, dict) and found is None:
        may = f"a message of role {role} may have {', '.join(kinds)}"
        raise not_taken(f"{path}.type", kind, REMEDIES.get(str(kind), may))
    return read_at(found or TextBlock, value, path)


def dialogue_of(messages: Sequence[MessageContent], system: str | None) -> Dialogue:
    """Return the messages as chat messages, with the system text as the first."""
    made = Dialogue()
    if system:  # an empty system message would replace the template's default one
        made.say("system", system, "system", at="")
    for at, message in enumerate(messages):
        made.end_turn()
        path = f"messages.{at}"
        if not message.blocks:
            made.say(message.role, message.text, path)
        elif message.role == "assistant":
            _assistant(made, message.blocks, path)
        else:
            _other(made, message, path)
    return made


def _assistant(made: Dialogue, blocks: Sequence[Block], path: str) -> None:
    """Add an assistant's message. Consecutive text blocks are joined, and so are consecutive thinking blocks."""
    for first, run in _runs(blocks):
        origin = f"{path}.content.{first}"
        if isinstance(run[0], ServerToolResultBlock):
            made.result(run[0].tool_use_id, run[0].text, origin, "tool_use_id", "content")
        elif isinstance(run[0], ToolUseBlock | ServerToolUseBlock):
            arguments = json.dumps(run[0].input, ensure_ascii=False)
            made.call(run[0].id, run[0].name, arguments, origin, id_at="id")
        elif isinstance(run[0], ThinkingBlock):
            made.think("".join(one.thinking for one in run if isinstance(one, ThinkingBlock)), origin)
        else:
            made.say("assistant", _joined(run), path)


def _other(made: Dialogue, message: MessageContent, path: str) -> None:
    """Add a user or system message. Tool results become separate messages; consecutive text blocks are joined."""
    for first, run in _runs(message.blocks):
        if isinstance(run[0], ToolResultBlock):
            made.result(run[0].tool_use_id, run[0].content, f"{path}.content.{first}", "tool_use_id", "content")
        else:
            made.say(message.role, _joined(run), path)


def _joined(run: Sequence[Block]) -> str:
    return "".join(one.text for one in run if isinstance(one, TextBlock))


def _runs(blocks: Sequence[Block]) -> list[tuple[int, list[Block]]]:
    """Return (index of the first block, blocks) of each run of text or thinking blocks. Others are runs of one."""
    runs: list[tuple[int, list[Block]]] = []
    for at, block in enumerate(blocks):
        joins = isinstance(block, TextBlock | ThinkingBlock) and runs and type(runs[-1][1][0]) is type(block)
        if joins:
            runs[-1][1].append(block)
        else:
            runs.append((at, [block]))
    return runs
