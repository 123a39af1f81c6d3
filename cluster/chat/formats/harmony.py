"""gpt-oss: messages in channels, `<|channel|>analysis<|message|>...<|end|>`. The analysis channel is reasoning, a
commentary to `functions.NAME` is a call, everything else is text.

The parser is this server's own. OpenAI's package loads only the vocabulary whose digest is built into it, so it
supports only the original tokenizer. It also parses tokens, and this server parses text.
"""

import re
from collections.abc import Sequence

from cluster.chat.blocks import members
from cluster.chat.events import Event, ReasoningPiece, TextPiece
from cluster.chat.formats.plan import Answer, CallSyntax, Form, Prompted, any_id, one_after_another, one_of, text
from cluster.chat.reading import AnswerReader, BufferedReader, Numbering, ToolCallText, Tools

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
HEADING = re.compile(r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=|<\|channel\|>)")
NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
TO = re.compile(r"to=functions\.([A-Za-z0-9_.:-]+)")
MOST_HEADING = 512
BEGINNINGS = ("assistant to=", "to=")
AGAIN = f"{END}{START}assistant"


class HarmonyReader(BufferedReader):
    """Parses the messages of an answer. If `tools` is None, no call is reported. `split` separates the reasoning."""

    def __init__(self, tools: Tools | None, split: bool, within: bool) -> None:
        """`within` says that the prompt has already begun the final message."""
        super().__init__()
        self._calling, self._split = tools is not None, split
        self._numbering = Numbering(any_id)
        self._heading = ""
        self._kind = "final"
        self._name = ""
        self._step = self._body if within else self._head

    @property
    def thinks(self) -> bool:
        """Whether the next text is reasoning."""
        return self._step == self._body and self._kind == "analysis"

    def _head(self, last: bool) -> list[Event] | None:
        """Parse a message's heading, up to its body. Anything that is not a heading is text."""
        at = self._held.find(MESSAGE, 0, MOST_HEADING)
        if at >= 0 and HEADING.match(self._held):
            self._heading, self._held = self._held[: at + len(MESSAGE)], self._held[at + len(MESSAGE) :]
            named, to = NAMED.search(self._heading), TO.search(self._heading)
            self._kind = "call" if to and self._calling else named[1] if named else "final"
            self._name = to[1] if to else ""
            self._step = self._body
            return []
        if _may_begin(self._held) and len(self._held) < MOST_HEADING:
            if not last or not self._held:
                return None
            if self._held.startswith("<"):
                self._held = ""  # drop a heading that is cut off
                return None
        self._heading, self._kind, self._step = "", "final", self._body
        mark = next((mark for mark in BODY_ENDS if self._held.startswith(mark)), "")
        self._held = self._held.removeprefix(mark)  # a stray mark, reported as text
        return [TextPiece(mark)] if mark else []

    def _body(self, last: bool) -> list[Event] | None:
        ends = [at for mark in BODY_ENDS if (at := self._held.find(mark)) >= 0]
        if ends:
            at = min(ends)
            whole, self._held = self._held[:at], self._held[at:]
            closing = next((mark for mark in (END, CALL, RETURN) if self._held.startswith(mark)), "")
            self._held = self._held.removeprefix(closing)
            self._step = self._between
            return self._told(whole, complete=True)
        if self._kind == "call" and not last:
            return None
        ready = len(self._held) if last else _settled(self._held, BODY_ENDS)
        if not ready:
            return None
        piece, self._held = self._held[:ready], self._held[ready:]
        return self._told(piece, complete=last)

    def _between(self, last: bool) -> list[Event] | None:
        """Wait, after a message, for the next heading."""
        if not self._held:
            return None
        self._step = self._head
        return []

    def _told(self, piece: str, complete: bool) -> list[Event]:
        if self._kind == "call" and complete:
            if members(piece.strip()) is None:
                return [TextPiece(self._heading + piece)]
            return self._numbering.events([ToolCallText(self._name, piece.strip())])
        if not piece:
            return []
        return [ReasoningPiece(piece) if self._kind == "analysis" and self._split else TextPiece(piece)]


def _may_begin(held: str) -> bool:
    """Whether a heading may begin with this text."""
    text = held[: _settled(held, MARKS)]
    if HEADING.match(text):
        return True
    rest = text.removeprefix(START).lstrip()
    return any(beginning.startswith(rest) for beginning in BEGINNINGS)


def _settled(held: str, marks: Sequence[str]) -> int:
    """Return the length of the text without an incomplete mark at its end."""
    at = held.rfind("<")
    part = held[at:]
    return at if at >= 0 and any(mark != part and mark.startswith(part) for mark in marks) else len(held)


class HarmonyFormat:
    """The `ChatFormat` of gpt-oss."""

    name = "gpt-oss"
    special = MARKS
    thought_field = "thinking"

    def reads(self, tools: bool, prompted: Prompted) -> bool:
        """Return True: every answer has channel marks."""
        return True

    def reader(self, tools: Tools | None, split: bool, prompted: Prompted) -> AnswerReader:
        """Return a reader of messages in channels; see `ChatFormat.reader`."""
        return HarmonyReader(tools, split, within=_final_has_begun(prompted.text))

    def form(self, answer: Answer, calls: Form | None, prompted: Prompted) -> Form:
        """Return the form of a whole answer: an optional analysis message, then the final message or calls."""
        said = _free() if answer == "free" else answer
        if _final_has_begun(prompted.text):
            return one_of([part for part in (said, calls) if part is not None])
        thought = one_after_another(text(f"{CHANNEL}analysis{MESSAGE}"), _free(), text(AGAIN))
        final = None if said is None else one_after_another(text(f"{CHANNEL}final{MESSAGE}"), said)
        parts = [part for part in (final, calls) if part is not None]
        return one_after_another({"type": "optional", "content": thought}, one_of(parts))

    def written(self, tools: Tools, several: bool) -> Form:
        """Return the form of a call. The model ends its answer after a call, so an answer has at most one."""
        return WRITTEN.calls(tools, several)


WRITTEN = CallSyntax(
    before=lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}", several=False
)


def _free() -> Form:
    return {"type": "any_text", "excludes": list(MARKS)}


def _final_has_begun(prompt: str) -> bool:
    """Whether the prompt ends inside a message to the user, as it does when a message is continued."""
    at = prompt.rfind(MESSAGE)
    return at > max(prompt.rfind(END), prompt.rfind(START), prompt.rfind(RETURN)) if at >= 0 else False


HARMONY = HarmonyFormat()
