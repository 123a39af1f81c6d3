"""LlamaIndex's OpenAILike: chat and completion, whole and streamed, and a function that is called."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]


def of(**more):
    """The class with these settings."""
    given = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "context_window": 1024, **more}
    return OpenAILike(**given, additional_kwargs={"seed": 7})


chat = of(is_chat_model=True, is_function_calling_model=True, max_tokens=24)
messages = [ChatMessage(role="user", content="import os")]
whole = chat.chat(messages).message.content
assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == whole
completion = of(is_chat_model=False, max_tokens=16)
text = completion.complete("import ").text
assert "".join(part.delta or "" for part in completion.stream_complete("import ")) == text


def weather(city: str) -> str:
    """The weather of a city."""
    return city


caller = of(is_chat_model=True, is_function_calling_model=True, max_tokens=200)
answer = caller.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="import os", tool_required=True)
calls = caller.get_tool_calls_from_response(answer)
assert calls[0].tool_name == "weather" and "city" in calls[0].tool_kwargs
print("chat, completions, a tool; whole and streamed")
