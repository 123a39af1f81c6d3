"""The body of /v1/responses: what is honoured of it, and how it becomes a chat request."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, ConfigDict, FailFast, Field, PlainValidator

from cluster.api.openai.content import Strict, Text
from cluster.api.openai.errors import ApiError, shown
from cluster.api.openai.fields import Table
from cluster.api.openai.response_api.fields import TABLE
from cluster.api.openai.response_api.items import Item, dialogue_of, items_of
from cluster.api.openai.translated import (
    Origins,
    Translated,
    TranslatedBody,
    not_taken,
    read_at,
    readable_json,
    translation,
)

LOGPROBS = "message.output_text.logprobs"
# The others ask for parts of items that no answer here has, or, for reasoning, that stand in the item itself.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Items = Annotated[list[Item], Field(min_length=1)]
ORIGINS: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class TextOptions(Strict):
    """`text`: the form of the answer. No model here has another `verbosity`."""

    model_config = ConfigDict(extra="forbid")

    format: Annotated[dict[str, Any], AfterValidator(readable_json)] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """`reasoning`. There are no summaries of it, of any length: the reasoning itself is in its item."""

    model_config = ConfigDict(extra="forbid")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Strict):
    """`stream_options`. `include_obfuscation` is taken and does nothing, as for the other endpoints."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: bool = False


class FunctionTool(Strict):
    """A function that may be called."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(readable_json)] | None = None
    strict: bool | None = None


Offered = Literal["web_search", "web_search_preview", "image_generation"]
OFFERED: tuple[Offered, ...] = get_args(Offered)


class OfferedTool(Strict):
    """A tool that OpenAI's servers run, and clients such as Codex offer unasked. The model is not told of it."""

    type: Offered


class FunctionChoice(Strict):
    """`tool_choice`: this function has to be called."""

    type: Literal["function"]
    name: Text


class AllowedTools(Strict):
    """`tool_choice`: only these of the tools may be called, or have to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools
CHOICES: Mapping[str, type[FunctionChoice] | type[AllowedTools]] = {
    "function": FunctionChoice,
    "allowed_tools": AllowedTools,
}

FUNCTIONS_ONLY = "it is run by OpenAI's servers or needs its models; this server calls tools of type 'function'"


def _tools(value: Any) -> list[FunctionTool | OfferedTool]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list, got {shown(value)}")
    for at, tool in enumerate(value):
        if isinstance(tool, dict) and tool.get("type", "function") not in ("function", *OFFERED):
            raise not_taken(f"tools.{at}.type", tool["type"], FUNCTIONS_ONLY)
    return [_tool(tool, f"tools.{at}") for at, tool in enumerate(value)]


def _tool(value: Any, path: str) -> FunctionTool | OfferedTool:
    if isinstance(value, dict) and value.get("type") in OFFERED:
        return OfferedTool(type=value["type"])
    return read_at(FunctionTool, value, path)


def _tool_choice(value: Any) -> ToolChoice:
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ValueError(f"must be 'none', 'auto', 'required' or an object, got {shown(value)}")
        return value  # type: ignore[return-value]
    if not isinstance(value, dict):
        raise ValueError(f"must be a string or an object, got {shown(value)}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise not_taken("tool_choice.type", kind, FUNCTIONS_ONLY)
    return read_at(CHOICES[kind], value, "tool_choice")


class ResponseRequest(TranslatedBody):
    """The body of /v1/responses. Sampling and the extensions are the chat request's own."""

    table: ClassVar[Table] = TABLE

    model: str | None = None
    input: Annotated[list[Item], PlainValidator(items_of, json_schema_input_type=str | Items)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions | None = None
    tools: Annotated[
        list[FunctionTool | OfferedTool],
        PlainValidator(_tools, json_schema_input_type=list[FunctionTool | OfferedTool]),
    ] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice, PlainValidator(_tool_choice, json_schema_input_type=ToolChoice)] = "auto"
    parallel_tool_calls: bool = True
    include: Annotated[list[Included], FailFast()] = Field(default_factory=list)
    top_logprobs: int = Field(default=0, ge=0)
    metadata: Annotated[dict[Text, Text], Field(max_length=16)] = Field(default_factory=dict)
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether each text is to have the log-probabilities of its tokens."""
        return LOGPROBS in self.include

    def translated(self) -> Translated:
        """See `TranslatedBody.translated`."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options: only allowed when stream is true"
            raise ApiError(message, param="stream_options", code="invalid_value")
        if self.top_logprobs and not self.wants_logprobs:
            message = f"top_logprobs: needs include: [{LOGPROBS!r}]"
            raise ApiError(message, param="top_logprobs", code="invalid_value")
        spoken, functions = dialogue_of(self.input, self.instructions), self._functions()
        chat: dict[str, Any] = {
            **self.asked_beside(),
            "model": self.model,
            "messages": spoken.messages,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _response_format(self.text.format),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "tools": [_chat_tool(tool) for tool in functions.values()] or None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        names = {f"tools.{place}.function": f"tools.{at}" for place, at in enumerate(functions)}
        return translation(chat, Origins({**ORIGINS, **spoken.origins, **names}))

    def _functions(self) -> dict[int, FunctionTool]:
        """The functions among the tools, by their places."""
        return {at: tool for at, tool in enumerate(self.tools) if isinstance(tool, FunctionTool)}

    def said_beside(self) -> list[str]:
        """Warnings about the tools that the model is not told of."""
        offered = [(at, tool.type) for at, tool in enumerate(self.tools) if isinstance(tool, OfferedTool)]
        return [f"tools.{at}: {kind!r} is not run by this server; the model is not told of it" for at, kind in offered]


def _chat_choice(choice: ToolChoice) -> Any:
    """`tool_choice` as a chat request has it."""
    if isinstance(choice, FunctionChoice):
        return _named(choice)
    if isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as a chat request has it: what a schema is called stands beside it there."""
    if form is None or form.get("type") != "json_schema":
        return None if form is None else dict(form)
    return {"type": "json_schema", "json_schema": {name: part for name, part in form.items() if name != "type"}}
