"""Bad bodies of /v1/responses and /v1/messages: what is wrong, which field is named, and words of the message."""

from typing import Any

from tests.api.scripted import CONTEXT

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
MINE = {"name": "f", "input_schema": {"type": "object"}}
Table = dict[str, tuple[dict[str, Any], str, str]]


def said(*parts: Any) -> dict[str, Any]:
    return {"input": [*HI, {"role": "user", "content": [*parts]}]}


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*HI, {"role": role, "content": [*content]}, *HI]}


# name: (fields that replace those of a good request, the field that is named, words of the message)
OF_RESPONSES: Table = {
    "no input": ({"input": None}, "input", "required"),
    "input is a number": ({"input": 5}, "input", "must be a string or a list of items, got 5"),
    "input is empty": ({"input": []}, "input", "must not be empty"),
    "input is half a character": ({"input": "a\ud800"}, "input", "half of a surrogate pair"),
    "input beyond the context": ({"input": "x" * 600}, "input", f"maximum context length is {CONTEXT}"),
    "an item is a string": ({"input": ["hi"]}, "input.0", "must be an object, got 'hi'"),
    "an item without a type": ({"input": [{"a": 1}]}, "input.0.type", "None is not supported"),
    "an item of a strange type": ({"input": [{"type": []}]}, "input.0.type", "items may be message, function_call"),
    "an item that was compacted": ({"input": [{"type": "compaction", "id": "w"}]}, "input.0.type", "items may be"),
    "a reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type", "send the item itself"),
    "a bare reference": ({"input": [{"id": "msg_1"}]}, "input.0.type", "nothing is stored here"),
    "a message of no role": ({"input": [{"type": "message", "content": "x"}]}, "input.0.role", "required"),
    "a message of a strange role": ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "must be 'user'"),
    "a message without content": ({"input": [*HI, {"role": "user"}]}, "input.1.content", "required"),
    "an image": (said({"type": "input_image", "image_url": "x"}), "input.1.content", "reads text, not 'input_image'"),
    "a file": (said({"type": "input_file", "file_id": "x"}), "input.1.content", "reads text, not 'input_file'"),
    "a part without text": (said({"type": "input_text"}), "input.1.content", "text must be a string, got None"),
    "the template refuses": ({"input": "refuse"}, "input", "no refuse here"),
    "a call without an id": ({"input": [{**CALL, "call_id": None}]}, "input.0.call_id", "must be a string"),
    "a call without arguments": ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments", "must be a string"),
    "arguments that are no JSON": ({"input": [*HI, {**CALL, "arguments": "{"}]}, "input.1.arguments", "a JSON object"),
    "a result without a call": (
        {"input": [*HI, {"type": "function_call_output", "call_id": "", "output": "x"}]}, "input.1.call_id", "required",
    ),
    "a result that is an image": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input.0.output", "reads text",
    ),
    "encrypted thoughts": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
        "input.0.encrypted_content", "encrypted elsewhere",
    ),
    "thoughts of another type": ({"input": [{"type": "reasoning", "content": 5}]}, "input.0.content", "got 5"),
    "instructions of another type": ({"instructions": 5}, "instructions", "must be a string"),
    "max_output_tokens is zero": ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1, got 0"),
    "max_output_tokens is huge": ({"max_output_tokens": 10**9}, "max_output_tokens", "ask for at most"),
    "temperature": ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    "top_p": ({"top_p": 2}, "top_p", "less than or equal to 1"),
    "an extension": ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    "tools are an object": ({"tools": TOOL}, "tools", "must be a list"),
    "a tool is a string": ({"tools": ["f"]}, "tools.0", "must be an object"),
    "a custom tool without a name": ({"tools": [{"type": "custom"}]}, "tools.0.name", "required"),
    "a custom tool's grammar": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}]},
        "tools.0.format.syntax", "must be 'lark' or 'regex'",
    ),
    "a custom tool's empty grammar": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]},
        "tools.0.format.definition", "required",
    ),
    "a namespace without tools": ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools", "required"),
    "a tool of a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "tools.0.tools.0.name", "required",
    ),
    "two tools of a name in a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}]},
        "tools.0.tools.1.name", "the name of another tool",
    ),
    "a tool of chats": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "required"),
    "a tool's wrong name": ({"tools": [{**TOOL, "name": "f g"}]}, "tools.0.name", "1 to 128 letters"),
    "two tools of a name": ({"tools": [TOOL, TOOL]}, "tools.1.name", "the name of another tool"),
    "parameters that are no object": (
        {"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools.0.parameters", "the schema of an object",
    ),
    "half a character in a tool": (
        {"tools": [{**TOOL, "parameters": {"type": "object", "title": "\ud800"}}]}, "tools.0.parameters", "surrogate",
    ),
    "too many tools": ({"tools": [{**TOOL, "name": f"f{at}"} for at in range(257)]}, "tools", "at most 256, got 257"),
    "a choice that is a number": ({"tool_choice": 5}, "tool_choice", "must be a string or an object, got 5"),
    "a choice of another word": ({"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required'"),
    "a choice of a hosted tool": ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "is not supported"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "a choice of no tool there is": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g' is none of the tools",
    ),
    "a choice without a name": ({"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
    "a choice without tools that are called": (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "it does not run 'web_search'",
    ),
    "a choice among several namespaces": (
        {
            "tools": [{"type": "namespace", "name": name, "tools": [TOOL]} for name in "ab"],
            "tool_choice": {"type": "function", "name": "f"},
        },
        "tool_choice", "a.f, b.f",
    ),
    "a form of another type": ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be one of"),
    "a form without a schema": ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
    "a schema that is not honoured": (
        {"text": {"format": {"type": "json_schema", "name": "p", "schema": {"type": "zork"}}}},
        "text.format.schema", "type must be one",
    ),
    "a verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity", "must be 'medium', got 'low'"),
    "text of an unknown field": ({"text": {"tone": "low"}}, "text.tone", "unknown field"),
    "a summary": ({"reasoning": {"summary": "long"}}, "reasoning.summary", "must be 'auto'"),
    "an effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be 'none'"),
    "something to include": ({"include": ["everything"]}, "include.0", "must be"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    "too many top_logprobs": (
        {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "at most 20",
    ),
    "metadata of numbers": ({"metadata": {"a": 5}}, "metadata.a", "must be a string"),
    "much metadata": ({"metadata": {str(at): "x" for at in range(17)}}, "metadata", "at most 16 items"),
    "stream options without a stream": ({"stream_options": {}}, "stream_options", "only allowed when stream"),
    "usage in the stream": (
        {"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "unknown field",
    ),
    "stored": ({"store": True}, "store", "nothing is stored here"),
    "the response before": ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier input"),
    "in the background": ({"background": True}, "background", "leave it out"),
    "truncated": ({"truncation": "auto"}, "truncation", "no item is ever dropped"),
    "a chat's length": ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    "a chat's messages": ({"messages": HI}, "messages", "this endpoint takes input"),
    "two forms": ({"regex": "a", "text": {"format": {"type": "json_object"}}}, "regex", "send one of them"),
}  # fmt: skip

OF_MESSAGES: Table = {
    "no messages": ({"messages": None}, "messages", "required"),
    "messages are a string": ({"messages": "hi"}, "messages", "must be a list, got 'hi'"),
    "messages are empty": ({"messages": []}, "messages", "must not be empty"),
    "a message is a string": ({"messages": ["hi"]}, "messages.0", "must be an object"),
    "a message of a strange role": ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role", "must be"),
    "a message without content": ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "got 5"),
    "messages beyond the context": (
        {"messages": [{"role": "user", "content": "x" * 600}]}, "messages", f"maximum context length is {CONTEXT}",
    ),
    "the template refuses": ({"messages": [{"role": "user", "content": "refuse"}]}, "messages", "no refuse here"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens", "required"),
    "max_tokens is zero": ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "max_tokens is huge": ({"max_tokens": 10**9}, "max_tokens", "ask for at most"),
    "a block is a string": (blocks("x"), "messages.1.content.0", "must be an object"),
    "an image": (blocks({"type": "image", "source": {}}), "messages.1.content.0.type", "'image' is not supported"),
    "a document": (blocks({"type": "document"}), "messages.1.content.0.type", "send the document's text"),
    "a text without text": (blocks({"type": "text"}), "messages.1.content.0.text", "required"),
    "half a character": (blocks({"type": "text", "text": "\ud800"}), "messages.1.content.0.text", "surrogate"),
    "a use of a tool by the user": (blocks(USE), "messages.1.content.0.type", "role user may have text, tool_result"),
    "a result by the assistant": (
        blocks({"type": "tool_result", "tool_use_id": "t"}, role="assistant"), "messages.1.content.0.type", "may have",
    ),
    "hidden thoughts": (
        blocks({"type": "redacted_thinking", "data": "x"}, role="assistant"), "messages.1.content.0.type", "elsewhere",
    ),
    "a use without an input": (
        blocks({**USE, "input": "x"}, role="assistant"), "messages.1.content.0.input", "must be an object",
    ),
    "a result without a use": (
        blocks({"type": "tool_result", "tool_use_id": ""}), "messages.1.content.0.tool_use_id", "required",
    ),
    "an image as a result": (
        blocks({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        "messages.1.content.0.content", "reads text, not 'image'",
    ),
    "a use to go on from": (
        {"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages.1", "must be an assistant's, with text",
    ),
    "a system of numbers": ({"system": 5}, "system", "got 5"),
    "a system of images": ({"system": [{"type": "image"}]}, "system", "reads text, not 'image'"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences", "an empty string would stop everything"),
    "too many stops": ({"stop_sequences": [*map(str, range(65))]}, "stop_sequences", "at most 64 strings, got 65"),
    "a stop of a number": ({"stop_sequences": [5]}, "stop_sequences.0", "must be a string"),
    "a stop that is no list": ({"stop_sequences": "x"}, "stop_sequences", "must be a list"),
    "temperature": ({"temperature": "hot"}, "temperature", "must be a number"),
    "top_k": ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    "a choice of a server's tool": (
        {
            "tools": [MINE, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "tool_choice", "'web_search' is a tool of type 'web_search_20250305', which this server does not run",
    ),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "required"),
    "a tool of an array": (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema", "schema of an object",
    ),
    "a tool's wrong name": ({"tools": [{**MINE, "name": "f g"}]}, "tools.0.name", "1 to 128 letters"),
    "tools are a string": ({"tools": "f"}, "tools", "must be a list"),
    "a choice that is a word": ({"tool_choice": "auto"}, "tool_choice", "must be an object"),
    "a choice of another type": ({"tool_choice": {"type": "function"}}, "tool_choice.type", "must be 'auto'"),
    "a choice without a name": ({"tools": [MINE], "tool_choice": {"type": "tool"}}, "tool_choice", "needs a name"),
    "a choice of no tool there is": (
        {"tools": [MINE], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "'g' is none of the tools",
    ),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    "thinking of another type": ({"thinking": {"type": "on"}}, "thinking.type", "must be 'enabled'"),
    "a budget of nothing": (
        {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "greater than or equal to 1",
    ),
    "a form of another type": (
        {"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "must be 'json_schema'",
    ),
    "a schema that is not honoured": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "zork"}}}},
        "output_config.format.schema", "type must be one",
    ),
    "an effort": ({"output_config": {"effort": "huge"}}, "output_config.effort", "must be 'low'"),
    "a chat's stop": ({"stop": "x"}, "stop", "use stop_sequences"),
    "servers to ask": ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "run them in the client"),
    "fast": ({"speed": "fast"}, "speed", "all requests are served alike"),
}  # fmt: skip
