"""Prints the schemas that pydantic 2 writes: python pydantic_types.py > pydantic.json, with `pydantic[email]`."""

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from importlib.metadata import version
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar
from uuid import UUID

from pydantic import AnyUrl, Base64Bytes, BaseModel, ConfigDict, EmailStr, Field, StringConstraints, create_model

T = TypeVar("T")


class Color(StrEnum):
    red = "red"
    green = "green"
    blue = "blue"


class Level(IntEnum):
    low = 1
    mid = 2
    high = 3


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Named(BaseModel):
    name: str


class Aged(Named):
    age: int


class Tree(BaseModel):
    value: int
    children: list["Tree"]


class Person(BaseModel):
    name: str
    pets: list["Pet"]


class Pet(BaseModel):
    name: str
    owner: Optional["Person"] = None


class Box(BaseModel, Generic[T]):
    content: T


class Boxes(BaseModel):
    a: Box[int]
    b: Box[str]


class Point(BaseModel):
    x: float
    y: float


class Line(BaseModel):
    start: Point
    end: Point = Field(description="the end")


Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9]{5,23}$", min_length=6, max_length=24)]
Prefixed = Annotated[str, StringConstraints(pattern=r"^https://")]
TYPES: dict[str, Any] = {
    "string": str,
    "string length": Annotated[str, StringConstraints(min_length=2, max_length=10)],
    "string pattern": Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}\d{3}$")],
    "string prefix": Prefixed,
    "email": EmailStr,
    "uuid": UUID,
    "uri": AnyUrl,
    "date": date,
    "time": time,
    "date-time": datetime,
    "duration": timedelta,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "hostname": Annotated[str, Field(json_schema_extra={"format": "hostname"})],
    "bytes": Base64Bytes,
    "identifier": Identifier,
    "integer": int,
    "integer range": Annotated[int, Field(ge=0, le=130)],
    "long": Annotated[int, Field(ge=-(2**63), lt=2**63)],
    "number": float,
    "number range": Annotated[float, Field(gt=0, le=1)],
    "multiple": Annotated[int, Field(multiple_of=5)],
    "decimal": Annotated[Decimal, Field(max_digits=8, decimal_places=2, ge=0)],
    "boolean": bool,
    "nullable": str | None,
    "optional": (str | None, None),
    "default": (int, 3),
    "constant": Literal["cat"],
    "enum of strings": Color,
    "enum of numbers": Level,
    "array": list[str],
    "array bounds": Annotated[list[int], Field(min_length=1, max_length=3)],
    "set": set[str],
    "set of an enum": set[Color],
    "tuple": tuple[str, int],
    "tuple and rest": None,  # Python has no such type
    "map": dict[str, int],
    "map by keys": dict[Color, int],
    "map by pattern": dict[Annotated[str, StringConstraints(pattern=r"^[a-z]{1,8}$")], int],
    "closed object": Closed,
    "open object": Open,
    "union": int | str | list[bool],
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "intersection": Aged,
    "recursive": Tree,
    "mutually recursive": Person,
    "generic": Boxes,
    "shared": Line,
    "any": Any,
}


def schema_of(annotation: Any) -> dict[str, Any]:
    field = annotation if isinstance(annotation, tuple) else (annotation, ...)
    return create_model("Root", v=field).model_json_schema()


print(
    json.dumps(
        {
            "generator": f"pydantic {version('pydantic')}",
            "types": {name: None if of is None else schema_of(of) for name, of in TYPES.items()},
        }
    )
)
