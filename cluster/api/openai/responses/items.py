"""The input items of /v1/responses (messages, tool calls, outputs, reasoning), and their chat messages."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from cluster.api.core.errors import shown, wrong_type
from cluster.api.core.fields import Strict, Text, read_at, readable, text_of_parts
from cluster.api.core.translated import Dialogue, not_taken
from cluster.api.openai.responses.tool_call_items import OTHER_KINDS, CalledTool, OtherItem
from cluster.api.openai.responses.tools import ResponseTool, joined, read_tools
from cluster.chat.custom import arguments_of

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
Role = Literal["user", "assistant", "system", "developer"]


class InputText(Strict):
    """A text part in the content of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Strict):
    """A refusal in the content of an earlier assistant message."""

    type: Literal["refusal"]
    refusal: str


def _message_text(value: Any) -> str:
    return text_of_parts(value, TEXTS)


def _thought_text(value: Any) -> str:
    return "" if value is None else text_of_parts(value, {"reasoning_text": "text", "summary_text": "text"})


Content = Annotated[str, PlainValidator(_message_text, json_schema_input_type=str | list[InputText | RefusalPart])]
Output = Annotated[str, PlainValidator(_message_text, json_schema_input_type=str | list[InputText])]


class MessageItem(Strict):
    """A message of any role. An assistant message may be an output item of an earlier response, unchanged."""

    type: Literal["message"] = "message"
    role: Role
    content: Content


class TextInput(MessageItem):
    """An `input` that is a plain string: one user message."""


class FunctionCallItem(Strict):
    """A function call of the assistant. `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class CustomCallItem(Strict):
    """A custom tool call of the assistant, with its input text."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text


class CallOutputItem(Strict):
    """The output of a function call or a custom tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Output


class AdditionalToolsItem(Strict):
    """An item that declares more tools, in addition to `tools` of the body."""

    type: Literal["additional_tools"]
    tools: list[Any]


class ThoughtPart(Strict):
    """A part of the model's reasoning or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Thoughts = Annotated[str, PlainValidator(_thought_text, json_schema_input_type=list[ThoughtPart] | None)]


class ReasoningItem(Strict):
    """Reasoning of an earlier response. If `content` is empty, the summary is used instead."""

    type: Literal["reasoning"]
    content: Thoughts = ""
    summary: Thoughts = ""
    encrypted_content: None = None


Item = (
    MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReasoningItem | AdditionalToolsItem | OtherItem
)
ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "additional_tools": AdditionalToolsItem,
    **dict.fromkeys(OTHER_KINDS, OtherItem),
}
REFERENCE = "nothing is stored here: send the item itself (clients do so where they are told store: false)"
NOT_TAKEN = "items may be message, function_call, function_call_output, reasoning, and calls of other tools"


def items_of(value: Any) -> list[Item]:
    """Return the items of `input`; a string becomes one user message.

    Raises:
        ApiError: 400 that names the item and the field.
        ValueError: `value` is neither a string nor a non-empty list.
    """
    if isinstance(value, str):
        return [TextInput(role="user", content=readable(value))]
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of items, got {shown(value)}")
    if not value:
        raise ValueError("must not be empty")
    return [_item(one, f"input.{at}") for at, one in enumerate(value)]


def _item(value: Any, path: str) -> Item:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    kind = value.get("type", "message" if "role" in value else "item_reference" if "id" in value else None)
    found = ITEMS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise not_taken(f"{path}.type", kind, REFERENCE if kind == "item_reference" else NOT_TAKEN)
    if found is ReasoningItem and isinstance(value.get("encrypted_content"), str):
        remedy = "it was encrypted elsewhere; send the item with its content, or leave it out"
        raise not_taken(f"{path}.encrypted_content", value["encrypted_content"], remedy)
    return read_at(found, value, path)


def dialogue_of(items: list[Item], instructions: str | None) -> Dialogue:
    """Return the items as chat messages, with the instructions as the first, a system message."""
    made = Dialogue()
    if instructions:  # an empty system message would replace the template's default one
        made.say("system", instructions, "instructions", at="")
    for at, item in enumerate(items):
        path = f"input.{at}"
        if isinstance(item, TextInput):
            made.say(item.role, item.content, "input", at="")
        elif isinstance(item, MessageItem):
            made.say(item.role, item.content, path)
        elif isinstance(item, FunctionCallItem):
            made.call(item.call_id, joined(item.name, item.namespace), item.arguments, path, id_at="call_id")
        elif isinstance(item, CustomCallItem):
            arguments = arguments_of(item.input)
            made.call(item.call_id, joined(item.name, item.namespace), arguments, path, id_at="call_id")
        elif isinstance(item, CallOutputItem):
            made.result(item.call_id, item.output, path, id_at="call_id", at="output")
        elif isinstance(item, OtherItem):
            _add_other(made, item, path)
        elif isinstance(item, ReasoningItem) and (item.content or item.summary):
            made.think(item.content or item.summary, path)
    return made


def _add_other(made: Dialogue, item: OtherItem, path: str) -> None:
    for part in item.parts:
        if isinstance(part, CalledTool):
            made.call(part.call_id, part.name, part.arguments, path, id_at="call_id")
        else:
            made.result(part.call_id, part.text, path, id_at="call_id", at="")


def tools_in(items: Sequence[Item]) -> list[tuple[str, ResponseTool]]:
    """Return the tools in input items, each with its path: declared tools, and tools that a tool search has found.

    Raises:
        ApiError: 400 that names the tool and the field.
    """
    found: list[tuple[str, ResponseTool]] = []
    for at, item in enumerate(items):
        path = f"input.{at}.tools"
        declared = item.tools if isinstance(item, AdditionalToolsItem) else None
        if isinstance(item, OtherItem) and item.type == "tool_search_output":
            declared = (item.model_extra or {}).get("tools")
        if isinstance(declared, list):
            found += [(f"{path}.{place}", tool) for place, tool in enumerate(read_tools(declared, path))]
    return found


def left_out(items: Sequence[Item]) -> list[str]:
    """Return one warning for each type of items that are left out of the prompt."""
    places: dict[str, int] = {}
    for at, item in enumerate(items):
        if isinstance(item, OtherItem) and not item.parts:
            places.setdefault(item.type, at)
    return [f"input.{at}: items of type {kind!r} are left out, as this model reads text" for kind, at in places.items()]
