"""`instructor` in its default mode, where the request names a tool: a nested model, its partials, and an iterable."""

import sys
from collections.abc import Iterable
from datetime import date
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))
assert client.mode is instructor.Mode.TOOLS, client.mode


class Address(BaseModel):
    """Where somebody lives."""

    street: str = Field(max_length=8)
    kind: Literal["home", "work"]


class Person(BaseModel):
    """Somebody with addresses."""

    name: str = Field(max_length=8)
    age: Annotated[int, Field(ge=0, le=99)]
    born: date | None
    addresses: list[Address] = Field(min_length=1, max_length=2)


request = {"model": model, "messages": [{"role": "user", "content": "import os"}], "max_tokens": 400, "seed": 3}
request["max_retries"] = 0  # the first answer of the server must fit the model
person, completion = client.create_with_completion(response_model=Person, **request)
assert isinstance(person, Person) and person.addresses, person
assert len(completion.choices[0].message.tool_calls) == 1, completion
# The tool of the partial model has another name, so its values may differ. The arguments of a call come in one piece,
# so there may be only one partial. In its strict mode, instructor does not accept a string as a date here.
partials = list(client.create_partial(response_model=Person, strict=False, **request))
assert Person.model_validate(partials[-1].model_dump()), partials
people = client.create(response_model=Iterable[Address], **request)
assert all(isinstance(address, Address) for address in people)
print("a tool by name: a nested model, whole and in partials; an iterable")
