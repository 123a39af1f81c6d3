"""The fields `tools` and `tool_choice` of a chat request, in OpenAI's form.

A tool of a type that this server cannot call is left out with a warning, since clients declare such tools by default.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from cluster.api.core.errors import missing_parameter, truncated_repr
from cluster.api.core.fields import MAX_WARNINGS, StrictModel, Text, read_list, validate_at
from cluster.chat import custom

logger = logging.getLogger(__name__)

MODES = ("auto", "none", "required")
NAMED_TOOL_FORM = '{"type": "function", "function": {"name": ...}}'
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class Function(StrictModel):
    """A function declaration; `parameters` is the JSON schema of an object. `docs/chat.md` explains `strict`."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments. A function without `parameters` takes no arguments."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(StrictModel):
    """A function that the model may call; the client runs it."""

    type: Literal["function"]
    function: Function

    def as_function(self) -> dict[str, Any]:
        """Return the tool for the chat template, with the fields that the client sent."""
        return self.model_dump(exclude_unset=True)


class InputGrammar(StrictModel):
    """A grammar for the input text of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: Text


class InputFormat(StrictModel):
    """The format of a custom tool's input: any text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class Custom(StrictModel):
    """A custom tool declaration: name, description, input format."""

    name: Name
    description: Text | None = None
    format: InputFormat | None = None


class ChatCustomTool(StrictModel):
    """A tool that takes one text. The model sees a function with one string, `input` (`cluster.chat.custom`)."""

    type: Literal["custom"]
    custom: Custom

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of the input text, or None if any text is allowed."""
        return None if self.custom.format is None else self.custom.format.grammar

    @property
    def function(self) -> Function:
        """The function that stands for this tool; a regex grammar becomes the `pattern` of its string argument."""
        grammar = self.grammar
        pattern = grammar.definition if grammar is not None and grammar.syntax == "regex" else None
        return Function(
            name=self.custom.name,
            description=self._description_with_grammar(),
            parameters=custom.input_schema(pattern),
            strict=pattern is not None,
        )

    def as_function(self) -> dict[str, Any]:
        """Return the tool for the chat template. The grammar is in the description, so that the model can read it."""
        description = self._description_with_grammar()
        function = {"name": self.custom.name, "parameters": custom.input_schema()}
        return {"type": "function", "function": function | ({"description": description} if description else {})}

    def _description_with_grammar(self) -> str | None:
        description, grammar = self.custom.description, self.grammar
        if grammar is None:
            return description
        instruction = f"The input must follow this {grammar.syntax} grammar:\n{grammar.definition}"
        return f"{description}\n{instruction}" if description else instruction


class UnsupportedTool(StrictModel):
    """A tool of a type that this server cannot call. The chat template does not show it to the model."""

    type: str = Field(min_length=1, json_schema_extra={"not": {"enum": ["function", "custom"]}})
    name: Any = None


CallableTool = Tool | ChatCustomTool
AnyTool = Tool | ChatCustomTool | UnsupportedTool


def read_tools(value: Any) -> list[AnyTool]:
    """Return the tools of a chat request.

    Raises:
        ApiError: 400 that names the tool and the field.
        ValueError: `value` is not a list.
    """
    return read_list(value, _read_tool, "tools")


def _read_tool(value: Any, path: str) -> AnyTool:
    if isinstance(value, Tool | ChatCustomTool | UnsupportedTool):
        return value
    tool_type = value.get("type") if isinstance(value, Mapping) else None
    if tool_type == "custom":
        return _check_format(validate_at(ChatCustomTool, value, path), f"{path}.custom.format")
    if not isinstance(tool_type, str) or tool_type in ("", "function"):
        return validate_at(Tool, value, path)
    return UnsupportedTool(type=tool_type, name=value.get("name"))


def _check_format(tool: ChatCustomTool, path: str) -> ChatCustomTool:
    input_format = tool.custom.format
    if input_format is not None and input_format.type == "grammar" and input_format.grammar is None:
        raise missing_parameter(f"{path}.grammar")
    return tool


Tools = Annotated[list[AnyTool], PlainValidator(read_tools, json_schema_input_type=list[AnyTool])]


def unsupported_tool_warnings(tools: Sequence[AnyTool]) -> list[str]:
    """Return warnings about the tools that are left out: one for each of the first `MAX_WARNINGS` tools, and one for
    all further tools. The types of the first `MAX_WARNINGS` tools are logged, each type once.
    """
    unsupported = [(index, tool) for index, tool in enumerate(tools) if isinstance(tool, UnsupportedTool)]
    for _, tool in unsupported[:MAX_WARNINGS]:
        _log_unsupported_type(truncated_repr(tool.type))
    warnings = [
        f"tools.{index}: {truncated_repr(tool.type)} is not run by this server; the model is not told of it"
        for index, tool in unsupported[:MAX_WARNINGS]
    ]
    rest_count = len(unsupported) - len(warnings)
    return [*warnings, f"tools: {rest_count} more are left out"] if rest_count else warnings


@lru_cache(maxsize=64)
def _log_unsupported_type(tool_type: str) -> None:
    logger.warning("a client declares tools of type %s, which this server does not run: they are left out", tool_type)


class ToolChoice(StrictModel):
    """Which tools an answer may, must or must not call.

    `names` are the tools that may be called; None means all. `single` is true if the client named one tool. The answer
    is then exactly one call, as in OpenAI's API.
    """

    mode: Literal["auto", "none", "required"]
    names: tuple[str, ...] | None = None
    single: bool = False


def read_choice(value: Any) -> Any:
    """Return the field `tool_choice` as a `ToolChoice`. The field may be a mode, a named tool, or a list of allowed
    tools with a mode. Raise ValueError for any other value.
    """
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str):
        if value not in MODES:
            raise ValueError(f"must be one of {', '.join(MODES)}, or {NAMED_TOOL_FORM}, got {truncated_repr(value)}")
        return ToolChoice(mode=value)  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ValueError(f"must be one of {', '.join(MODES)}, or {NAMED_TOOL_FORM}, got {truncated_repr(value)}")
    choice_type = value.get("type")
    if choice_type in CALLABLE_TYPES:
        return ToolChoice(mode="required", names=(_tool_name(value),), single=True)
    if choice_type == "allowed_tools" and isinstance(value.get("allowed_tools"), Mapping):
        allowed = value["allowed_tools"]
        mode, tools = allowed.get("mode"), allowed.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise ValueError("allowed_tools must have the mode auto or required, and a list of tools")
        supported = [tool for tool in tools if not _is_unsupported(tool)]
        if not supported:
            raise ValueError("allowed_tools has no tool that this server calls: name a function or a custom tool")
        return ToolChoice(mode=mode, names=tuple(dict.fromkeys(map(_tool_name, supported))))
    if _is_unsupported(value):
        raise ValueError(
            f"tools of type {truncated_repr(choice_type)} are not run by this server; name a function or a custom tool"
        )
    raise ValueError(f"must be {NAMED_TOOL_FORM} or allowed_tools, got {truncated_repr(dict(value))}")


CALLABLE_TYPES = ("function", "custom")


def _is_unsupported(value: Any) -> bool:
    """Whether an entry of `tool_choice` names a tool of a type that this server cannot call."""
    tool_type = value.get("type") if isinstance(value, Mapping) else None
    return isinstance(tool_type, str) and tool_type not in (*CALLABLE_TYPES, "allowed_tools")


def _tool_name(value: Any) -> str:
    tool_type = value.get("type") if isinstance(value, Mapping) else None
    declaration = value.get(tool_type) if tool_type in CALLABLE_TYPES else None
    name = declaration.get("name") if isinstance(declaration, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"must name a tool as {NAMED_TOOL_FORM}, got {truncated_repr(value)}")
    return name


Choice = Annotated[
    ToolChoice,
    BeforeValidator(read_choice, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any]),
]
