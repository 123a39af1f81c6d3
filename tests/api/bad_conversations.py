"""Bad fields of conversations by name: path, fields that replace those of a good request, param, words said of it."""

from typing import Any

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def named(function: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def called(role: str = "assistant", **function: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "", "tool_calls": [{"function": {"name": "f", **function}}]}]}


def chosen(choice: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": choice}


ARRAY = {"type": "array"}
ARGUMENTS = "messages.0.tool_calls.0.function.arguments"
CONVERSATIONS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "tool calls in a message": (
        CHAT,
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls.0.function",
        "required",
    ),
    "a tool without a function": (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    "a tool without a type": (CHAT, {"tools": [{"function": {"name": "f"}}]}, "tools.0.type", "required"),
    "a custom tool without a name": (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name", "req"),
    "a custom tool's grammar": (
        CHAT,
        {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
        "tools.0.custom.format.grammar",
        "required",
    ),
    "a choice of a tool that is not run": (
        CHAT,
        chosen({"type": "web_search"}),
        "tool_choice",
        "tools of type 'web_search' are not run by this server",
    ),
    "a tool's name": (CHAT, named({"name": "a b"}), "tools.0.function.name", "must be 1"),
    "a tool of a list": (CHAT, named({"name": "f", "parameters": ARRAY}), "tools.0.function.parameters", "an object"),
    "tools of one name": (CHAT, {"tools": [TOOL, TOOL]}, "tools.1.function.name", "is the name of another tool"),
    "too many tools": (CHAT, {"tools": [TOOL] * 257}, "tools", "at most 256"),
    "tools for a completion": (COMPLETE, {"tools": [TOOL]}, "tools", "not supported"),
    "tool_choice": (CHAT, chosen("any"), "tool_choice", "must be one of auto, none, required"),
    "tool_choice of a number": (CHAT, chosen(1), "tool_choice", "must be one of auto, none, required"),
    "tool_choice without tools": (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    "tool_choice of an unknown tool": (
        CHAT,
        chosen({"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "'g' is none of the tools",
    ),
    "a named tool without a name": (CHAT, chosen({"type": "function", "name": "f"}), "tool_choice", "must name a tool"),
    "allowed tools of no mode": (
        CHAT,
        chosen({"type": "allowed_tools", "allowed_tools": {"tools": []}}),
        "tool_choice",
        "must have the mode auto or required",
    ),
    "functions": (CHAT, {"functions": [{"name": "f"}]}, "functions", "use tools"),
    "function_call": (CHAT, {"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
    "chat_template": (CHAT, {"chat_template": "{{ x }}"}, "chat_template", "the model's own is used"),
    "role function": (CHAT, {"messages": [{"role": "function", "content": "1"}]}, "messages.0.role", "as role tool"),
    "no tool_call_id": (CHAT, {"messages": [{"role": "tool", "content": "1"}]}, "messages.0.tool_call_id", "required"),
    "a call by a user": (CHAT, called("user"), "messages.0.tool_calls", "only a message of role assistant"),
    "a call of no JSON": (CHAT, called(arguments="{"), ARGUMENTS, "must be a JSON object"),
    "a call of no object": (CHAT, called(arguments="[]"), ARGUMENTS, "must be a JSON object"),
    "a call that is nested too deeply": (CHAT, called(arguments="[" * 99_999), ARGUMENTS, "must be a JSON object"),
    "a user's thought": (
        CHAT,
        {"messages": [{"role": "user", "content": "1", "reasoning_content": "x"}]},
        "messages.0.reasoning_content",
        "only a message of role assistant",
    ),
    "a user's message to be continued": (CHAT, {"continue_final_message": True}, "continue_final_message", "the last"),
    "continued and begun": (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "contradicts add_generation_prompt",
    ),
}
# Of these, what no schema of a body can say.
BEYOND_A_SCHEMA = {
    "a tool of a list",
    "tools of one name",
    "tool_choice without tools",
    "a custom tool's grammar",
    "a choice of a tool that is not run",
    "tool_choice of an unknown tool",
    "tool_choice of a number",
    "a named tool without a name",
    "allowed tools of no mode",
    "content is null",
    "a message without content",
    "no tool_call_id",
    "a call by a user",
    "a call of no JSON",
    "a call of no object",
    "a call that is nested too deeply",
    "a user's thought",
    "a user's message to be continued",
    "continued and begun",
}
