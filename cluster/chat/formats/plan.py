"""The interface of a family's format: how its answers are parsed, and the grammar of its calls."""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cluster.chat.reading import AnswerReader, CallingMarks, MarkedReader, ThinkingMarks, Tools

Form = dict[str, Any]
"""A part of a grammar, in the syntax of a structural tag; see `cluster.grammar.sources`."""
THINK = ThinkingMarks("<think>", "</think>")
LETTERS = string.ascii_letters + string.digits


def any_id() -> str:
    """Return a new id of a call."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Return a new id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(LETTERS) for _ in range(9))


def text(value: str) -> Form:
    """Return a form of exactly this text. `with_tokens` later replaces special tokens in it by token ids."""
    return {"type": "const_string", "value": value}


def json_value(schema: Any) -> Form:
    """Return a form of a JSON text that follows a schema."""
    return {"type": "json_schema", "json_schema": schema}


def one_after_another(*parts: Form) -> Form:
    """Return a form of these parts in sequence."""
    inner = [one for part in parts for one in (part["elements"] if part["type"] == "sequence" else [part])]
    kept = [part for part in inner if part != text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def one_of(parts: Sequence[Form]) -> Form:
    """Return a form of one of these parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def with_tokens(form: Any, tokens: Mapping[str, int]) -> Any:
    """Return a form in which the special tokens inside constant texts are replaced by token ids."""
    if isinstance(form, list):
        return [with_tokens(part, tokens) for part in form]
    if not isinstance(form, dict) or form.get("type") in ("json_schema", "regex", "grammar"):
        return form
    if form.get("type") != "const_string":
        return {name: with_tokens(part, tokens) for name, part in form.items()}
    parts = _split(form["value"], tokens)
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _split(value: str, tokens: Mapping[str, int]) -> list[Form]:
    """Split a text into constant texts and special tokens."""
    places = [(at, -len(name), name) for name in tokens if (at := value.find(name)) >= 0]
    if not places:
        return [{"type": "const_string", "value": value}]
    at, _, name = min(places)
    before = [{"type": "const_string", "value": value[:at]}] if at else []
    rest = value[at + len(name) :]
    return [*before, {"type": "token", "token": tokens[name]}, *(_split(rest, tokens) if rest else [])]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls: `opening`, the calls separated by `between`, `ending`. Each call is `before(name)`,
    the arguments, `after`. `several` says whether an answer may have more than one call.
    """

    before: Callable[[str], str]
    after: str = ""
    opening: str = ""
    ending: str = ""
    between: str = ""
    arguments: Callable[[Mapping[str, Any]], Form] = json_value
    several: bool = True

    def calls(self, tools: Tools, several: bool) -> Form:
        """Return the form of one call of one of the tools, or with `several` (here and in the family) of one or more
        calls.
        """
        each = [
            one_after_another(text(self.before(name)), self.arguments(schema), text(self.after))
            for name, schema in tools.items()
        ]
        call, repeated = one_of(each), list[Form]()
        if several and self.several:
            more = {"type": "star", "content": one_after_another(text(self.between), call)}
            call, repeated = (call, [more]) if self.between else ({"type": "plus", "content": call}, [])
        return one_after_another(text(self.opening), call, *repeated, text(self.ending))


@dataclass(frozen=True, slots=True)
class Prompted:
    """What comes before an answer: the text of the prompt, and the text of the message that it continues, if any."""

    text: str = ""
    continued: str | None = None


Answer = Form | Literal["free"] | None
"""The form of an answer's text. "free" allows any text. None allows no text: the answer must be calls."""


class ChatFormat(Protocol):
    """The format of a model family."""

    @property
    def name(self) -> str:
        """The name of the format in the settings."""
        ...

    @property
    def special(self) -> tuple[str, ...]:
        """Texts that the reader must see in an answer. In some tokenizers of the family they are special tokens."""
        ...

    @property
    def thought_field(self) -> str:
        """The name that the family's templates use for the reasoning of an assistant's message."""
        ...

    def reads(self, tools: bool, prompted: Prompted) -> bool:
        """Return whether an answer may contain more than text. `tools` says whether tools may be called."""
        ...

    def reader(self, tools: Tools | None, split: bool, prompted: Prompted) -> AnswerReader:
        """Return a reader for one answer. If `tools` is None, no tool may be called. `split` reports reasoning
        separately.
        """
        ...

    def form(self, answer: Answer, calls: Form | None, prompted: Prompted) -> Form:
        """Return the form of a whole answer: reasoning, then the text `answer` or `calls`. If `answer` is "free", the
        calls are optional. At least one of `answer` and `calls` is not None.
        """
        ...

    def written(self, tools: Tools, several: bool) -> Form:
        """Return the form of calls."""
        ...


@dataclass(frozen=True)
class MarkedFormat:
    """A format that marks reasoning and calls in running text."""

    name: str
    thinking: ThinkingMarks | None = None
    calling: CallingMarks | None = None
    calls: CallSyntax | None = None
    special: tuple[str, ...] = ()
    new_id: Callable[[], str] = any_id
    thought_field: str = "reasoning_content"

    def reads(self, tools: bool, prompted: Prompted) -> bool:
        """Return True if calls are possible (with `tools`), or reasoning is (the prompt has not ended it)."""
        return (tools and self.calling is not None) or (self.thinking is not None and not self._state(prompted)[1])

    def reader(self, tools: Tools | None, split: bool, prompted: Prompted) -> AnswerReader:
        """Return a reader for the marks of this format; see `ChatFormat.reader`."""
        thinking = self.thinking if split else None
        opened, closed = self._state(prompted)
        calling = None if tools is None else self.calling
        return MarkedReader(thinking, calling, tools or {}, self.new_id, opened=opened, closed=closed)

    def form(self, answer: Answer, calls: Form | None, prompted: Prompted) -> Form:
        """Return the form of a whole answer; if the prompt has ended the reasoning, of the rest only."""
        opened, closed = self._state(prompted)
        rest = self._rest(answer, calls)
        if self.thinking is None or closed:
            return rest
        begin, end = self.thinking.begin, self.thinking.end
        inside = one_after_another({"type": "any_text", "excludes": [end]}, text(end), SPACE)
        thought = inside if opened else {"type": "optional", "content": one_after_another(text(begin), inside)}
        return one_after_another(thought, rest)

    def _rest(self, answer: Answer, calls: Form | None) -> Form:
        """Return the form of what follows the reasoning."""
        if answer != "free":
            return one_of([part for part in (answer, calls) if part is not None])
        if calls is None:
            return self._free()
        if self.calling is not None and self.calling.first:
            return one_of([self._free(), calls])
        return one_after_another(self._free(), {"type": "optional", "content": calls})

    def written(self, tools: Tools, several: bool) -> Form:
        """Return the form of calls in the syntax `calls`."""
        assert self.calls is not None
        return self.calls.calls(tools, several)

    def _free(self) -> Form:
        """Return the form of text without calls."""
        triggers = [] if self.calling is None else [mark for mark in self.calling.triggers if len(mark) > 1]
        rest = {"type": "any_text", "excludes": list(dict.fromkeys([*triggers, *self.special]))}
        if self.calling is None or not self.calling.first:
            return rest
        first = {"type": "regex", "pattern": r"[^\s{;<]"}
        return {"type": "optional", "content": one_after_another(first, rest)}

    def _state(self, prompted: Prompted) -> tuple[bool, bool]:
        """Return two booleans: the prompt has begun the reasoning, the prompt has ended the reasoning."""
        if self.thinking is None:
            return False, False
        if prompted.continued is not None:
            opened = self.thinking.begin in prompted.continued and self.thinking.end not in prompted.continued
            return opened, not opened
        end = prompted.text.rstrip()
        return end.endswith(self.thinking.begin), end.endswith(self.thinking.end)


SPACE: Form = {"type": "regex", "pattern": r"\n{0,2}"}
