"""The official `openai` client: chat, tools, structured parse, responses, streaming of all."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")


class Person(BaseModel):
    """The model that the structured outputs must fit."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)
    mood: Literal["fine", "tired"]


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "import os"}]

full_completion = client.chat.completions.create(model=model, messages=messages, max_tokens=24, seed=7)
chunks = client.chat.completions.create(model=model, messages=messages, max_tokens=24, seed=7, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == full_completion.choices[0].message.content, (text, full_completion)

tool_request = {
    "model": model,
    "messages": messages,
    "tools": [TOOL],
    "tool_choice": "required",
    "max_tokens": 200,
    "seed": 3,
}
tool_request["parallel_tool_calls"] = False
tool_completion = client.chat.completions.create(**tool_request)
call = tool_completion.choices[0].message.tool_calls[0]
assert tool_completion.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather"
assert json.loads(call.function.arguments)["unit"] in ("C", "F")
deltas = [
    chunk.choices[0].delta for chunk in client.chat.completions.create(**tool_request, stream=True) if chunk.choices
]
streamed_arguments = "".join(c.function.arguments or "" for part in deltas for c in part.tool_calls or ())
assert streamed_arguments == call.function.arguments, (streamed_arguments, call)
messages_with_tool_result = [
    *messages,
    {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
client.chat.completions.create(
    model=model, messages=messages_with_tool_result, tools=[TOOL], tool_choice="none", max_tokens=8
)

parsed = client.chat.completions.parse(model=model, messages=messages, response_format=Person, max_tokens=200, seed=5)
assert isinstance(parsed.choices[0].message.parsed, Person)

response = client.responses.create(model=model, input="import os", max_output_tokens=24, extra_body={"seed": 7})
assert response.output_text == text, (response.output_text, text)
with client.responses.stream(model=model, input="import os", max_output_tokens=24, extra_body={"seed": 7}) as stream:
    events = list(stream)
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
assert events[-1].type in ("response.completed", "response.incomplete") and events[-1].response.output_text == text
structured = client.responses.parse(
    model=model, input="import os", text_format=Person, max_output_tokens=200, extra_body={"seed": 5}
)
assert isinstance(structured.output_parsed, Person)
responses_tool = {"type": "function", **TOOL["function"], "strict": True}
tool_response = client.responses.create(
    model=model,
    input="import os",
    tools=[responses_tool],
    tool_choice="required",
    parallel_tool_calls=False,
    max_output_tokens=200,
    extra_body={"seed": 3},
)
assert any(item.type == "function_call" for item in tool_response.output)

# The model calls the function that tool_choice names once.
named_tool = {"type": "function", "function": {"name": "get_weather"}}
single_call = client.chat.completions.create(
    model=model, messages=messages, tools=[TOOL], tool_choice=named_tool, max_tokens=200, seed=3
)
assert len(single_call.choices[0].message.tool_calls) == 1 and single_call.choices[0].finish_reason == "tool_calls", (
    single_call
)
single_call = client.responses.create(
    model=model,
    input="import os",
    tools=[responses_tool],
    tool_choice={"type": "function", "name": "get_weather"},
    max_output_tokens=200,
    extra_body={"seed": 3},
)
assert [item.type for item in single_call.output] == ["function_call"], single_call

# Tools as Codex declares them. The server serves the tools of a namespace and custom tools. It leaves out web_search
# and sends a warning.
three_letters = {"type": "grammar", "syntax": "regex", "definition": "[a-z]{3}"}
CODEX_TOOLS = [
    {"type": "namespace", "name": "home", "description": "At home", "tools": [responses_tool]},
    {"type": "custom", "name": "edit", "description": "Edits a file", "format": three_letters},
    {"type": "web_search"},
]
for choice in (
    {"type": "custom", "name": "edit"},
    {"type": "function", "namespace": "home", "name": "get_weather"},
):
    raw_response = client.responses.with_raw_response.create(
        model=model,
        input="import os",
        tools=CODEX_TOOLS,
        tool_choice=choice,
        max_output_tokens=200,
        extra_body={"seed": 3},
    )
    assert "web_search" in raw_response.headers["x-aerie-warning"], raw_response.headers
    (item,) = raw_response.parse().output
    if choice["type"] == "custom":
        assert item.type == "custom_tool_call" and item.name == "edit" and len(item.input) == 3, item
    else:
        assert item.type == "function_call" and (item.namespace, item.name) == ("home", "get_weather"), item
print("chat, tools, parse, responses; whole and streamed; tools by name, a namespace, a custom tool")
