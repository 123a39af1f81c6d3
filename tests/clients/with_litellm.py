"""LiteLLM's providers `openai`, `hosted_vllm` and `anthropic`: a chat and a tool, whole and streamed; other calls."""

import asyncio
import json
import sys

import litellm
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
litellm.suppress_debug_info = True  # its list of providers, printed for models that it has no prices of
messages = [{"role": "user", "content": "import os"}]


def asked(provider: str, base: str, **more):
    """The answer that LiteLLM makes of a chat by this provider."""
    given = {"messages": messages, "max_tokens": 24, "temperature": 0, "api_key": "none", "num_retries": 0, **more}
    return litellm.completion(model=f"{provider}/{model}", api_base=base, **given)


def text_of(stream) -> str:
    """The text of all chunks of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
texts = set()
for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
    whole = asked(provider, base)
    assert whole.usage.completion_tokens > 0
    texts.add(whole.choices[0].message.content)
    texts.add(text_of(asked(provider, base, stream=True)))
    called = asked(provider, base, tools=[TOOL], tool_choice=NAMED, max_tokens=200)
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather", called
    assert json.loads(call.function.arguments).keys() == {"city"}, call
    chunks = list(asked(provider, base, tools=[TOOL], tool_choice=NAMED, stream=True, max_tokens=200))
    built = litellm.stream_chunk_builder(chunks)
    (streamed,) = built.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments), (streamed, call)
assert len(texts) == 1, texts

structured = asked("openai", f"{url}/v1", response_format=Weather, max_tokens=200)
assert Weather.model_validate_json(structured.choices[0].message.content)
completed = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="import ", api_base=f"{url}/v1", api_key="none", max_tokens=16
)
assert completed.choices[0].text
answered = litellm.responses(
    model=f"openai/{model}", input="import os", api_base=f"{url}/v1", api_key="none", max_output_tokens=24
)
assert answered.output[0].type == "message", answered

# Anthropic's own form. Streamed, it needs packages of LiteLLM's proxy.
message = asyncio.run(
    litellm.anthropic_messages(
        model=f"anthropic/{model}", messages=messages, max_tokens=24, temperature=0, api_base=url, api_key="none"
    )
)
assert {message["content"][0]["text"]} == texts, (message, texts)
print(
    "three providers: chat and a tool by name, whole and streamed; structured output, completion, responses, messages"
)
