"""The bodies of /v1/messages and /v1/messages/count_tokens, and their translation into chat requests."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, FailFast, Field, PlainValidator

from cluster.api.anthropic.blocks import Message, MessageContent, System, dialogue_of, messages_of
from cluster.api.anthropic.fields import COUNT_TABLE, TABLE
from cluster.api.core.adapter import Origins
from cluster.api.core.fields import FieldTable, StrictModel, Text, read_list, validate_at
from cluster.api.core.tools import UnsupportedTool
from cluster.api.core.translated import EXTENSIONS, ChatTranslation, TranslatedBody, require_utf8_json, validate_chat

Messages = Annotated[list[Message], Field(min_length=1)]
ORIGINS: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
TOOL_CHOICE_MODES = {"auto": "auto", "any": "required", "none": "none"}
# A template reads one of these two arguments and ignores the other.
THINKING_ENABLED = {"enable_thinking": True, "thinking": True}
NO_THINKING_WARNING = "thinking is not known of this model"
BUDGET_WARNING = "thinking.budget_tokens is not a limit here; max_tokens bounds thoughts and answer together"


class CustomTool(StrictModel):
    """A tool that the client runs; `input_schema` is the JSON schema of an object."""

    type: Literal["custom"] | None = None
    name: Text
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(require_utf8_json)]
    strict: bool | None = None


class AnthropicToolChoice(StrictModel):
    """Which tools the model may use. With `auto` it may use tools or not, with `any` it must use at least one, with
    `tool` it must use the tool `name`, and with `none` it may use no tool.
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOption(StrictModel):
    """Whether the model thinks before it answers; the chat template must have a switch for this. Thinking is never
    summarized.
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    """The JSON schema that the answer must follow."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """The effort of reasoning, and the form of the answer."""

    model_config = ConfigDict(extra="forbid")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


def _check_tool_named(choice: AnthropicToolChoice) -> AnthropicToolChoice:
    if choice.type == "tool" and choice.name is None:
        raise ValueError("needs a name where its type is 'tool'")
    return choice


def _read_tools(value: Any) -> list[CustomTool | UnsupportedTool]:
    return read_list(value, _read_tool, "tools")


def _read_tool(value: Any, path: str) -> CustomTool | UnsupportedTool:
    """Read a declared tool. A tool that needs Anthropic's servers or models becomes an `UnsupportedTool`, which is
    left out later.
    """
    tool_type = value.get("type") if isinstance(value, dict) else None
    if isinstance(tool_type, str) and tool_type not in ("", "custom"):
        return UnsupportedTool(type=tool_type, name=value.get("name"))
    return validate_at(CustomTool, value, path)


class CountRequest(TranslatedBody):
    """The body of /v1/messages/count_tokens: the fields of /v1/messages that decide the prompt."""

    table: ClassVar[FieldTable] = COUNT_TABLE
    extensions: ClassVar[frozenset[str]] = EXTENSIONS - {"stop"}

    model: str | None = None
    messages: Annotated[list[MessageContent], PlainValidator(messages_of, json_schema_input_type=Messages)]
    system: System | None = None
    tools: Annotated[
        list[CustomTool | UnsupportedTool],
        PlainValidator(_read_tools, json_schema_input_type=list[CustomTool | UnsupportedTool]),
    ] = Field(default_factory=list)
    tool_choice: Annotated[AnthropicToolChoice, AfterValidator(_check_tool_named)] | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None

    def generation_fields(self) -> dict[str, Any]:
        """Return fields of the chat request that do not belong to the prompt. This body has none."""
        return {}

    def to_chat(self) -> ChatTranslation:
        """Return this body as a chat request, as described at `TranslatedBody.to_chat`."""
        dialogue = dialogue_of(self.messages, self.system)
        choice, output = self.tool_choice, self.output_config
        chat: dict[str, Any] = {
            **self.extension_fields(),
            "model": self.model,
            "messages": dialogue.messages,
            "continue_final_message": dialogue.messages[-1]["role"] == "assistant" or None,
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": _chat_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            **self._thinking_fields(),
            "response_format": _response_format(output.format) if output and output.format else None,
            **self.generation_fields(),
        }
        chat_to_body = {f"tools.{index}.function": f"tools.{index}" for index in range(len(self.tools))}
        chat_to_body |= {
            f"{chat_path}.parameters": f"{body_path}.input_schema" for chat_path, body_path in chat_to_body.items()
        }
        chat_to_body["continue_final_message"] = f"messages.{len(self.messages) - 1}"
        if self.thinking and self.thinking.type == "disabled":
            chat_to_body["reasoning_effort"] = "thinking.type"
        return validate_chat(chat, Origins({**ORIGINS, **dialogue.origins, **chat_to_body}))

    def _thinking_fields(self) -> dict[str, Any]:
        """Return the chat fields for `thinking` (whether to think) and `output_config.effort` (how much)."""
        thinking = self.thinking
        fields: dict[str, Any] = {"reasoning_effort": self.output_config.effort if self.output_config else None}
        if thinking is None:
            return fields
        if thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif thinking.type == "enabled":
            template_arguments = self.extension_fields().get("chat_template_kwargs")
            fields["chat_template_kwargs"] = (
                THINKING_ENABLED | template_arguments
                if isinstance(template_arguments, dict)
                else template_arguments or THINKING_ENABLED
            )
        if thinking.display == "omitted":
            fields["include_reasoning"] = False
        return fields

    def thinking_warnings(self, can_think: bool) -> list[str]:
        """Return warnings if `thinking` is not fully honoured. `can_think`: whether the model's format has thinking."""
        thinking = self.thinking
        if thinking is None or thinking.type != "enabled":
            return []
        return [NO_THINKING_WARNING] if not can_think else [BUDGET_WARNING] if thinking.budget_tokens else []


class MessagesRequest(CountRequest):
    """The body of /v1/messages. Its extensions and sampling fields become fields of the chat request, unchanged."""

    table: ClassVar[FieldTable] = TABLE

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: Annotated[list[Text], FailFast()] = Field(default_factory=list)

    def generation_fields(self) -> dict[str, Any]:
        """Return the fields `max_tokens`, `stream` and `stop` of the chat request."""
        return {"max_tokens": self.max_tokens, "stream": self.stream, "stop": list(self.stop_sequences)}


def _chat_tool(tool: CustomTool | UnsupportedTool) -> dict[str, Any]:
    if isinstance(tool, UnsupportedTool):
        return {"type": tool.type, "name": tool.name}
    function = {"name": tool.name, "parameters": tool.input_schema}
    optional_fields = {"description": tool.description, "strict": tool.strict}
    return {
        "type": "function",
        "function": function | {name: value for name, value in optional_fields.items() if value is not None},
    }


def _chat_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type != "tool":
        return TOOL_CHOICE_MODES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(output_format: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.schema_}}
