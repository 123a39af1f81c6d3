"""The tools of a request, and which of them its answer may, must or must not call, in OpenAI's names."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cluster.api.openai.content import Strict, Text
from cluster.api.openai.errors import shown

MODES = ("auto", "none", "required")
NAMED = '{"type": "function", "function": {"name": ...}}'
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class Function(Strict):
    """What a tool does; `parameters` is the JSON schema of an object. Whether `strict` or not, see `docs/chat.md`."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema of the arguments; without `parameters` there are none."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(Strict):
    """A function that the model may call; the client runs it."""

    type: Literal["function"]
    function: Function


class ToolChoice(Strict):
    """Which tools an answer may, must or must not call.

    `names` are the tools that may be called, None for all of them. `single` is true for a choice that names one
    function: OpenAI, and so this server, answers such a choice with exactly one call.
    """

    mode: Literal["auto", "none", "required"]
    names: tuple[str, ...] | None = None
    single: bool = False


def read_choice(value: Any) -> Any:
    """OpenAI's `tool_choice` as a ToolChoice: a mode, a named function, or a list of allowed tools with a mode."""
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str):
        if value not in MODES:
            raise ValueError(f"must be one of {', '.join(MODES)}, or {NAMED}, got {shown(value)}")
        return ToolChoice(mode=value)  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ValueError(f"must be one of {', '.join(MODES)}, or {NAMED}, got {shown(value)}")
    if value.get("type") == "function":
        return ToolChoice(mode="required", names=(_name(value),), single=True)
    if value.get("type") == "allowed_tools" and isinstance(value.get("allowed_tools"), Mapping):
        allowed = value["allowed_tools"]
        mode, tools = allowed.get("mode"), allowed.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise ValueError("allowed_tools must have the mode auto or required, and a list of tools")
        return ToolChoice(mode=mode, names=tuple(dict.fromkeys(map(_name, tools))))
    raise ValueError(f"must be {NAMED} or allowed_tools, got {shown(dict(value))}")


def _name(value: Any) -> str:
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"must name a tool as {NAMED}, got {shown(value)}")
    return name


Choice = Annotated[
    ToolChoice,
    BeforeValidator(read_choice, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any]),
]
