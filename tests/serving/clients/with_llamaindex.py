"""LlamaIndex's OpenAILike: chat and completion, streamed and not streamed, and a tool call."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]


def make_llm(**other_arguments):
    """An OpenAILike LLM of this server with these settings."""
    arguments = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "context_window": 1024, **other_arguments}
    return OpenAILike(**arguments, additional_kwargs={"seed": 7})


chat = make_llm(is_chat_model=True, is_function_calling_model=True, max_tokens=24)
messages = [ChatMessage(role="user", content="import os")]
full_text = chat.chat(messages).message.content
assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == full_text
completion = make_llm(is_chat_model=False, max_tokens=16)
text = completion.complete("import ").text
assert "".join(part.delta or "" for part in completion.stream_complete("import ")) == text


def weather(city: str) -> str:
    """The weather of a city."""
    return city


tool_llm = make_llm(is_chat_model=True, is_function_calling_model=True, max_tokens=200)
response = tool_llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="import os", tool_required=True)
calls = tool_llm.get_tool_calls_from_response(response)
assert calls[0].tool_name == "weather" and "city" in calls[0].tool_kwargs
print("chat, completions, a tool; whole and streamed")
