"""gpt-oss: messages in channels, `<|channel|>analysis<|message|>...<|end|>`. The analysis channel is reasoning, a
message to `functions.NAME` is a call, everything else is text.

The parser is this server's own, for two reasons. OpenAI's package loads only the vocabulary whose digest is built into
it, so it supports only the original tokenizer. And it parses tokens, while this server parses text.
"""

import re

from cluster.chat.blocks import object_members
from cluster.chat.events import Event, ReasoningPiece, TextPiece
from cluster.chat.formats.plan import (
    AnswerForm,
    CallSyntax,
    GrammarForm,
    PromptContext,
    any_of,
    const_text,
    new_call_id,
    sequence,
)
from cluster.chat.reading import (
    AnswerReader,
    BufferedReader,
    CallNumbering,
    ToolCallText,
    Tools,
    length_before_partial_mark,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
HEADING = re.compile(r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=|<\|channel\|>)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.:-]+)")
MAX_HEADING_LENGTH = 512
HEADING_STARTS = ("assistant to=", "to=")
NEXT_MESSAGE = f"{END}{START}assistant"


class HarmonyReader(BufferedReader):
    """Parses the messages of an answer. If `tools` is None, no call is reported."""

    def __init__(self, tools: Tools | None, separate_reasoning: bool, in_final_message: bool) -> None:
        """With `separate_reasoning`, reasoning becomes `ReasoningPiece` events, otherwise text. `in_final_message` says
        that the prompt has already begun the final message.
        """
        super().__init__()
        self._has_tools, self._separate_reasoning = tools is not None, separate_reasoning
        self._call_numbering = CallNumbering(new_call_id)
        self._heading = ""
        self._message_kind = "final"
        self._tool_name = ""
        self._step = self._parse_body if in_final_message else self._parse_heading

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._step == self._parse_body and self._message_kind == "analysis"

    def _parse_heading(self, is_final: bool) -> list[Event] | None:
        """Parse a message's heading, up to the message's body. Anything that is not a heading is text."""
        position = self._buffer.find(MESSAGE, 0, MAX_HEADING_LENGTH)
        if position >= 0 and HEADING.match(self._buffer):
            self._heading, self._buffer = (
                self._buffer[: position + len(MESSAGE)],
                self._buffer[position + len(MESSAGE) :],
            )
            channel, recipient = CHANNEL_NAME.search(self._heading), RECIPIENT.search(self._heading)
            self._message_kind = "call" if recipient and self._has_tools else channel[1] if channel else "final"
            self._tool_name = recipient[1] if recipient else ""
            self._step = self._parse_body
            return []
        if _may_be_heading(self._buffer) and len(self._buffer) < MAX_HEADING_LENGTH:
            if not is_final or not self._buffer:
                return None
            if self._buffer.startswith("<"):
                self._buffer = ""  # drop a heading that is cut off
                return None
        self._heading, self._message_kind, self._step = "", "final", self._parse_body
        mark = next((mark for mark in BODY_ENDS if self._buffer.startswith(mark)), "")
        self._buffer = self._buffer.removeprefix(mark)  # a stray mark, reported as text
        return [TextPiece(mark)] if mark else []

    def _parse_body(self, is_final: bool) -> list[Event] | None:
        body_ends = [position for mark in BODY_ENDS if (position := self._buffer.find(mark)) >= 0]
        if body_ends:
            position = min(body_ends)
            body, self._buffer = self._buffer[:position], self._buffer[position:]
            end_mark = next((mark for mark in (END, CALL, RETURN) if self._buffer.startswith(mark)), "")
            self._buffer = self._buffer.removeprefix(end_mark)
            self._step = self._await_heading
            return self._events_of(body, is_complete=True)
        if self._message_kind == "call" and not is_final:
            return None
        length = len(self._buffer) if is_final else length_before_partial_mark(self._buffer, BODY_ENDS)
        if not length:
            return None
        piece, self._buffer = self._buffer[:length], self._buffer[length:]
        return self._events_of(piece, is_complete=is_final)

    def _await_heading(self, is_final: bool) -> list[Event] | None:
        """Wait, after a message, for the next heading."""
        if not self._buffer:
            return None
        self._step = self._parse_heading
        return []

    def _events_of(self, piece: str, is_complete: bool) -> list[Event]:
        if self._message_kind == "call" and is_complete:
            if object_members(piece.strip()) is None:
                return [TextPiece(self._heading + piece)]
            return self._call_numbering.events([ToolCallText(self._tool_name, piece.strip())])
        if not piece:
            return []
        return [
            ReasoningPiece(piece) if self._message_kind == "analysis" and self._separate_reasoning else TextPiece(piece)
        ]


def _may_be_heading(buffered: str) -> bool:
    """Return whether `buffered` may be the beginning of a heading."""
    text = buffered[: length_before_partial_mark(buffered, MARKS)]
    if HEADING.match(text):
        return True
    rest_of_heading = text.removeprefix(START).lstrip()
    return any(start.startswith(rest_of_heading) for start in HEADING_STARTS)


class HarmonyFormat:
    """The `ChatFormat` of gpt-oss."""

    name = "gpt-oss"
    special_tokens = MARKS
    reasoning_field = "thinking"

    def needs_reader(self, has_tools: bool, context: PromptContext) -> bool:
        """Return True: every answer has channel marks."""
        return True

    def reader(self, tools: Tools | None, separate_reasoning: bool, context: PromptContext) -> AnswerReader:
        """Return a reader of messages in channels; see `ChatFormat.reader`."""
        return HarmonyReader(tools, separate_reasoning, in_final_message=_final_has_begun(context.prompt))

    def answer_form(self, answer: AnswerForm, calls: GrammarForm | None, context: PromptContext) -> GrammarForm:
        """Return the grammar of a whole answer: an optional analysis message, then the final message or calls. If the
        prompt has begun the final message, the grammar allows the rest of this message, or calls.
        """
        final_text = _any_text() if answer == "free" else answer
        if _final_has_begun(context.prompt):
            return any_of([form for form in (final_text, calls) if form is not None])
        reasoning = sequence(const_text(f"{CHANNEL}analysis{MESSAGE}"), _any_text(), const_text(NEXT_MESSAGE))
        final_message = None if final_text is None else sequence(const_text(f"{CHANNEL}final{MESSAGE}"), final_text)
        forms = [form for form in (final_message, calls) if form is not None]
        return sequence({"type": "optional", "content": reasoning}, any_of(forms))

    def calls_form(self, tools: Tools, several: bool) -> GrammarForm:
        """Return the grammar of one call. The model ends its answer after a call, so `several` has no effect."""
        return CALL_SYNTAX.calls_form(tools, several)


CALL_SYNTAX = CallSyntax(
    prefix=lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}", several=False
)


def _any_text() -> GrammarForm:
    return {"type": "any_text", "excludes": list(MARKS)}


def _final_has_begun(prompt: str) -> bool:
    """Return whether the prompt ends inside the body of a message. It does if the answer continues a message."""
    body_start = prompt.rfind(MESSAGE)
    return body_start > max(prompt.rfind(END), prompt.rfind(START), prompt.rfind(RETURN)) if body_start >= 0 else False


HARMONY = HarmonyFormat()
