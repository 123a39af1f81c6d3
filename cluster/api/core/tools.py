"""The fields `tools` and `tool_choice` of a chat request, in OpenAI's form.

A tool of a type that this server cannot call is left out with a warning, since clients declare such tools by default.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from cluster.api.core.errors import missing, shown
from cluster.api.core.fields import MAX_WARNINGS, Strict, Text, read_at, read_each
from cluster.chat import custom

logger = logging.getLogger(__name__)

MODES = ("auto", "none", "required")
NAMED = '{"type": "function", "function": {"name": ...}}'
MAX_TYPE = 64  # characters of a tool's type
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class Function(Strict):
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


class Tool(Strict):
    """A function that the model may call; the client runs it."""

    type: Literal["function"]
    function: Function

    def as_function(self) -> dict[str, Any]:
        """Return the tool for the chat template: as the client wrote it."""
        return self.model_dump(exclude_unset=True)


class InputGrammar(Strict):
    """A grammar for the input text of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: Text


class InputFormat(Strict):
    """The format of a custom tool's input: any text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class Custom(Strict):
    """A custom tool declaration: name, description, input format."""

    name: Name
    description: Text | None = None
    format: InputFormat | None = None


class ChatCustomTool(Strict):
    """A tool that takes one text. The model sees a function with one string, `input`; see `cluster.chat.custom`."""

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
            description=self._described(),
            parameters=custom.schema_of_input(pattern),
            strict=pattern is not None,
        )

    def as_function(self) -> dict[str, Any]:
        """Return the tool for the chat template. The grammar is in the description, so that the model can read it."""
        described = self._described()
        function = {"name": self.custom.name, "parameters": custom.schema_of_input()}
        return {"type": "function", "function": function | ({"description": described} if described else {})}

    def _described(self) -> str | None:
        said, grammar = self.custom.description, self.grammar
        if grammar is None:
            return said
        asked = f"The input must follow this {grammar.syntax} grammar:\n{grammar.definition}"
        return f"{said}\n{asked}" if said else asked


class LeftOutTool(Strict):
    """A tool of a type that this server cannot call. The chat template does not show it to the model."""

    type: str = Field(min_length=1, json_schema_extra={"not": {"enum": ["function", "custom"]}})
    name: Any = None


CallableTool = Tool | ChatCustomTool
AnyTool = Tool | ChatCustomTool | LeftOutTool


def read_tools(value: Any) -> list[AnyTool]:
    """Return the tools of a chat request.

    Raises:
        ApiError: 400 that names the tool and the field.
        ValueError: `value` is not a list.
    """
    return read_each(value, _read, "tools")


def _read(value: Any, path: str) -> AnyTool:
    if isinstance(value, Tool | ChatCustomTool | LeftOutTool):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "custom":
        return _checked(read_at(ChatCustomTool, value, path), f"{path}.custom.format")
    if not isinstance(kind, str) or kind in ("", "function"):
        return read_at(Tool, value, path)
    return LeftOutTool(type=kind, name=value.get("name"))


def _checked(tool: ChatCustomTool, path: str) -> ChatCustomTool:
    asked = tool.custom.format
    if asked is not None and asked.type == "grammar" and asked.grammar is None:
        raise missing(f"{path}.grammar")
    return tool


Tools = Annotated[list[AnyTool], PlainValidator(read_tools, json_schema_input_type=list[AnyTool])]


def left_out_warnings(tools: Sequence[AnyTool]) -> list[str]:
    """Return one warning for each of the first `MAX_WARNINGS` tools left out, one for the rest. Log each type once."""
    left_out = [(at, tool) for at, tool in enumerate(tools) if isinstance(tool, LeftOutTool)]
    for _, tool in left_out[:MAX_WARNINGS]:
        _log_once(shown(tool.type))
    told = [
        f"tools.{at}: {shown(tool.type)} is not run by this server; the model is not told of it"
        for at, tool in left_out[:MAX_WARNINGS]
    ]
    more = len(left_out) - len(told)
    return [*told, f"tools: {more} more are left out"] if more else told


@lru_cache(maxsize=64)
def _log_once(kind: str) -> None:
    logger.warning("a client declares tools of type %s, which this server does not run: they are left out", kind)


class ToolChoice(Strict):
    """Which tools an answer may, must or must not call.

    `names` are the tools that may be called; None means all. `single` is true if the client named one tool: as at
    OpenAI, the answer is then exactly one call.
    """

    mode: Literal["auto", "none", "required"]
    names: tuple[str, ...] | None = None
    single: bool = False


def read_choice(value: Any) -> Any:
    """Return `tool_choice` (a mode, a named tool, allowed tools with a mode) as a ToolChoice; ValueError if it has
    another form.
    """
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str):
        if value not in MODES:
            raise ValueError(f"must be one of {', '.join(MODES)}, or {NAMED}, got {shown(value)}")
        return ToolChoice(mode=value)  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ValueError(f"must be one of {', '.join(MODES)}, or {NAMED}, got {shown(value)}")
    kind = value.get("type")
    if kind in NAMING:
        return ToolChoice(mode="required", names=(_name(value),), single=True)
    if kind == "allowed_tools" and isinstance(value.get("allowed_tools"), Mapping):
        allowed = value["allowed_tools"]
        mode, tools = allowed.get("mode"), allowed.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise ValueError("allowed_tools must have the mode auto or required, and a list of tools")
        called = [tool for tool in tools if not _is_left_out(tool)]
        if not called:
            raise ValueError("allowed_tools has no tool that this server calls: name a function or a custom tool")
        return ToolChoice(mode=mode, names=tuple(dict.fromkeys(map(_name, called))))
    if _is_left_out(value):
        raise ValueError(f"tools of type {shown(kind)} are not run by this server; name a function or a custom tool")
    raise ValueError(f"must be {NAMED} or allowed_tools, got {shown(dict(value))}")


NAMING = ("function", "custom")


def _is_left_out(value: Any) -> bool:
    """Whether an entry of `tool_choice` names a tool of a type that this server cannot call."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    return isinstance(kind, str) and kind not in (*NAMING, "allowed_tools")


def _name(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    named = value.get(kind) if kind in NAMING else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"must name a tool as {NAMED}, got {shown(value)}")
    return name


Choice = Annotated[
    ToolChoice,
    BeforeValidator(read_choice, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any]),
]
