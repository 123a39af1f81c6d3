"""The bodies of /v1/messages and /v1/messages/count_tokens, and their translation into chat requests."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, FailFast, Field, PlainValidator

from cluster.api.anthropic.blocks import Message, MessageContent, System, dialogue_of, messages_of
from cluster.api.anthropic.fields import COUNT_TABLE, TABLE
from cluster.api.core.adapter import Origins
from cluster.api.core.fields import FieldTable, Strict, Text, read_at, read_each
from cluster.api.core.tools import LeftOutTool
from cluster.api.core.translated import EXTENSIONS, Translated, TranslatedBody, readable_json, translation

Messages = Annotated[list[Message], Field(min_length=1)]
ORIGINS: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SWITCHED_ON = {"enable_thinking": True, "thinking": True}  # names that templates use; a template ignores the other name
NO_THOUGHTS = "thinking is not known of this model"
BUDGET = "thinking.budget_tokens is not a limit here; max_tokens bounds thoughts and answer together"


class CustomTool(Strict):
    """A tool that the client runs; `input_schema` is the JSON schema of an object."""

    type: Literal["custom"] | None = None
    name: Text
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(readable_json)]
    strict: bool | None = None


class AnthropicToolChoice(Strict):
    """Which tools may be used: any or none (`auto`), at least one (`any`), the one named (`tool`), none (`none`)."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOption(Strict):
    """Whether the model thinks first, if its chat template has a switch for that. Summaries are not made."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The JSON schema that the answer must follow."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """The effort of reasoning, and the form of the answer."""

    model_config = ConfigDict(extra="forbid")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


def _named_where_needed(choice: AnthropicToolChoice) -> AnthropicToolChoice:
    if choice.type == "tool" and choice.name is None:
        raise ValueError("needs a name where its type is 'tool'")
    return choice


def _tools(value: Any) -> list[CustomTool | LeftOutTool]:
    return read_each(value, _tool, "tools")


def _tool(value: Any, path: str) -> CustomTool | LeftOutTool:
    """Read a tool that the client declares; a tool that needs Anthropic's servers or models is left out."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("", "custom"):
        return LeftOutTool(type=kind, name=value.get("name"))
    return read_at(CustomTool, value, path)


class CountRequest(TranslatedBody):
    """The body of /v1/messages/count_tokens: the fields that determine the prompt."""

    table: ClassVar[FieldTable] = COUNT_TABLE
    extensions: ClassVar[frozenset[str]] = EXTENSIONS - {"stop"}

    model: str | None = None
    messages: Annotated[list[MessageContent], PlainValidator(messages_of, json_schema_input_type=Messages)]
    system: System | None = None
    tools: Annotated[
        list[CustomTool | LeftOutTool], PlainValidator(_tools, json_schema_input_type=list[CustomTool | LeftOutTool])
    ] = Field(default_factory=list)
    tool_choice: Annotated[AnthropicToolChoice, AfterValidator(_named_where_needed)] | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None

    def more(self) -> dict[str, Any]:
        """Return the chat request's fields that do not belong to the prompt: none here."""
        return {}

    def translated(self) -> Translated:
        """Return this body as a chat request, as described at `TranslatedBody.translated`."""
        spoken = dialogue_of(self.messages, self.system)
        choice, output = self.tool_choice, self.output_config
        chat: dict[str, Any] = {
            **self.asked_beside(),
            "model": self.model,
            "messages": spoken.messages,
            "continue_final_message": spoken.messages[-1]["role"] == "assistant" or None,
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": _chat_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            **self._thinking_asked(),
            "response_format": _response_format(output.format) if output and output.format else None,
            **self.more(),
        }
        names = {f"tools.{at}.function": f"tools.{at}" for at in range(len(self.tools))}
        names |= {f"{path}.parameters": f"{own}.input_schema" for path, own in names.items()}
        names["continue_final_message"] = f"messages.{len(self.messages) - 1}"
        if self.thinking and self.thinking.type == "disabled":
            names["reasoning_effort"] = "thinking.type"
        return translation(chat, Origins({**ORIGINS, **spoken.origins, **names}))

    def _thinking_asked(self) -> dict[str, Any]:
        """Return the chat fields for `thinking` (whether to think) and `output_config.effort` (how much)."""
        thinking = self.thinking
        asked: dict[str, Any] = {"reasoning_effort": self.output_config.effort if self.output_config else None}
        if thinking is None:
            return asked
        if thinking.type == "disabled":
            asked["reasoning_effort"] = "none"
        elif thinking.type == "enabled":
            given = self.asked_beside().get("chat_template_kwargs")
            asked["chat_template_kwargs"] = SWITCHED_ON | given if isinstance(given, dict) else given or SWITCHED_ON
        if thinking.display == "omitted":
            asked["include_reasoning"] = False
        return asked

    def said_beside(self, thinks: bool) -> list[str]:
        """Return warnings if `thinking` is not, or only partly, honoured. `thinks` says whether the model can think."""
        thinking = self.thinking
        if thinking is None or thinking.type != "enabled":
            return []
        return [NO_THOUGHTS] if not thinks else [BUDGET] if thinking.budget_tokens else []


class MessagesRequest(CountRequest):
    """The body of /v1/messages. Sampling fields and extensions are passed to the chat request unchanged."""

    table: ClassVar[FieldTable] = TABLE

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: Annotated[list[Text], FailFast()] = Field(default_factory=list)

    def more(self) -> dict[str, Any]:
        """Return the output limit, whether to stream, and the stop strings."""
        return {"max_tokens": self.max_tokens, "stream": self.stream, "stop": list(self.stop_sequences)}


def _chat_tool(tool: CustomTool | LeftOutTool) -> dict[str, Any]:
    if isinstance(tool, LeftOutTool):
        return {"type": tool.type, "name": tool.name}
    function = {"name": tool.name, "parameters": tool.input_schema}
    more = {"description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": function | {name: said for name, said in more.items() if said is not None}}


def _chat_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type != "tool":
        return CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(form: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}}
