"""The fields of a conversation (messages, tools, template arguments); bodies of /v1/chat/completions and /tokenize."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, PlainValidator

from cluster.api.core.errors import field_path, invalid_value, missing_parameter, truncated_repr, unsupported_parameter
from cluster.api.core.fields import MAX_WARNINGS, StrictModel, Text, text_of_parts
from cluster.api.core.generation import GenerationFields, check_model
from cluster.api.core.limits import ModelInfo, RequestLimits
from cluster.api.core.tools import CallableTool, Choice, ToolChoice, Tools, UnsupportedTool
from cluster.chat import custom

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLES_TEXT = ", ".join(ROLES)


def _read_content(value: Any) -> str:
    """Return the content of a message: a string, or the joined text of its parts."""
    return text_of_parts(value, {"text": "text"})


Content = Annotated[str, PlainValidator(_read_content, json_schema_input_type=str | list[dict[str, str]])]


def _read_calls(value: Any) -> Any:
    """Return the calls of a message; null becomes []. A custom tool call becomes a function call with one argument,
    `input`, which holds the input text of the custom call.
    """
    if value is None:
        return []
    return [_as_function(call) for call in value] if isinstance(value, list) else value


def _as_function(call: Any) -> Any:
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    custom_call = call.get("custom")
    if not isinstance(custom_call, dict) or not isinstance(custom_call.get("input"), str):
        raise ValueError("a call of type custom must have custom, an object with name and input, both strings")
    function = {"name": custom_call.get("name"), "arguments": custom.arguments_json(custom_call["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}


class CalledFunction(StrictModel):
    """The function in a tool call; `arguments` is a JSON object as text, as in answers."""

    name: Text
    arguments: Text = "{}"


class ToolCall(StrictModel):
    """A function call in an assistant's message, in the form that answers have."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(StrictModel):
    """The custom tool in a tool call, and its input text."""

    name: Text
    input: Text


class CustomToolCall(StrictModel):
    """A custom tool call in an assistant's message, in the form that answers have."""

    id: Text | None = None
    type: Literal["custom"]
    custom: CalledCustom


Calls = list[ToolCall | CustomToolCall]


class ChatMessage(StrictModel):
    """One message. `content` may be null in an assistant's message, which may have calls instead. `reasoning` and
    `reasoning_content` mean the same. Unknown fields are ignored, except those in `REFUSED_MESSAGE_FIELDS`,
    which are refused.
    """

    model_config = ConfigDict(extra="allow")

    role: str
    content: Content | None = None
    name: Text | None = None
    tool_calls: Annotated[
        list[ToolCall], FailFast(), BeforeValidator(_read_calls, json_schema_input_type=Calls | None)
    ] = Field(default_factory=list)
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @property
    def reasoning_text(self) -> str | None:
        """The reasoning of the assistant in this message, or None or an empty text if the message has none."""
        return self.reasoning_content or self.reasoning


REFUSED_MESSAGE_FIELDS = frozenset({"audio", "function_call", "prefix", "partial"})
"""Unsupported fields of a message that would change the answer. They are refused; other fields give a warning."""


def unknown_field_warnings(messages: Sequence[ChatMessage]) -> list[str]:
    """Return one warning for each name of an unknown field that has a value. Such fields are allowed, because clients
    keep data of their own in messages.
    """
    names = {name: None for message in messages for name, value in (message.model_extra or {}).items() if value}
    return [f"messages: {truncated_repr(name)} is not read" for name in names]


ROLE_OF_FIELD = dict.fromkeys(("tool_calls", "reasoning_content", "reasoning"), "assistant") | {"tool_call_id": "tool"}


def check_messages(messages: Sequence[ChatMessage], max_messages: int) -> None:
    """Check the number, the roles and the fields of messages; there may be at most `max_messages`.

    Raises:
        ApiError: 400 that names the message and the field.
    """
    if len(messages) > max_messages:
        raise invalid_value("messages", f"at most {max_messages}, got {len(messages)}")
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if message.role not in ROLES:
            remedy = "; answer a call as role tool" if message.role == "function" else ""
            raise invalid_value(
                f"{path}.role", f"must be one of {ROLES_TEXT}, got {truncated_repr(message.role)}{remedy}"
            )
        for name, role in ROLE_OF_FIELD.items():
            if getattr(message, name) and message.role != role:
                raise invalid_value(f"{path}.{name}", f"only a message of role {role} has it, not {message.role}")
        if message.content is None and message.role != "assistant":
            raise missing_parameter(f"{path}.content")
        if message.role == "tool" and not message.tool_call_id:
            raise missing_parameter(f"{path}.tool_call_id")
        for call_index, call in enumerate(message.tool_calls):
            _check_arguments(call, f"{path}.tool_calls.{call_index}.function.arguments")
        for name, value in (message.model_extra or {}).items():
            if value and name in REFUSED_MESSAGE_FIELDS:
                extra_path = field_path(path, name)
                raise unsupported_parameter(
                    extra_path, f"{truncated_repr(value)} is not supported by this server; leave it out"
                )


def _check_arguments(call: ToolCall, path: str) -> None:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid_value(path, f"must be a JSON object as text, got {truncated_repr(call.function.arguments)}")


Messages = Annotated[list[ChatMessage], FailFast()]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversationFields(StrictModel):
    """Fields that /v1/chat/completions and /tokenize share. Without `tool_choice` the model may call any of
    `supported_tools`.
    """

    tools: Tools = Field(default_factory=list)
    tool_choice: Choice | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def supported_tools(self) -> list[CallableTool]:
        """The tools that this server can call; tools of other types are left out."""
        return [tool for tool in self.tools if not isinstance(tool, UnsupportedTool)]

    @property
    def choice(self) -> ToolChoice:
        """The tool choice in effect: mode `none` if `supported_tools` is empty; otherwise `tool_choice`, or mode `auto`
        if the client sent no `tool_choice`.
        """
        if not self.supported_tools:
            return ToolChoice(mode="none")
        return self.tool_choice or ToolChoice(mode="auto")

    @property
    def callable_tools(self) -> list[CallableTool]:
        """The tools that the answer may call."""
        names = self.choice.names
        if self.choice.mode == "none":
            return []
        return [tool for tool in self.supported_tools if names is None or tool.function.name in names]

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools that the chat template shows to the model, as functions."""
        if self.choice.mode == "none":
            return []
        return [tool.as_function() for tool in self.supported_tools]

    def check_conversation(self, messages: Sequence[ChatMessage], max_messages: int, max_tools: int) -> None:
        """Check the rules for messages, tools and tool choice that the types of the fields cannot express.

        Raises:
            ApiError: 400 that names the field.
        """
        check_messages(messages, max_messages)
        if len(self.tools) > max_tools:
            raise invalid_value("tools", f"at most {max_tools}, got {len(self.tools)}")
        names: set[str] = set()
        for index, tool in enumerate(self.tools):
            if isinstance(tool, UnsupportedTool):
                continue
            function, path = tool.function, f"tools.{index}.{tool.type}"
            if function.name in names:
                raise invalid_value(f"{path}.name", f"{truncated_repr(function.name)} is the name of another tool")
            if function.schema_of_arguments["type"] != "object":
                raise invalid_value(f"{path}.parameters", "must be the schema of an object")
            names.add(function.name)
        if self.tool_choice is not None:
            self._check_choice(self.tool_choice, names)
        if self.continue_final_message:
            self._check_continue_final_message(messages)

    def _check_choice(self, choice: ToolChoice, names: Collection[str]) -> None:
        """Check that `tool_choice` names only tools in `names`, the tools that this server can call."""
        unsupported_tools = [tool for tool in self.tools if isinstance(tool, UnsupportedTool)]
        if choice.mode == "required" and not names:
            unsupported_types = ", ".join(
                dict.fromkeys(truncated_repr(tool.type) for tool in unsupported_tools[:MAX_WARNINGS])
            )
            reason = f" that this server runs: it does not run {unsupported_types}" if unsupported_types else ""
            raise invalid_value("tool_choice", f"needs tools, and there are none{reason}")
        for name in choice.names or ():
            if name in names:
                continue
            tool_type = next((tool.type for tool in unsupported_tools if name in (tool.name, tool.type)), None)
            if tool_type is not None:
                reason = (
                    f"{truncated_repr(name)} is a tool of type {truncated_repr(tool_type)}, which this server does not "
                    "run; choose another"
                )
                raise invalid_value("tool_choice", reason)
            raise invalid_value("tool_choice", f"{truncated_repr(name)} is none of the tools")

    def _check_continue_final_message(self, messages: Sequence[ChatMessage]) -> None:
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise invalid_value(
                "continue_final_message", "contradicts add_generation_prompt: true; send false, or leave it out"
            )
        if messages[-1].role != "assistant" or not messages[-1].content or messages[-1].tool_calls:
            raise invalid_value(
                "continue_final_message", "the last message must be an assistant's, with text and no calls"
            )


class ChatRequest(ConversationFields, GenerationFields):
    """The body of /v1/chat/completions. With `include_reasoning` false the answer has no reasoning. With
    `separate_reasoning` false the reasoning stays in the text of the answer.
    """

    messages: Messages = Field(min_length=1)
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = False

    def requested_top_logprobs(self) -> int | None:
        """Return `top_logprobs` (0 if it is not set) if `logprobs` is true. Otherwise return None."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check the fields of `GenerationFields`, the messages and the tools.

        Raises:
            ApiError: as for `GenerationFields.check`, or 400 that names the wrong message or tool.
        """
        super().check(model, limits)
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs", "needs logprobs: true")
        self.check_conversation(self.messages, limits.messages, limits.tools)


class TokenizeRequest(ConversationFields):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = None

    @property
    def adds_special_tokens(self) -> bool:
        """Whether special tokens are added. By default they are added to a prompt, but not to messages, because the
        chat template adds them.
        """
        return not self.messages if self.add_special_tokens is None else self.add_special_tokens

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Return the request in a JSON body, and warnings about unknown fields.

        Raises:
            ApiError: 400 for a wrong field, or if the body does not have exactly one of `prompt` and `messages`.
        """
        fields, warnings = super().read(body)
        if (fields.prompt is None) == (not fields.messages):
            raise invalid_value("prompt", "send either prompt or messages")
        return fields, warnings

    def check(self, model: ModelInfo, limits: RequestLimits) -> None:
        """Check the model name and, if there are messages, the messages and the tools.

        Raises:
            ApiError: 404 for another model, 400 that names the wrong message or tool.
        """
        check_model(model, self.model)
        if self.messages:
            self.check_conversation(self.messages, limits.messages, limits.tools)
