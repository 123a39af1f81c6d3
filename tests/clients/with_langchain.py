"""LangChain's ChatOpenAI and OpenAI: whole, streamed, tools, structured output."""

import sys

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=24, seed=7)
whole = chat.invoke("import os")
assert "".join(str(chunk.content) for chunk in chat.stream("import os")) == whole.content


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)


longer = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=200, seed=3)
called = longer.bind_tools([Weather], tool_choice="any").invoke("import os")
assert called.tool_calls[0]["name"] == "Weather" and "city" in called.tool_calls[0]["args"]
assert isinstance(longer.with_structured_output(Weather, method="json_schema").invoke("import os"), Weather)
completion = OpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=16, seed=7)
assert "".join(completion.stream("import ")) == completion.invoke("import ")
print("chat, completions, tools, structured output; whole and streamed")
