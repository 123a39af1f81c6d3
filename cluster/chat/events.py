"""The events of an answer, except its end, independent of any API. Every API builds its answer from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of the reasoning that a model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool. `call` numbers the calls of an answer from 0; `call_id` is unique in the conversation.
    The input of a `custom` tool is a text, not a JSON object.
    """

    call: int
    call_id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the input of call number `call`. The input is JSON arguments, or the text of a custom tool."""

    call: int
    text: str


Event = TextPiece | ReasoningPiece | CallBegun | CallArguments
