"""The messages of /v1/messages with their blocks (text, thinking, tool use, tool results), as chat messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, PlainValidator

from cluster.api.core.errors import invalid_value
from cluster.api.core.fields import StrictModel, Text, read_list, text_of_parts, validate_at
from cluster.api.core.translated import Dialogue, require_utf8_json, unsupported_part

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


class TextBlock(StrictModel):
    """A text block."""

    type: Literal["text"]
    text: Text


class ToolReferenceBlock(StrictModel):
    """A part of the result of a tool search: the name of a tool that the search has found."""

    type: Literal["tool_reference"]
    tool_name: Text


def _read_text(value: Any) -> str:
    return "" if value is None else text_of_parts(value, {"text": "text"})


def _read_result_text(value: Any) -> str:
    """Return the result of a tool as one text: its texts and the names of found tools, joined. null becomes ""."""
    return "" if value is None else text_of_parts(value, {"text": "text", "tool_reference": "tool_name"})


ToolResultText = Annotated[
    str, PlainValidator(_read_result_text, json_schema_input_type=str | list[TextBlock | ToolReferenceBlock])
]
BILLING_PREFIX = "x-anthropic-billing-header:"


def _read_system(value: Any) -> str:
    """Return the system text without Claude Code's billing block. The block is meant for Anthropic's own servers. It
    changes with every request, so with it the prefix cache could not match a prompt beyond the block.
    """
    if isinstance(value, list):
        value = [
            block
            for block in value
            if not (isinstance(block, dict) and str(block.get("text")).startswith(BILLING_PREFIX))
        ]
    return _read_text(value)


System = Annotated[str, PlainValidator(_read_system, json_schema_input_type=str | list[TextBlock])]


class ThinkingBlock(StrictModel):
    """The reasoning text of an earlier answer. This server signs nothing, so the signature is ignored."""

    type: Literal["thinking"]
    thinking: Text
    signature: str = ""


class ToolUseBlock(StrictModel):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(require_utf8_json)]


class ServerToolUseBlock(StrictModel):
    """A call of a tool that another server ran during an earlier answer."""

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(require_utf8_json)]


class ServerToolResultBlock(StrictModel):
    """The result of a tool that another server ran: pages found, output of code, or an error."""

    type: ServerResult
    tool_use_id: Text
    content: Annotated[Any, AfterValidator(require_utf8_json)] = None

    @property
    def text(self) -> str:
        """The result as text. A string is unchanged and text blocks are joined. Anything else becomes JSON, without
        encrypted fields.
        """
        readable = _without_encrypted_fields(self.content)
        return readable if isinstance(readable, str) else json.dumps(readable, ensure_ascii=False)


def _without_encrypted_fields(value: Any) -> Any:
    """Return a value without encrypted fields; a list of text blocks becomes one text."""
    if isinstance(value, list):
        if value and all(isinstance(item, dict) and isinstance(item.get("text"), str) for item in value):
            return "".join(item["text"] for item in value)
        return [_without_encrypted_fields(item) for item in value]
    if isinstance(value, dict):
        return {
            name: _without_encrypted_fields(item) for name, item in value.items() if not name.startswith("encrypted_")
        }
    return value


class ToolResultBlock(StrictModel):
    """The result of a tool. `is_error` is ignored, because chat templates have no field for it: only the content can
    tell the model of an error.
    """

    type: Literal["tool_result"]
    tool_use_id: Text
    content: ToolResultText = ""
    is_error: bool = False


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ServerToolUseBlock | ServerToolResultBlock
BLOCK_TYPES_OF_ROLE: Mapping[str, Mapping[str, type[Block]]] = {
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


class Message(StrictModel):
    """A message of the user or the assistant, or a system message between them."""

    role: Role
    content: Annotated[Any, PlainValidator(lambda value: value, json_schema_input_type=str | list[Block])]


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A validated message. If the content was a list, `blocks` holds it and `text` is empty. Otherwise `text` holds it
    and `blocks` is empty.
    """

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
    return read_list(value, _read_message, "messages")


def _read_message(value: Any, path: str) -> MessageContent:
    message = validate_at(Message, value, path)
    content, content_path = message.content, f"{path}.content"
    if not isinstance(content, list):
        try:
            return MessageContent(message.role, text_of_parts(content, {"text": "text"}), ())
        except ValueError as error:
            raise invalid_value(content_path, str(error), "invalid_type") from None
    blocks = [_read_block(block, message.role, f"{content_path}.{index}") for index, block in enumerate(content)]
    return MessageContent(message.role, "", blocks)


def _read_block(value: Any, role: str, path: str) -> Block:
    block_type = value.get("type") if isinstance(value, dict) else None
    block_classes = BLOCK_TYPES_OF_ROLE[role]
    block_class = block_classes.get(block_type) if isinstance(block_type, str) else None
    if isinstance(value, dict) and block_class is None:
        allowed_types = f"a message of role {role} may have {', '.join(block_classes)}"
        raise unsupported_part(f"{path}.type", block_type, REMEDIES.get(str(block_type), allowed_types))
    return validate_at(block_class or TextBlock, value, path)


def dialogue_of(messages: Sequence[MessageContent], system: str | None) -> Dialogue:
    """Return the messages as chat messages. If there is a system text, it comes first, as a system message."""
    dialogue = Dialogue()
    if system:  # an empty system message would replace the template's default one
        dialogue.add_text("system", system, "system", text_field="")
    for index, message in enumerate(messages):
        dialogue.end_turn()
        path = f"messages.{index}"
        if not message.blocks:
            dialogue.add_text(message.role, message.text, path)
        elif message.role == "assistant":
            _add_assistant_message(dialogue, message.blocks, path)
        else:
            _add_other_message(dialogue, message, path)
    return dialogue


def _add_assistant_message(dialogue: Dialogue, blocks: Sequence[Block], path: str) -> None:
    """Add an assistant's message. Consecutive text blocks are joined, and so are consecutive thinking blocks."""
    for first_index, run in _block_runs(blocks):
        origin = f"{path}.content.{first_index}"
        if isinstance(run[0], ServerToolResultBlock):
            dialogue.add_tool_result(run[0].tool_use_id, run[0].text, origin, "tool_use_id", "content")
        elif isinstance(run[0], ToolUseBlock | ServerToolUseBlock):
            arguments = json.dumps(run[0].input, ensure_ascii=False)
            dialogue.add_tool_call(run[0].id, run[0].name, arguments, origin, id_field="id")
        elif isinstance(run[0], ThinkingBlock):
            dialogue.add_reasoning("".join(block.thinking for block in run if isinstance(block, ThinkingBlock)), origin)
        else:
            dialogue.add_text("assistant", _joined_text(run), path)


def _add_other_message(dialogue: Dialogue, message: MessageContent, path: str) -> None:
    """Add a user or system message. Tool results become separate messages; consecutive text blocks are joined."""
    for first_index, run in _block_runs(message.blocks):
        if isinstance(run[0], ToolResultBlock):
            dialogue.add_tool_result(
                run[0].tool_use_id, run[0].content, f"{path}.content.{first_index}", "tool_use_id", "content"
            )
        else:
            dialogue.add_text(message.role, _joined_text(run), path)


def _joined_text(run: Sequence[Block]) -> str:
    return "".join(block.text for block in run if isinstance(block, TextBlock))


def _block_runs(blocks: Sequence[Block]) -> list[tuple[int, list[Block]]]:
    """Return (index of the first block, blocks) for each run. Consecutive text blocks form a run, and so do consecutive
    thinking blocks. Each other block is a run of its own.
    """
    runs: list[tuple[int, list[Block]]] = []
    for index, block in enumerate(blocks):
        extends_run = isinstance(block, TextBlock | ThinkingBlock) and runs and type(runs[-1][1][0]) is type(block)
        if extends_run:
            runs[-1][1].append(block)
        else:
            runs.append((index, [block]))
    return runs
