"""The body of /v1/responses: its honoured fields, and its translation into a chat request."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, FailFast, Field, PlainValidator

from cluster.api.core.adapter import Origins
from cluster.api.core.errors import invalid_value
from cluster.api.core.fields import FieldTable, StrictModel, Text
from cluster.api.core.translated import ChatTranslation, TranslatedBody, require_utf8_json, validate_chat
from cluster.api.openai.responses.fields import TABLE
from cluster.api.openai.responses.items import Item, declared_tools, dialogue_of, ignored_item_warnings, items_of
from cluster.api.openai.responses.tools import (
    ChatTools,
    ChoiceInput,
    ResponseTool,
    ToolChoice,
    ToolInput,
    chat_choice,
    read_choice,
    read_tools,
    to_chat_tools,
)

LOGPROBS_OPTION = "message.output_text.logprobs"
# The values of the field `include`. Only LOGPROBS_OPTION has an effect: the other values ask for parts that answers
# here never have.
IncludeOption = Literal[
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


class TextOptions(StrictModel):
    """`text`: the format and the verbosity of the answer. `medium` is the only verbosity that is accepted."""

    model_config = ConfigDict(extra="forbid")

    format: Annotated[dict[str, Any], AfterValidator(require_utf8_json)] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(StrictModel):
    """`reasoning`: the effort, and options of summaries. Options of summaries have no effect, because no summaries are
    made: a reasoning item holds the reasoning itself.
    """

    model_config = ConfigDict(extra="forbid")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(StrictModel):
    """`stream_options`. `include_obfuscation` is accepted and has no effect, as for the other endpoints."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: bool = False


class ResponseRequest(TranslatedBody):
    """The body of /v1/responses. Its extensions and sampling fields become fields of the chat request, unchanged."""

    table: ClassVar[FieldTable] = TABLE

    model: str | None = None
    input: Annotated[list[Item], PlainValidator(items_of, json_schema_input_type=str | Items)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], PlainValidator(read_tools, json_schema_input_type=list[ToolInput])] = Field(
        default_factory=list
    )
    tool_choice: Annotated[ToolChoice, PlainValidator(read_choice, json_schema_input_type=ChoiceInput)] = "auto"
    parallel_tool_calls: bool = True
    include: Annotated[list[IncludeOption], FailFast()] = Field(default_factory=list)
    top_logprobs: int = Field(default=0, ge=0)
    metadata: Annotated[dict[Text, Text], Field(max_length=16)] = Field(default_factory=dict)
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether output texts must have the log-probabilities of their tokens."""
        return LOGPROBS_OPTION in self.include

    def to_chat(self) -> ChatTranslation:
        """Return this body as a chat request, as described at `TranslatedBody.to_chat`."""
        if self.stream_options is not None and not self.stream:
            raise invalid_value("stream_options", "only allowed when stream is true")
        if self.top_logprobs and not self.wants_logprobs:
            raise invalid_value("top_logprobs", f"needs include: [{LOGPROBS_OPTION!r}]")
        dialogue, tools = dialogue_of(self.input, self.instructions), self.chat_tools
        chat: dict[str, Any] = {
            **self.extension_fields(),
            "model": self.model,
            "messages": dialogue.messages,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _response_format(self.text.format),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "tools": tools.tools or None,
            "tool_choice": chat_choice(self.tool_choice, tools.client_tools),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return validate_chat(chat, Origins({**ORIGINS, **dialogue.origins, **tools.origins}))

    @cached_property
    def chat_tools(self) -> ChatTools:
        """The tools in the body and in its input items, as tools of a chat request."""
        return to_chat_tools(
            [(f"tools.{index}", tool) for index, tool in enumerate(self.tools)], declared_tools(self.input)
        )

    def ignored_item_warnings(self) -> list[str]:
        """Return warnings about input items that are left out of the prompt."""
        return ignored_item_warnings(self.input)


def _response_format(text_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` as the `response_format` of a chat request: a schema and its name move into the field
    `json_schema`.
    """
    if text_format is None or text_format.get("type") != "json_schema":
        return None if text_format is None else dict(text_format)
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in text_format.items() if name != "type"},
    }
