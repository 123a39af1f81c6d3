"""The fields of a request that make up a conversation: its messages, its tools, and what its chat template is told."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from cluster.api.openai.content import ChatMessage, Strict, check_messages
from cluster.api.openai.errors import ApiError, shown
from cluster.api.openai.tools import Choice, Tool, ToolChoice

Messages = Annotated[list[ChatMessage], FailFast()]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversingFields(Strict):
    """What a chat and the tokenization of one share. Without `tool_choice` the model may call the tools there are."""

    tools: Annotated[list[Tool], FailFast()] = Field(default_factory=list)
    tool_choice: Choice | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def choice(self) -> ToolChoice:
        """Which tools may or must be called; none where there are none."""
        if not self.tools:
            return ToolChoice(mode="none")
        return self.tool_choice or ToolChoice(mode="auto")

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        names = self.choice.names
        if self.choice.mode == "none":
            return []
        return [tool for tool in self.tools if names is None or tool.function.name in names]

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the chat template is told of, as the client wrote them."""
        if self.choice.mode == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def check_conversation(self, messages: Sequence[ChatMessage], most_messages: int, most_tools: int) -> None:
        """Check what the types of these fields cannot.

        Raises:
            ApiError: 400 that names the field.
        """
        check_messages(messages, most_messages)
        if len(self.tools) > most_tools:
            raise _wrong("tools", f"at most {most_tools}, got {len(self.tools)}")
        names = [tool.function.name for tool in self.tools]
        for at, tool in enumerate(self.tools):
            if tool.function.name in names[:at]:
                raise _wrong(f"tools.{at}.function.name", f"{shown(tool.function.name)} is the name of another tool")
            if tool.function.schema_of_arguments["type"] != "object":
                raise _wrong(f"tools.{at}.function.parameters", "must be the schema of an object")
        wanted = self.tool_choice
        if wanted is not None and wanted.mode == "required" and not self.tools:
            raise _wrong("tool_choice", "needs tools, and there are none")
        for name in (wanted and wanted.names) or ():
            if name not in names:
                raise _wrong("tool_choice", f"{shown(name)} is none of the tools")
        if self.continue_final_message:
            self._check_continued(messages)

    def _check_continued(self, messages: Sequence[ChatMessage]) -> None:
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise _wrong(
                "continue_final_message", "contradicts add_generation_prompt: true; send false, or leave it out"
            )
        if messages[-1].role != "assistant" or not messages[-1].content or messages[-1].tool_calls:
            raise _wrong("continue_final_message", "the last message must be an assistant's, with text and no calls")


def _wrong(name: str, message: str) -> ApiError:
    return ApiError(f"{name}: {message}", param=name, code="invalid_value")
