"""Chat and completion requests with one bad field, as a table for `tests/serving/api/test_bad_input.py`."""

from typing import Any

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def function_tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def tool_call(role: str = "assistant", **function: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "", "tool_calls": [{"function": {"name": "f", **function}}]}]}


def tool_choice(choice: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": choice}


ARRAY = {"type": "array"}
ARGUMENTS = "messages.0.tool_calls.0.function.arguments"
# name: (path, fields that replace those of a valid request, the error's param, a part of the error's message)
CONVERSATIONS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a tool call without a function": (
        CHAT,
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls.0.function",
        "required",
    ),
    "a tool without a function": (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    "a tool without a type": (CHAT, {"tools": [{"function": {"name": "f"}}]}, "tools.0.type", "required"),
    "a custom tool without a name": (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name", "req"),
    "a custom tool's format without its grammar": (
        CHAT,
        {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
        "tools.0.custom.format.grammar",
        "required",
    ),
    "tool_choice of a hosted tool": (
        CHAT,
        tool_choice({"type": "web_search"}),
        "tool_choice",
        "tools of type 'web_search' are not run by this server",
    ),
    "a tool name with a space": (CHAT, function_tool({"name": "a b"}), "tools.0.function.name", "must be 1"),
    "tool parameters of type array": (
        CHAT,
        function_tool({"name": "f", "parameters": ARRAY}),
        "tools.0.function.parameters",
        "an object",
    ),
    "two tools with the same name": (
        CHAT,
        {"tools": [TOOL, TOOL]},
        "tools.1.function.name",
        "is the name of another tool",
    ),
    "too many tools": (CHAT, {"tools": [TOOL] * 257}, "tools", "at most 256"),
    "tools in a completion": (COMPLETE, {"tools": [TOOL]}, "tools", "not supported"),
    "an unknown tool_choice string": (CHAT, tool_choice("any"), "tool_choice", "must be one of auto, none, required"),
    "tool_choice is a number": (CHAT, tool_choice(1), "tool_choice", "must be one of auto, none, required"),
    "tool_choice without tools": (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    "tool_choice of an unknown tool": (
        CHAT,
        tool_choice({"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "'g' is none of the tools",
    ),
    "tool_choice without function.name": (
        CHAT,
        tool_choice({"type": "function", "name": "f"}),
        "tool_choice",
        "must name a tool",
    ),
    "allowed_tools without a mode": (
        CHAT,
        tool_choice({"type": "allowed_tools", "allowed_tools": {"tools": []}}),
        "tool_choice",
        "must have the mode auto or required",
    ),
    "functions": (CHAT, {"functions": [{"name": "f"}]}, "functions", "use tools"),
    "function_call": (CHAT, {"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
    "chat_template": (CHAT, {"chat_template": "{{ x }}"}, "chat_template", "the model's own is used"),
    "role function": (CHAT, {"messages": [{"role": "function", "content": "1"}]}, "messages.0.role", "as role tool"),
    "no tool_call_id": (CHAT, {"messages": [{"role": "tool", "content": "1"}]}, "messages.0.tool_call_id", "required"),
    "tool_calls of a user": (CHAT, tool_call("user"), "messages.0.tool_calls", "only a message of role assistant"),
    "call arguments that are no JSON": (CHAT, tool_call(arguments="{"), ARGUMENTS, "must be a JSON object"),
    "call arguments that are a list": (CHAT, tool_call(arguments="[]"), ARGUMENTS, "must be a JSON object"),
    "deeply nested call arguments": (CHAT, tool_call(arguments="[" * 99_999), ARGUMENTS, "must be a JSON object"),
    "reasoning_content of a user": (
        CHAT,
        {"messages": [{"role": "user", "content": "1", "reasoning_content": "x"}]},
        "messages.0.reasoning_content",
        "only a message of role assistant",
    ),
    "continue_final_message of a user": (CHAT, {"continue_final_message": True}, "continue_final_message", "the last"),
    "continue_final_message with add_generation_prompt": (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "contradicts add_generation_prompt",
    ),
}
# Names of the chat cases that the request's JSON schema accepts, because a schema cannot express the rule. Two of the
# names, "content is null" and "a message without content", are cases of `tests/serving/api/test_bad_input.py`.
ACCEPTED_BY_SCHEMA = {
    "tool parameters of type array",
    "two tools with the same name",
    "tool_choice without tools",
    "a custom tool's format without its grammar",
    "tool_choice of a hosted tool",
    "tool_choice of an unknown tool",
    "tool_choice without function.name",
    "allowed_tools without a mode",
    "content is null",
    "a message without content",
    "no tool_call_id",
    "tool_calls of a user",
    "call arguments that are no JSON",
    "call arguments that are a list",
    "deeply nested call arguments",
    "reasoning_content of a user",
    "continue_final_message of a user",
    "continue_final_message with add_generation_prompt",
}
