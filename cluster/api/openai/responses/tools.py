"""The tools of /v1/responses: how each type becomes tools of a chat request, and which tool a call belongs to.

Functions and custom tools are unchanged. A tool in a namespace gets the name `NAMESPACE.TOOL`. A tool search that the
client runs becomes a function. All other types are left out with a warning, as in `cluster.api.core.tools`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from cluster.api.core.errors import missing, shown, wrong
from cluster.api.core.fields import Strict, Text, read_at, read_each
from cluster.api.core.tools import NAMING, LeftOutTool
from cluster.api.core.translated import not_taken, readable_json

Kind = Literal["function", "custom", "tool_search"]
SEARCH = "tool_search"
Schema = Annotated[dict[str, Any], AfterValidator(readable_json)]


class FunctionTool(Strict):
    """A function tool."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ResponseInputFormat(Strict):
    """The format of a custom tool's input: any text, or text that follows a grammar (`syntax`, `definition`)."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class ResponseCustomTool(Strict):
    """A custom tool: it takes one text."""

    type: Literal["custom"]
    name: Text
    description: Text | None = None
    format: ResponseInputFormat | None = None


class SearchTool(Strict):
    """A search for further tools that the client runs; the model sees a function called `tool_search`."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: Text | None = None
    parameters: Schema | None = None


class NamespaceTool(Strict):
    """A group of tools under a common name."""

    type: Literal["namespace"]
    name: Text
    description: Text | None = None
    tools: list[Any]


Single = FunctionTool | ResponseCustomTool | SearchTool | LeftOutTool
ResponseTool = Single | NamespaceTool


class NamespaceInput(NamespaceTool):
    """A namespace in a body. Only for the OpenAPI schema."""

    tools: list[FunctionTool | ResponseCustomTool | LeftOutTool]


class ServerSearchTool(Strict):
    """A tool search that the server would run; it is left out. Only for the OpenAPI schema."""

    type: Literal["tool_search"]
    execution: Literal["server"] | None = None


class OtherTool(LeftOutTool):
    """Any other tool; it is left out. Only for the OpenAPI schema."""

    type: str = Field(min_length=1, json_schema_extra={"not": {"enum": [*NAMING, "namespace", SEARCH]}})


ToolInput = FunctionTool | ResponseCustomTool | SearchTool | NamespaceInput | ServerSearchTool | OtherTool


def read_tools(value: Any, path: str = "tools") -> list[ResponseTool]:
    """Return a list of tools; `path` is the path of the list in the body.

    Raises:
        ApiError: 400 that names the tool and the field.
        ValueError: `value` is not a list.
    """
    return read_each(value, _read, path)


def _read(value: Any, path: str, inside: bool = False) -> ResponseTool:
    """Read one tool. `inside` says that the tool is in a namespace, which may hold no namespace and no tool search."""
    kind = value.get("type", "") if isinstance(value, dict) else ""
    if kind == "custom":
        return _checked(read_at(ResponseCustomTool, value, path), f"{path}.format")
    if not isinstance(kind, str) or kind in ("", "function"):
        return read_at(FunctionTool, value, path)
    if kind == "namespace" and not inside:
        space = read_at(NamespaceTool, value, path)
        tools = [_read(tool, f"{path}.tools.{at}", inside=True) for at, tool in enumerate(space.tools)]
        return space.model_copy(update={"tools": tools})
    if kind == SEARCH and value.get("execution") == "client" and not inside:
        return read_at(SearchTool, value, path)
    return LeftOutTool(type=kind, name=value.get("name"))


def _checked(tool: ResponseCustomTool, path: str) -> ResponseCustomTool:
    if tool.format is not None and tool.format.type == "grammar":
        for name in ("syntax", "definition"):
            if getattr(tool.format, name) is None:
                raise missing(f"{path}.{name}")
    return tool


class Own(NamedTuple):
    """The client's own identification of a tool: kind, name, and namespace if it has one."""

    kind: Kind
    name: str
    namespace: str | None = None


def joined(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool. If the tool is in a namespace, the namespace comes first."""
    return f"{namespace}.{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a body as tools of a chat request. `origins` maps paths of the chat request to paths of the body;
    `names` maps the names that the model uses to the client's names.
    """

    chat: list[dict[str, Any]]
    origins: dict[str, str]
    names: dict[str, Own]


def offered(tools: Iterable[tuple[str, ResponseTool]], found: Iterable[tuple[str, ResponseTool]] = ()) -> Offered:
    """Return tools, each with its path in the body, as tools of a chat request. `found` are tools from input items,
    such as the result of a search. A found tool with a known name is the same tool again and is skipped.
    """
    made = Offered([], {}, {})
    for again, (path, tool) in [*((False, one) for one in tools), *((True, one) for one in found)]:
        for own_path, namespace, member in _members(path, tool):
            if again and _full_name(member, namespace) in made.names:
                continue
            place = f"tools.{len(made.chat)}"
            made.origins[place] = own_path
            made.origins.update({f"{place}.{kind}": own_path for kind in NAMING})
            made.origins[f"{place}.custom.format.grammar"] = f"{own_path}.format"
            made.chat.append(_chat_tool(member, namespace))
            if not isinstance(member, LeftOutTool):
                name = SEARCH if isinstance(member, SearchTool) else member.name
                space = None if namespace is None else namespace.name
                made.names[_full_name(member, namespace)] = Own(member.type, name, space)
    return made


def _full_name(tool: Single, space: NamespaceTool | None) -> str:
    """Return the name by which the model calls a tool; meaningless for a tool that is left out."""
    name = SEARCH if isinstance(tool, SearchTool) else str(tool.name)
    return joined(name, None if space is None else space.name)


def _members(path: str, tool: ResponseTool) -> Iterator[tuple[str, NamespaceTool | None, Single]]:
    """Yield (path, namespace, tool) for a tool, or for each tool of a namespace."""
    if isinstance(tool, NamespaceTool):
        yield from ((f"{path}.tools.{at}", tool, member) for at, member in enumerate(tool.tools))
    else:
        yield path, None, tool


def _chat_tool(tool: Single, space: NamespaceTool | None) -> dict[str, Any]:
    if isinstance(tool, LeftOutTool):
        return {"type": tool.type, "name": tool.name}
    if isinstance(tool, SearchTool):
        function = {"name": SEARCH, **tool.model_dump(exclude={"type", "execution"}, exclude_none=True)}
        return {"type": "function", "function": function}
    said = tool.model_dump(exclude={"type", "format"}, exclude_none=True)
    said["name"] = _full_name(tool, space)
    if space is not None and space.description:
        said["description"] = "\n".join(part for part in (space.description, tool.description) if part)
    if isinstance(tool, FunctionTool):
        return {"type": "function", "function": said}
    if tool.format is not None and tool.format.type == "grammar":
        grammar = {"syntax": tool.format.syntax, "definition": tool.format.definition}
        said["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": said}


class NamedChoice(Strict):
    """`tool_choice`: this function or custom tool must be called. The namespace of the tool may be left out."""

    type: Literal["function", "custom"]
    name: Text
    namespace: Text | None = None


class AllowedTools(Strict):
    """`tool_choice`: only these tools may be called. With mode `required`, at least one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Any] = Field(min_length=1)


class AllowedToolsInput(AllowedTools):
    """Allowed tools in a body. Only for the OpenAPI schema."""

    tools: list[NamedChoice | LeftOutTool] = Field(min_length=1)


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedTools
ChoiceInput = Literal["none", "auto", "required"] | NamedChoice | AllowedToolsInput
NOT_CALLED = "it is not run by this server; choose a tool of type 'function' or 'custom'"


def read_choice(value: Any) -> ToolChoice:
    """Return the `tool_choice` of a body.

    Raises:
        ApiError: 400 that names the field.
        ValueError: `value` is neither a known word nor an object.
    """
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ValueError(f"must be 'none', 'auto', 'required' or an object, got {shown(value)}")
        return value  # type: ignore[return-value]
    if not isinstance(value, dict):
        raise ValueError(f"must be a string or an object, got {shown(value)}")
    kind = value.get("type")
    if kind == "allowed_tools":
        choice = read_at(AllowedTools, value, "tool_choice")
        tools = [_allowed(tool, f"tool_choice.tools.{at}") for at, tool in enumerate(choice.tools)]
        return choice.model_copy(update={"tools": tools})
    if kind == SEARCH:
        return NamedChoice(type="function", name=SEARCH)
    if kind not in NAMING:
        raise not_taken("tool_choice.type", kind, NOT_CALLED)
    return read_at(NamedChoice, value, "tool_choice")


def _allowed(value: Any, path: str) -> NamedChoice | LeftOutTool:
    """Read one allowed tool. A namespace, and any tool that is left out, becomes a `LeftOutTool` with its type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == SEARCH:
        return NamedChoice(type="function", name=SEARCH)
    if isinstance(kind, str) and kind and kind not in NAMING:
        return LeftOutTool(type=kind, name=value.get("name"))
    return read_at(NamedChoice, value, path)


def chat_choice(choice: ToolChoice, names: Mapping[str, Own]) -> Any:
    """Return `tool_choice` in the form of a chat request; `names` is `Offered.names`."""
    if isinstance(choice, NamedChoice):
        return _named(choice, names)
    if isinstance(choice, AllowedTools):
        tools = [one for tool in choice.tools for one in _allowed_of(tool, names)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _allowed_of(tool: NamedChoice | LeftOutTool, names: Mapping[str, Own]) -> list[dict[str, Any]]:
    """Return one allowed tool in the form of a chat request. A namespace becomes all of its tools."""
    if isinstance(tool, NamedChoice):
        return [_named(tool, names)]
    if tool.type != "namespace":
        return [{"type": tool.type}]
    members = [full for full, own in names.items() if own.namespace == tool.name]
    return [_function_named(name) for name in members or [str(tool.name)]]


def _named(choice: NamedChoice, names: Mapping[str, Own]) -> dict[str, Any]:
    """Return a choice under the name that the model uses. A name without a namespace may be a tool of any namespace.

    Raises:
        ApiError: 400 if several namespaces have a tool of this name.
    """
    name = joined(choice.name, choice.namespace)
    if name not in names:
        found = [full for full, own in names.items() if own.name == name]
        if len(found) > 1:
            where = ", ".join(found)[:200]
            raise wrong("tool_choice", f"{shown(name)} is a tool of several namespaces; say which: {where}")
        name = found[0] if found else name
    return _function_named(name)


def _function_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
