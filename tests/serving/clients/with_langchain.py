"""LangChain's ChatOpenAI and OpenAI: answers streamed and not streamed, tools, structured output."""

import sys

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=24, seed=7)
full_message = chat.invoke("import os")
assert "".join(str(chunk.content) for chunk in chat.stream("import os")) == full_message.content


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)


long_chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=200, seed=3)
tool_message = long_chat.bind_tools([Weather], tool_choice="any").invoke("import os")
assert tool_message.tool_calls[0]["name"] == "Weather" and "city" in tool_message.tool_calls[0]["args"]
assert isinstance(long_chat.with_structured_output(Weather, method="json_schema").invoke("import os"), Weather)
completion = OpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=16, seed=7)
assert "".join(completion.stream("import ")) == completion.invoke("import ")
print("chat, completions, tools, structured output; whole and streamed")
