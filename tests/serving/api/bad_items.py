"""Requests to /v1/responses and /v1/messages with one bad field, as two tables."""

from typing import Any

from tests.serving.api.scripted import CONTEXT

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object"}}
Table = dict[str, tuple[dict[str, Any], str, str]]


def parts(*content_parts: Any) -> dict[str, Any]:
    """The fields of a response request whose last user message has these content parts."""
    return {"input": [*HI, {"role": "user", "content": [*content_parts]}]}


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    """The fields of a message request whose second message has these content blocks."""
    return {"messages": [*HI, {"role": role, "content": [*content]}, *HI]}


# name: (fields that replace those of a valid request, the field that the error names, a part of the error's message)
OF_RESPONSES: Table = {
    "no input": ({"input": None}, "input", "required"),
    "input is a number": ({"input": 5}, "input", "must be a string or a list of items, got 5"),
    "input is empty": ({"input": []}, "input", "must not be empty"),
    "input with half a surrogate pair": ({"input": "a\ud800"}, "input", "half of a surrogate pair"),
    "input longer than the context": ({"input": "x" * 600}, "input", f"maximum context length is {CONTEXT}"),
    "an item is a string": ({"input": ["hi"]}, "input.0", "must be an object, got 'hi'"),
    "an item without a type": ({"input": [{"a": 1}]}, "input.0.type", "None is not supported"),
    "an item type is a list": ({"input": [{"type": []}]}, "input.0.type", "items may be message, function_call"),
    "a compaction item": ({"input": [{"type": "compaction", "id": "w"}]}, "input.0.type", "items may be"),
    "an item_reference": (
        {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type", "send the item itself",
    ),
    "an item with only an id": ({"input": [{"id": "msg_1"}]}, "input.0.type", "nothing is stored here"),
    "a message without a role": ({"input": [{"type": "message", "content": "x"}]}, "input.0.role", "required"),
    "a message of an unknown role": ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "must be 'user'"),
    "a message without content": ({"input": [*HI, {"role": "user"}]}, "input.1.content", "required"),
    "an image": (parts({"type": "input_image", "image_url": "x"}), "input.1.content", "reads text, not 'input_image'"),
    "a file": (parts({"type": "input_file", "file_id": "x"}), "input.1.content", "reads text, not 'input_file'"),
    "a part without text": (parts({"type": "input_text"}), "input.1.content", "text must be a string, got None"),
    "the template refuses": ({"input": "refuse"}, "input", "no refuse here"),
    "a call without call_id": ({"input": [{**CALL, "call_id": None}]}, "input.0.call_id", "must be a string"),
    "call arguments are an object": ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments", "must be a string"),
    "call arguments are no JSON": ({"input": [*HI, {**CALL, "arguments": "{"}]}, "input.1.arguments", "a JSON object"),
    "a call output without call_id": (
        {"input": [*HI, {"type": "function_call_output", "call_id": "", "output": "x"}]}, "input.1.call_id", "required",
    ),
    "a call output that is an image": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input.0.output", "reads text",
    ),
    "encrypted reasoning": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
        "input.0.encrypted_content", "encrypted elsewhere",
    ),
    "reasoning content is a number": ({"input": [{"type": "reasoning", "content": 5}]}, "input.0.content", "got 5"),
    "instructions is a number": ({"instructions": 5}, "instructions", "must be a string"),
    "max_output_tokens is zero": ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1, got 0"),
    "max_output_tokens is huge": ({"max_output_tokens": 10**9}, "max_output_tokens", "ask for at most"),
    "temperature is negative": ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    "top_p is above one": ({"top_p": 2}, "top_p", "less than or equal to 1"),
    "top_k is -2": ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    "tools are an object": ({"tools": TOOL}, "tools", "must be a list"),
    "a tool is a string": ({"tools": ["f"]}, "tools.0", "must be an object"),
    "a custom tool without a name": ({"tools": [{"type": "custom"}]}, "tools.0.name", "required"),
    "a custom tool's unknown grammar syntax": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}]},
        "tools.0.format.syntax", "must be 'lark' or 'regex'",
    ),
    "a custom tool's grammar without a definition": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]},
        "tools.0.format.definition", "required",
    ),
    "a namespace without tools": ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools", "required"),
    "a namespace's tool without a name": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "tools.0.tools.0.name", "required",
    ),
    "two tools of a namespace with the same name": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}]},
        "tools.0.tools.1.name", "the name of another tool",
    ),
    "a chat's tool": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "required"),
    "a tool name with a space": ({"tools": [{**TOOL, "name": "f g"}]}, "tools.0.name", "1 to 128 letters"),
    "two tools with the same name": ({"tools": [TOOL, TOOL]}, "tools.1.name", "the name of another tool"),
    "tool parameters of type array": (
        {"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools.0.parameters", "the schema of an object",
    ),
    "half a surrogate pair in a tool": (
        {"tools": [{**TOOL, "parameters": {"type": "object", "title": "\ud800"}}]}, "tools.0.parameters", "surrogate",
    ),
    "too many tools": ({"tools": [{**TOOL, "name": f"f{at}"} for at in range(257)]}, "tools", "at most 256, got 257"),
    "tool_choice is a number": ({"tool_choice": 5}, "tool_choice", "must be a string or an object, got 5"),
    "an unknown tool_choice string": ({"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required'"),
    "tool_choice of file_search": ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "is not supported"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "tool_choice of an unknown tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g' is none of the tools",
    ),
    "tool_choice without a name": ({"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
    "tool_choice is required with only hosted tools": (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "it does not run 'web_search'",
    ),
    "tool_choice that fits two namespaces": (
        {
            "tools": [{"type": "namespace", "name": name, "tools": [TOOL]} for name in "ab"],
            "tool_choice": {"type": "function", "name": "f"},
        },
        "tool_choice", "a.f, b.f",
    ),
    "an unknown format type": ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be one of"),
    "a format without a schema": ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
    "a schema with an unknown type": (
        {"text": {"format": {"type": "json_schema", "name": "p", "schema": {"type": "zork"}}}},
        "text.format.schema", "type must be one",
    ),
    "verbosity is low": ({"text": {"verbosity": "low"}}, "text.verbosity", "must be 'medium', got 'low'"),
    "an unknown field of text": ({"text": {"tone": "low"}}, "text.tone", "unknown field"),
    "an unknown reasoning summary": ({"reasoning": {"summary": "long"}}, "reasoning.summary", "must be 'auto'"),
    "an unknown effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be 'none'"),
    "an unknown include": ({"include": ["everything"]}, "include.0", "must be"),
    "top_logprobs without include": ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    "too many top_logprobs": (
        {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "at most 20",
    ),
    "a metadata value is a number": ({"metadata": {"a": 5}}, "metadata.a", "must be a string"),
    "too many metadata items": ({"metadata": {str(at): "x" for at in range(17)}}, "metadata", "at most 16 items"),
    "stream options without a stream": ({"stream_options": {}}, "stream_options", "only allowed when stream"),
    "include_usage in stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "unknown field",
    ),
    "store is true": ({"store": True}, "store", "nothing is stored here"),
    "previous_response_id": ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier input"),
    "background is true": ({"background": True}, "background", "leave it out"),
    "truncation is auto": ({"truncation": "auto"}, "truncation", "no item is ever dropped"),
    "max_tokens, a chat's field": ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    "messages, a chat's field": ({"messages": HI}, "messages", "this endpoint takes input"),
    "two formats": ({"regex": "a", "text": {"format": {"type": "json_object"}}}, "regex", "send one of them"),
}  # fmt: skip

OF_MESSAGES: Table = {
    "no messages": ({"messages": None}, "messages", "required"),
    "messages are a string": ({"messages": "hi"}, "messages", "must be a list, got 'hi'"),
    "messages are empty": ({"messages": []}, "messages", "must not be empty"),
    "a message is a string": ({"messages": ["hi"]}, "messages.0", "must be an object"),
    "a message of role tool": ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role", "must be"),
    "a message without content": ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "got 5"),
    "messages longer than the context": (
        {"messages": [{"role": "user", "content": "x" * 600}]}, "messages", f"maximum context length is {CONTEXT}",
    ),
    "the template refuses": ({"messages": [{"role": "user", "content": "refuse"}]}, "messages", "no refuse here"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens", "required"),
    "max_tokens is zero": ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "max_tokens is huge": ({"max_tokens": 10**9}, "max_tokens", "ask for at most"),
    "a block is a string": (blocks("x"), "messages.1.content.0", "must be an object"),
    "an image": (blocks({"type": "image", "source": {}}), "messages.1.content.0.type", "'image' is not supported"),
    "a document": (blocks({"type": "document"}), "messages.1.content.0.type", "send the document's text"),
    "a text block without text": (blocks({"type": "text"}), "messages.1.content.0.text", "required"),
    "half a surrogate pair": (blocks({"type": "text", "text": "\ud800"}), "messages.1.content.0.text", "surrogate"),
    "a tool_use block of the user": (
        blocks(TOOL_USE), "messages.1.content.0.type", "role user may have text, tool_result",
    ),
    "a tool_result block of the assistant": (
        blocks({"type": "tool_result", "tool_use_id": "t"}, role="assistant"), "messages.1.content.0.type", "may have",
    ),
    "a redacted_thinking block": (
        blocks({"type": "redacted_thinking", "data": "x"}, role="assistant"), "messages.1.content.0.type", "elsewhere",
    ),
    "the input of a tool_use block is a string": (
        blocks({**TOOL_USE, "input": "x"}, role="assistant"), "messages.1.content.0.input", "must be an object",
    ),
    "a tool_result block without tool_use_id": (
        blocks({"type": "tool_result", "tool_use_id": ""}), "messages.1.content.0.tool_use_id", "required",
    ),
    "a tool_result block with an image": (
        blocks({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        "messages.1.content.0.content", "reads text, not 'image'",
    ),
    "the last message ends with a tool_use block": (
        {"messages": [*HI, {"role": "assistant", "content": [TOOL_USE]}]},
        "messages.1", "must be an assistant's, with text",
    ),
    "system is a number": ({"system": 5}, "system", "got 5"),
    "system with an image": ({"system": [{"type": "image"}]}, "system", "reads text, not 'image'"),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences", "an empty string would stop everything"),
    "too many stop sequences": (
        {"stop_sequences": [*map(str, range(65))]}, "stop_sequences", "at most 64 strings, got 65",
    ),
    "a stop sequence is a number": ({"stop_sequences": [5]}, "stop_sequences.0", "must be a string"),
    "stop_sequences is a string": ({"stop_sequences": "x"}, "stop_sequences", "must be a list"),
    "temperature is a string": ({"temperature": "hot"}, "temperature", "must be a number"),
    "top_k is -2": ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    "tool_choice of a hosted tool": (
        {
            "tools": [MESSAGES_TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "tool_choice", "'web_search' is a tool of type 'web_search_20250305', which this server does not run",
    ),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "required"),
    "input_schema of type array": (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema", "schema of an object",
    ),
    "a tool name with a space": ({"tools": [{**MESSAGES_TOOL, "name": "f g"}]}, "tools.0.name", "1 to 128 letters"),
    "tools are a string": ({"tools": "f"}, "tools", "must be a list"),
    "tool_choice is a string": ({"tool_choice": "auto"}, "tool_choice", "must be an object"),
    "an unknown tool_choice type": ({"tool_choice": {"type": "function"}}, "tool_choice.type", "must be 'auto'"),
    "tool_choice without a name": (
        {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", "needs a name",
    ),
    "tool_choice of an unknown tool": (
        {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice", "'g' is none of the tools",
    ),
    "tool_choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    "an unknown thinking type": ({"thinking": {"type": "on"}}, "thinking.type", "must be 'enabled'"),
    "a thinking budget of zero": (
        {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "greater than or equal to 1",
    ),
    "an unknown format type": (
        {"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "must be 'json_schema'",
    ),
    "a schema with an unknown type": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "zork"}}}},
        "output_config.format.schema", "type must be one",
    ),
    "an unknown effort": ({"output_config": {"effort": "huge"}}, "output_config.effort", "must be 'low'"),
    "stop, a chat's field": ({"stop": "x"}, "stop", "use stop_sequences"),
    "mcp_servers": ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "run them in the client"),
    "speed is fast": ({"speed": "fast"}, "speed", "all requests are served alike"),
}  # fmt: skip
