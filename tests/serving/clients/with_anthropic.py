"""The official `anthropic` client: messages, streamed and not streamed; tools; and `count_tokens`."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none")
messages = [{"role": "user", "content": "import os"}]
full_message = client.messages.create(model=model, max_tokens=24, messages=messages, extra_body={"seed": 7})
with client.messages.stream(model=model, max_tokens=24, messages=messages, extra_body={"seed": 7}) as stream:
    assert "".join(stream.text_stream) == full_message.content[0].text
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
tool = {"name": "get_weather", "description": "The weather", "input_schema": schema}
tool_message = client.messages.create(
    model=model,
    max_tokens=200,
    messages=messages,
    tools=[tool],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
    extra_body={"seed": 3},
)
assert tool_message.stop_reason == "tool_use" and tool_message.content[-1].input.keys() == {"city"}
# The model calls the tool that tool_choice names once. The server leaves out a tool that Anthropic would run itself,
# and sends a warning.
raw_response = client.messages.with_raw_response.create(
    model=model,
    max_tokens=200,
    messages=messages,
    tools=[tool, {"type": "web_search_20250305", "name": "web_search"}],
    tool_choice={"type": "tool", "name": "get_weather"},
    extra_body={"seed": 3},
)
assert "web_search" in raw_response.headers["x-aerie-warning"], raw_response.headers
(block,) = raw_response.parse().content
assert block.type == "tool_use" and block.input.keys() == {"city"}, block
input_token_count = client.messages.count_tokens(model=model, messages=messages).input_tokens
assert input_token_count == full_message.usage.input_tokens + (full_message.usage.cache_read_input_tokens or 0)
print("messages, tools, a tool by name, count_tokens; whole and streamed")
