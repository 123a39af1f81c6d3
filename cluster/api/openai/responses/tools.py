"""The tools of /v1/responses: translates each into tools of a chat request, and finds the tool that a call means.

Functions and custom tools stay what they are. A tool in a namespace gets the name `NAMESPACE.TOOL`. A tool search that
the client runs becomes a function. All other types are left out with a warning, as in `cluster.api.core.tools`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from cluster.api.core.errors import invalid_value, missing_parameter, truncated_repr
from cluster.api.core.fields import StrictModel, Text, read_list, validate_at
from cluster.api.core.tools import CALLABLE_TYPES, UnsupportedTool
from cluster.api.core.translated import require_utf8_json, unsupported_part

Kind = Literal["function", "custom", "tool_search"]
TOOL_SEARCH = "tool_search"
Schema = Annotated[dict[str, Any], AfterValidator(require_utf8_json)]


class FunctionTool(StrictModel):
    """A function tool."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ResponseInputFormat(StrictModel):
    """The format of a custom tool's input: any text, or text that follows a grammar (`syntax`, `definition`)."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class ResponseCustomTool(StrictModel):
    """A custom tool: it takes one text."""

    type: Literal["custom"]
    name: Text
    description: Text | None = None
    format: ResponseInputFormat | None = None


class SearchTool(StrictModel):
    """A search for further tools. The client runs the search; the model sees it as a function called `tool_search`."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: Text | None = None
    parameters: Schema | None = None


class NamespaceTool(StrictModel):
    """A group of tools under a common name."""

    type: Literal["namespace"]
    name: Text
    description: Text | None = None
    tools: list[Any]


SingleTool = FunctionTool | ResponseCustomTool | SearchTool | UnsupportedTool
ResponseTool = SingleTool | NamespaceTool


class NamespaceInput(NamespaceTool):
    """A namespace in a body. Only for the OpenAPI schema."""

    tools: list[FunctionTool | ResponseCustomTool | UnsupportedTool]


class ServerSearchTool(StrictModel):
    """A tool search that the server would run; it is left out. Only for the OpenAPI schema."""

    type: Literal["tool_search"]
    execution: Literal["server"] | None = None


class OtherTool(UnsupportedTool):
    """Any other tool; it is left out. Only for the OpenAPI schema."""

    type: str = Field(min_length=1, json_schema_extra={"not": {"enum": [*CALLABLE_TYPES, "namespace", TOOL_SEARCH]}})


ToolInput = FunctionTool | ResponseCustomTool | SearchTool | NamespaceInput | ServerSearchTool | OtherTool


def read_tools(value: Any, path: str = "tools") -> list[ResponseTool]:
    """Return a list of tools; `path` is the path of the list in the body.

    Raises:
        ApiError: 400 that names the tool and the field.
        ValueError: `value` is not a list.
    """
    return read_list(value, _read_tool, path)


def _read_tool(value: Any, path: str, in_namespace: bool = False) -> ResponseTool:
    """Read one tool. If the tool is in a namespace (`in_namespace`) and is itself a namespace or a tool search, it
    becomes an `UnsupportedTool`, which is left out.
    """
    tool_type = value.get("type", "") if isinstance(value, dict) else ""
    if tool_type == "custom":
        return _check_format(validate_at(ResponseCustomTool, value, path), f"{path}.format")
    if not isinstance(tool_type, str) or tool_type in ("", "function"):
        return validate_at(FunctionTool, value, path)
    if tool_type == "namespace" and not in_namespace:
        namespace = validate_at(NamespaceTool, value, path)
        tools = [
            _read_tool(tool, f"{path}.tools.{index}", in_namespace=True) for index, tool in enumerate(namespace.tools)
        ]
        return namespace.model_copy(update={"tools": tools})
    if tool_type == TOOL_SEARCH and value.get("execution") == "client" and not in_namespace:
        return validate_at(SearchTool, value, path)
    return UnsupportedTool(type=tool_type, name=value.get("name"))


def _check_format(tool: ResponseCustomTool, path: str) -> ResponseCustomTool:
    if tool.format is not None and tool.format.type == "grammar":
        for name in ("syntax", "definition"):
            if getattr(tool.format, name) is None:
                raise missing_parameter(f"{path}.{name}")
    return tool


class ClientTool(NamedTuple):
    """How the client identifies a tool: kind, name, and namespace (None if the tool is in no namespace)."""

    kind: Kind
    name: str
    namespace: str | None = None


def qualified_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool. If the tool is in a namespace, the namespace comes first."""
    return f"{namespace}.{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a body as tools of a chat request. `origins` maps paths of the chat request to paths of the body;
    `client_tools` maps the names that the model uses to the client's names.
    """

    tools: list[dict[str, Any]]
    origins: dict[str, str]
    client_tools: dict[str, ClientTool]


def to_chat_tools(
    tools: Iterable[tuple[str, ResponseTool]], found_tools: Iterable[tuple[str, ResponseTool]] = ()
) -> ChatTools:
    """Return tools, each with its path in the body, as tools of a chat request. `found_tools` are tools from input
    items, such as the result of a search. A found tool with a known name is the same tool again and is skipped.
    """
    result = ChatTools([], {}, {})
    for is_found, (path, tool) in [*((False, entry) for entry in tools), *((True, entry) for entry in found_tools)]:
        for body_path, namespace, member in _single_tools(path, tool):
            if is_found and _qualified_name_of(member, namespace) in result.client_tools:
                continue
            chat_path = f"tools.{len(result.tools)}"
            result.origins[chat_path] = body_path
            result.origins.update({f"{chat_path}.{tool_type}": body_path for tool_type in CALLABLE_TYPES})
            result.origins[f"{chat_path}.custom.format.grammar"] = f"{body_path}.format"
            result.tools.append(_chat_tool(member, namespace))
            if not isinstance(member, UnsupportedTool):
                name = TOOL_SEARCH if isinstance(member, SearchTool) else member.name
                namespace_name = None if namespace is None else namespace.name
                result.client_tools[_qualified_name_of(member, namespace)] = ClientTool(
                    member.type, name, namespace_name
                )
    return result


def _qualified_name_of(tool: SingleTool, namespace: NamespaceTool | None) -> str:
    """Return the name by which the model calls a tool. For an `UnsupportedTool`, which the model does not see, the
    result has no meaning.
    """
    name = TOOL_SEARCH if isinstance(tool, SearchTool) else str(tool.name)
    return qualified_name(name, None if namespace is None else namespace.name)


def _single_tools(path: str, tool: ResponseTool) -> Iterator[tuple[str, NamespaceTool | None, SingleTool]]:
    """Yield (path, namespace, tool) for a tool, or for each tool of a namespace."""
    if isinstance(tool, NamespaceTool):
        yield from ((f"{path}.tools.{index}", tool, inner_tool) for index, inner_tool in enumerate(tool.tools))
    else:
        yield path, None, tool


def _chat_tool(tool: SingleTool, namespace: NamespaceTool | None) -> dict[str, Any]:
    if isinstance(tool, UnsupportedTool):
        return {"type": tool.type, "name": tool.name}
    if isinstance(tool, SearchTool):
        function = {"name": TOOL_SEARCH, **tool.model_dump(exclude={"type", "execution"}, exclude_none=True)}
        return {"type": "function", "function": function}
    declaration = tool.model_dump(exclude={"type", "format"}, exclude_none=True)
    declaration["name"] = _qualified_name_of(tool, namespace)
    if namespace is not None and namespace.description:
        declaration["description"] = "\n".join(
            description for description in (namespace.description, tool.description) if description
        )
    if isinstance(tool, FunctionTool):
        return {"type": "function", "function": declaration}
    if tool.format is not None and tool.format.type == "grammar":
        grammar = {"syntax": tool.format.syntax, "definition": tool.format.definition}
        declaration["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": declaration}


class NamedChoice(StrictModel):
    """A `tool_choice` that names the tool that must be called, or one of the allowed tools of a `tool_choice`. The
    namespace of the tool may be left out.
    """

    type: Literal["function", "custom"]
    name: Text
    namespace: Text | None = None


class AllowedTools(StrictModel):
    """A `tool_choice` that allows only some tools. With mode `required`, at least one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Any] = Field(min_length=1)


class AllowedToolsInput(AllowedTools):
    """Allowed tools in a body. Only for the OpenAPI schema."""

    tools: list[NamedChoice | UnsupportedTool] = Field(min_length=1)


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedTools
ChoiceInput = Literal["none", "auto", "required"] | NamedChoice | AllowedToolsInput
NOT_RUN_REMEDY = "it is not run by this server; choose a tool of type 'function' or 'custom'"


def read_choice(value: Any) -> ToolChoice:
    """Return the `tool_choice` of a body.

    Raises:
        ApiError: 400 that names the field.
        ValueError: `value` is neither 'none', 'auto' or 'required' nor an object.
    """
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ValueError(f"must be 'none', 'auto', 'required' or an object, got {truncated_repr(value)}")
        return value  # type: ignore[return-value]
    if not isinstance(value, dict):
        raise ValueError(f"must be a string or an object, got {truncated_repr(value)}")
    choice_type = value.get("type")
    if choice_type == "allowed_tools":
        choice = validate_at(AllowedTools, value, "tool_choice")
        tools = [_read_allowed(tool, f"tool_choice.tools.{index}") for index, tool in enumerate(choice.tools)]
        return choice.model_copy(update={"tools": tools})
    if choice_type == TOOL_SEARCH:
        return NamedChoice(type="function", name=TOOL_SEARCH)
    if choice_type not in CALLABLE_TYPES:
        raise unsupported_part("tool_choice.type", choice_type, NOT_RUN_REMEDY)
    return validate_at(NamedChoice, value, "tool_choice")


def _read_allowed(value: Any, path: str) -> NamedChoice | UnsupportedTool:
    """Read one allowed tool. A namespace, and any tool that is left out, becomes an `UnsupportedTool` with its type."""
    tool_type = value.get("type") if isinstance(value, dict) else None
    if tool_type == TOOL_SEARCH:
        return NamedChoice(type="function", name=TOOL_SEARCH)
    if isinstance(tool_type, str) and tool_type and tool_type not in CALLABLE_TYPES:
        return UnsupportedTool(type=tool_type, name=value.get("name"))
    return validate_at(NamedChoice, value, path)


def chat_choice(choice: ToolChoice, client_tools: Mapping[str, ClientTool]) -> Any:
    """Return `tool_choice` in the form of a chat request; `client_tools` is `ChatTools.client_tools`."""
    if isinstance(choice, NamedChoice):
        return _named_choice(choice, client_tools)
    if isinstance(choice, AllowedTools):
        tools = [allowed for tool in choice.tools for allowed in _allowed_choices(tool, client_tools)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _allowed_choices(
    tool: NamedChoice | UnsupportedTool, client_tools: Mapping[str, ClientTool]
) -> list[dict[str, Any]]:
    """Return one allowed tool in the form of a chat request. A namespace stands for all of its tools, so it becomes one
    entry for each.
    """
    if isinstance(tool, NamedChoice):
        return [_named_choice(tool, client_tools)]
    if tool.type != "namespace":
        return [{"type": tool.type}]
    member_names = [qualified for qualified, client_tool in client_tools.items() if client_tool.namespace == tool.name]
    return [_function_choice(name) for name in member_names or [str(tool.name)]]


def _named_choice(choice: NamedChoice, client_tools: Mapping[str, ClientTool]) -> dict[str, Any]:
    """Return the choice of a tool in the form of a chat request, with the name that the model uses for the tool. If the
    client gave no namespace, the tool may be in any namespace.

    Raises:
        ApiError: 400 if several namespaces have a tool of this name.
    """
    name = qualified_name(choice.name, choice.namespace)
    if name not in client_tools:
        candidates = [qualified for qualified, client_tool in client_tools.items() if client_tool.name == name]
        if len(candidates) > 1:
            candidates_text = ", ".join(candidates)[:200]
            raise invalid_value(
                "tool_choice", f"{truncated_repr(name)} is a tool of several namespaces; say which: {candidates_text}"
            )
        name = candidates[0] if candidates else name
    return _function_choice(name)


def _function_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
