"""The official `anthropic` client: messages and tools, whole and streamed, and tokens counted."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none")
messages = [{"role": "user", "content": "import os"}]
whole = client.messages.create(model=model, max_tokens=24, messages=messages, extra_body={"seed": 7})
with client.messages.stream(model=model, max_tokens=24, messages=messages, extra_body={"seed": 7}) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
tool = {"name": "get_weather", "description": "The weather", "input_schema": schema}
called = client.messages.create(
    model=model,
    max_tokens=200,
    messages=messages,
    tools=[tool],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
    extra_body={"seed": 3},
)
assert called.stop_reason == "tool_use" and called.content[-1].input.keys() == {"city"}
# A tool that tool_choice names is called once; a tool that Anthropic would run is left out with a warning.
named = client.messages.with_raw_response.create(
    model=model,
    max_tokens=200,
    messages=messages,
    tools=[tool, {"type": "web_search_20250305", "name": "web_search"}],
    tool_choice={"type": "tool", "name": "get_weather"},
    extra_body={"seed": 3},
)
assert "web_search" in named.headers["x-aerie-warning"], named.headers
(block,) = named.parse().content
assert block.type == "tool_use" and block.input.keys() == {"city"}, block
counted = client.messages.count_tokens(model=model, messages=messages).input_tokens
assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
print("messages, tools, a tool by name, count_tokens; whole and streamed")
