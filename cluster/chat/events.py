"""What an answer consists of besides its end, in no API's format; every API's answer is made of these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of what a family that thinks writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool: `call` counts the calls of an answer from 0, `call_id` is unique in the conversation.
    What a `custom` tool is given is a text, not a JSON object.
    """

    call: int
    call_id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call that was begun as `call`: of a JSON text, or of a custom tool's text."""

    call: int
    text: str


Event = TextPiece | ReasoningPiece | CallBegun | CallArguments
