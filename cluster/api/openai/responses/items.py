"""The input of a response: messages, calls of tools, what these gave back, and reasoning that is passed back."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from cluster.api.core.content import Strict, Text, read_at, readable, text_of_parts
from cluster.api.core.dialogue import Dialogue
from cluster.api.core.errors import ApiError, shown
from cluster.api.core.translated import not_taken
from cluster.api.openai.responses.calls import OTHER_KINDS, CalledTool, OtherItem
from cluster.api.openai.responses.tools import ResponseTool, joined, read_tools
from cluster.chat.custom import arguments_of

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
Role = Literal["user", "assistant", "system", "developer"]


class InputText(Strict):
    """A part of a message's content."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Strict):
    """A part of an assistant's content, passed back."""

    type: Literal["refusal"]
    refusal: str


def _message_text(value: Any) -> str:
    return text_of_parts(value, TEXTS)


def _thought_text(value: Any) -> str:
    return "" if value is None else text_of_parts(value, {"reasoning_text": "text", "summary_text": "text"})


Content = Annotated[str, PlainValidator(_message_text, json_schema_input_type=str | list[InputText | RefusalPart])]
Output = Annotated[str, PlainValidator(_message_text, json_schema_input_type=str | list[InputText])]


class MessageItem(Strict):
    """A message of anyone; those of the assistant may be output items as they came."""

    type: Literal["message"] = "message"
    role: Role
    content: Content


class TextInput(MessageItem):
    """The whole input as a text: one message of the user."""


class FunctionCallItem(Strict):
    """A call that the assistant made. `arguments` is a JSON text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class CustomCallItem(Strict):
    """A call of a custom tool that the assistant made, with the text that it gave the tool."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text


class CallOutputItem(Strict):
    """What a function or a custom tool that was called gave back."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Output


class AdditionalToolsItem(Strict):
    """Tools that are declared beside those of the body."""

    type: Literal["additional_tools"]
    tools: list[Any]


class ThoughtPart(Strict):
    """A part of what the model thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Thoughts = Annotated[str, PlainValidator(_thought_text, json_schema_input_type=list[ThoughtPart] | None)]


class ReasoningItem(Strict):
    """What the model thought, passed back. Where `content` is empty, the summary stands for it."""

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
    """The items of `input`, a text being one message of the user.

    Raises:
        ApiError: 400 that names the item and the field.
        ValueError: it is neither a text nor a list of items.
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
        raise ApiError(f"{path}: must be an object, got {shown(value)}", param=path, code="invalid_type")
    kind = value.get("type", "message" if "role" in value else "item_reference" if "id" in value else None)
    found = ITEMS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise not_taken(f"{path}.type", kind, REFERENCE if kind == "item_reference" else NOT_TAKEN)
    if found is ReasoningItem and isinstance(value.get("encrypted_content"), str):
        remedy = "it was encrypted elsewhere; send the item with its content, or leave it out"
        raise not_taken(f"{path}.encrypted_content", value["encrypted_content"], remedy)
    return read_at(found, value, path)


def dialogue_of(items: list[Item], instructions: str | None) -> Dialogue:
    """The items as messages of a chat, after the instructions."""
    made = Dialogue()
    if instructions:  # an empty one says nothing, and would take the place of a template's own
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
    """The tools that items declare, each with its path: additional ones, and those that a search has found.

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
    """Warnings about items that the model is not told of, each type once."""
    places: dict[str, int] = {}
    for at, item in enumerate(items):
        if isinstance(item, OtherItem) and not item.parts:
            places.setdefault(item.type, at)
    return [f"input.{at}: items of type {kind!r} are left out, as this model reads text" for kind, at in places.items()]
