"""The fields of a conversation: messages, tools, and arguments of the chat template."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from cluster.api.core.content import ChatMessage, Strict, check_messages
from cluster.api.core.errors import ApiError, shown
from cluster.api.core.fields import MAX_WARNINGS
from cluster.api.core.tools import CallableTool, Choice, LeftOutTool, ToolChoice, Tools

Messages = Annotated[list[ChatMessage], FailFast()]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversationFields(Strict):
    """Fields that /v1/chat/completions and /tokenize share. Without `tool_choice` the model may call any of `tools`."""

    tools: Tools = Field(default_factory=list)
    tool_choice: Choice | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def served_tools(self) -> list[CallableTool]:
        """The tools that this server can call; tools of other types are left out."""
        return [tool for tool in self.tools if not isinstance(tool, LeftOutTool)]

    @property
    def choice(self) -> ToolChoice:
        """The tool choice in effect: mode `none` without callable tools, else `tool_choice`, by default `auto`."""
        if not self.served_tools:
            return ToolChoice(mode="none")
        return self.tool_choice or ToolChoice(mode="auto")

    @property
    def callable_tools(self) -> list[CallableTool]:
        """The tools that the answer may call."""
        names = self.choice.names
        if self.choice.mode == "none":
            return []
        return [tool for tool in self.served_tools if names is None or tool.function.name in names]

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the chat template shows to the model, as functions."""
        if self.choice.mode == "none":
            return []
        return [tool.as_function() for tool in self.served_tools]

    def check_conversation(self, messages: Sequence[ChatMessage], most_messages: int, most_tools: int) -> None:
        """Check messages, tools and tool choice for what the field types cannot express.

        Raises:
            ApiError: 400 that names the field.
        """
        check_messages(messages, most_messages)
        if len(self.tools) > most_tools:
            raise _wrong("tools", f"at most {most_tools}, got {len(self.tools)}")
        names: set[str] = set()
        for at, tool in enumerate(self.tools):
            if isinstance(tool, LeftOutTool):
                continue
            function, path = tool.function, f"tools.{at}.{tool.type}"
            if function.name in names:
                raise _wrong(f"{path}.name", f"{shown(function.name)} is the name of another tool")
            if function.schema_of_arguments["type"] != "object":
                raise _wrong(f"{path}.parameters", "must be the schema of an object")
            names.add(function.name)
        if self.tool_choice is not None:
            self._check_choice(self.tool_choice, names)
        if self.continue_final_message:
            self._check_continued(messages)

    def _check_choice(self, wanted: ToolChoice, names: Collection[str]) -> None:
        """Check that `tool_choice` names only tools in `names`, the tools that this server can call."""
        left_out = [tool for tool in self.tools if isinstance(tool, LeftOutTool)]
        if wanted.mode == "required" and not names:
            kinds = ", ".join(dict.fromkeys(shown(tool.type) for tool in left_out[:MAX_WARNINGS]))
            why = f" that this server runs: it does not run {kinds}" if kinds else ""
            raise _wrong("tool_choice", f"needs tools, and there are none{why}")
        for name in wanted.names or ():
            if name in names:
                continue
            kind = next((tool.type for tool in left_out if name in (tool.name, tool.type)), None)
            if kind is not None:
                why = f"{shown(name)} is a tool of type {shown(kind)}, which this server does not run; choose another"
                raise _wrong("tool_choice", why)
            raise _wrong("tool_choice", f"{shown(name)} is none of the tools")

    def _check_continued(self, messages: Sequence[ChatMessage]) -> None:
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise _wrong(
                "continue_final_message", "contradicts add_generation_prompt: true; send false, or leave it out"
            )
        if messages[-1].role != "assistant" or not messages[-1].content or messages[-1].tool_calls:
            raise _wrong("continue_final_message", "the last message must be an assistant's, with text and no calls")


def _wrong(name: str, message: str) -> ApiError:
    return ApiError(f"{name}: {message}", param=name, code="invalid_value")
