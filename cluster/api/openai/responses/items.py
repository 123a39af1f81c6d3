"""The input items of /v1/responses (messages, tool calls, outputs, reasoning), as chat messages."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from cluster.api.core.errors import invalid_type, truncated_repr
from cluster.api.core.fields import StrictModel, Text, require_utf8, text_of_parts, validate_at
from cluster.api.core.translated import Dialogue, unsupported_part
from cluster.api.openai.responses.tool_call_items import OTHER_KINDS, CalledTool, OtherItem
from cluster.api.openai.responses.tools import ResponseTool, qualified_name, read_tools
from cluster.chat.custom import arguments_json

TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
Role = Literal["user", "assistant", "system", "developer"]


class InputText(StrictModel):
    """A text part in the content of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(StrictModel):
    """A refusal in the content of an earlier assistant message."""

    type: Literal["refusal"]
    refusal: str


def _read_message_text(value: Any) -> str:
    return text_of_parts(value, TEXT_FIELDS)


def _read_reasoning_text(value: Any) -> str:
    return "" if value is None else text_of_parts(value, {"reasoning_text": "text", "summary_text": "text"})


Content = Annotated[str, PlainValidator(_read_message_text, json_schema_input_type=str | list[InputText | RefusalPart])]
Output = Annotated[str, PlainValidator(_read_message_text, json_schema_input_type=str | list[InputText])]


class MessageItem(StrictModel):
    """A message of any role. An assistant message may be an output item of an earlier response, unchanged."""

    type: Literal["message"] = "message"
    role: Role
    content: Content


class TextInput(MessageItem):
    """An `input` that is a plain string: one user message."""


class FunctionCallItem(StrictModel):
    """A function call of the assistant. `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class CustomCallItem(StrictModel):
    """A custom tool call of the assistant, with its input text."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text


class CallOutputItem(StrictModel):
    """The output of a function call or a custom tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Output


class AdditionalToolsItem(StrictModel):
    """An item that declares more tools, in addition to `tools` of the body."""

    type: Literal["additional_tools"]
    tools: list[Any]


class ReasoningPart(StrictModel):
    """A part of the model's reasoning or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningText = Annotated[str, PlainValidator(_read_reasoning_text, json_schema_input_type=list[ReasoningPart] | None)]


class ReasoningItem(StrictModel):
    """Reasoning of an earlier response. If `content` is empty, the summary is used instead."""

    type: Literal["reasoning"]
    content: ReasoningText = ""
    summary: ReasoningText = ""
    encrypted_content: None = None


Item = (
    MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReasoningItem | AdditionalToolsItem | OtherItem
)
ITEM_CLASSES: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "additional_tools": AdditionalToolsItem,
    **dict.fromkeys(OTHER_KINDS, OtherItem),
}
REFERENCE_REMEDY = "nothing is stored here: send the item itself (clients do so where they are told store: false)"
ITEM_TYPES_REMEDY = "items may be message, function_call, function_call_output, reasoning, and calls of other tools"


def items_of(value: Any) -> list[Item]:
    """Return the items of `input`; a string becomes one user message.

    Raises:
        ApiError: 400 that names the item and the field.
        ValueError: `value` is neither a string nor a non-empty list.
    """
    if isinstance(value, str):
        return [TextInput(role="user", content=require_utf8(value))]
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of items, got {truncated_repr(value)}")
    if not value:
        raise ValueError("must not be empty")
    return [_read_item(item, f"input.{index}") for index, item in enumerate(value)]


def _read_item(value: Any, path: str) -> Item:
    if not isinstance(value, dict):
        raise invalid_type(path, "an object", value)
    item_type = value.get("type", "message" if "role" in value else "item_reference" if "id" in value else None)
    item_class = ITEM_CLASSES.get(item_type) if isinstance(item_type, str) else None
    if item_class is None:
        raise unsupported_part(
            f"{path}.type", item_type, REFERENCE_REMEDY if item_type == "item_reference" else ITEM_TYPES_REMEDY
        )
    if item_class is ReasoningItem and isinstance(value.get("encrypted_content"), str):
        remedy = "it was encrypted elsewhere; send the item with its content, or leave it out"
        raise unsupported_part(f"{path}.encrypted_content", value["encrypted_content"], remedy)
    return validate_at(item_class, value, path)


def dialogue_of(items: list[Item], instructions: str | None) -> Dialogue:
    """Return the items as chat messages. If there are instructions, they come first, as a system message."""
    dialogue = Dialogue()
    if instructions:  # an empty system message would replace the template's default one
        dialogue.add_text("system", instructions, "instructions", text_field="")
    for index, item in enumerate(items):
        path = f"input.{index}"
        if isinstance(item, TextInput):
            dialogue.add_text(item.role, item.content, "input", text_field="")
        elif isinstance(item, MessageItem):
            dialogue.add_text(item.role, item.content, path)
        elif isinstance(item, FunctionCallItem):
            dialogue.add_tool_call(
                item.call_id, qualified_name(item.name, item.namespace), item.arguments, path, id_field="call_id"
            )
        elif isinstance(item, CustomCallItem):
            arguments = arguments_json(item.input)
            dialogue.add_tool_call(
                item.call_id, qualified_name(item.name, item.namespace), arguments, path, id_field="call_id"
            )
        elif isinstance(item, CallOutputItem):
            dialogue.add_tool_result(item.call_id, item.output, path, id_field="call_id", text_field="output")
        elif isinstance(item, OtherItem):
            _add_calls_and_results(dialogue, item, path)
        elif isinstance(item, ReasoningItem) and (item.content or item.summary):
            dialogue.add_reasoning(item.content or item.summary, path)
    return dialogue


def _add_calls_and_results(dialogue: Dialogue, item: OtherItem, path: str) -> None:
    for part in item.calls_and_results:
        if isinstance(part, CalledTool):
            dialogue.add_tool_call(part.call_id, part.name, part.arguments, path, id_field="call_id")
        else:
            dialogue.add_tool_result(part.call_id, part.text, path, id_field="call_id", text_field="")


def declared_tools(items: Sequence[Item]) -> list[tuple[str, ResponseTool]]:
    """Return (path, tool) for each tool in the input items: tools of `additional_tools` items, and tools that a tool
    search has found.

    Raises:
        ApiError: 400 that names the tool and the field.
    """
    tools: list[tuple[str, ResponseTool]] = []
    for index, item in enumerate(items):
        path = f"input.{index}.tools"
        item_tools = item.tools if isinstance(item, AdditionalToolsItem) else None
        if isinstance(item, OtherItem) and item.type == "tool_search_output":
            item_tools = (item.model_extra or {}).get("tools")
        if isinstance(item_tools, list):
            tools += [(f"{path}.{tool_index}", tool) for tool_index, tool in enumerate(read_tools(item_tools, path))]
    return tools


def ignored_item_warnings(items: Sequence[Item]) -> list[str]:
    """Return one warning for each type of items that are left out of the prompt."""
    first_index_of_type: dict[str, int] = {}
    for index, item in enumerate(items):
        if isinstance(item, OtherItem) and not item.calls_and_results:
            first_index_of_type.setdefault(item.type, index)
    return [
        f"input.{index}: items of type {item_type!r} are left out, as this model reads text"
        for item_type, index in first_index_of_type.items()
    ]
