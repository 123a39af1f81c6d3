"""LiteLLM's providers `openai`, `hosted_vllm` and `anthropic`: a chat and a tool, streamed and not; other calls."""

import asyncio
import json
import sys

import litellm
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
litellm.suppress_debug_info = True  # else it prints a list of providers for a model without known prices
messages = [{"role": "user", "content": "import os"}]


def complete_chat(provider: str, base_url: str, **other_arguments):
    """Send a chat request by this provider and return LiteLLM's response."""
    arguments = {
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
        "api_key": "none",
        "num_retries": 0,
        **other_arguments,
    }
    return litellm.completion(model=f"{provider}/{model}", api_base=base_url, **arguments)


def text_of(stream) -> str:
    """The text of all chunks of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
NAMED_TOOL = {"type": "function", "function": {"name": "get_weather"}}
texts = set()
for provider, base_url in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
    full_response = complete_chat(provider, base_url)
    assert full_response.usage.completion_tokens > 0
    texts.add(full_response.choices[0].message.content)
    texts.add(text_of(complete_chat(provider, base_url, stream=True)))
    tool_response = complete_chat(provider, base_url, tools=[TOOL], tool_choice=NAMED_TOOL, max_tokens=200)
    (call,) = tool_response.choices[0].message.tool_calls
    assert tool_response.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather", tool_response
    assert json.loads(call.function.arguments).keys() == {"city"}, call
    chunks = list(complete_chat(provider, base_url, tools=[TOOL], tool_choice=NAMED_TOOL, stream=True, max_tokens=200))
    assembled_response = litellm.stream_chunk_builder(chunks)
    (streamed_call,) = assembled_response.choices[0].message.tool_calls
    assert json.loads(streamed_call.function.arguments) == json.loads(call.function.arguments), (streamed_call, call)
assert len(texts) == 1, texts

structured_response = complete_chat("openai", f"{url}/v1", response_format=Weather, max_tokens=200)
assert Weather.model_validate_json(structured_response.choices[0].message.content)
completion = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="import ", api_base=f"{url}/v1", api_key="none", max_tokens=16
)
assert completion.choices[0].text
responses_api_result = litellm.responses(
    model=f"openai/{model}", input="import os", api_base=f"{url}/v1", api_key="none", max_output_tokens=24
)
assert responses_api_result.output[0].type == "message", responses_api_result

# Anthropic's own messages API. Not streamed, because streaming needs packages of LiteLLM's proxy.
message = asyncio.run(
    litellm.anthropic_messages(
        model=f"anthropic/{model}", messages=messages, max_tokens=24, temperature=0, api_base=url, api_key="none"
    )
)
assert {message["content"][0]["text"]} == texts, (message, texts)
print(
    "three providers: chat and a tool by name, whole and streamed; structured output, completion, responses, messages"
)
