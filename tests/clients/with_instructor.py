"""`instructor` in its default mode, a tool by name: a nested model, whole and in partials, and an iterable."""

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


asked = {"model": model, "messages": [{"role": "user", "content": "import os"}], "max_tokens": 400, "seed": 3}
asked["max_retries"] = 0  # what the server answers must fit at once
person, answer = client.create_with_completion(response_model=Person, **asked)
assert isinstance(person, Person) and person.addresses, person
assert len(answer.choices[0].message.tool_calls) == 1, answer
# The partial model is a tool of another name, so its values may differ. A call's arguments come in one piece: perhaps
# there is one partial only. In its strict mode instructor takes no text for a date here.
partials = list(client.create_partial(response_model=Person, strict=False, **asked))
assert Person.model_validate(partials[-1].model_dump()), partials
people = client.create(response_model=Iterable[Address], **asked)
assert all(isinstance(one, Address) for one in people)
print("a tool by name: a nested model, whole and in partials; an iterable")
