"""The interface of a family's format: how its answers are parsed, and the grammar of its calls."""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cluster.chat.reading import AnswerReader, CallingMarks, MarkedReader, ThinkingMarks, Tools

GrammarForm = dict[str, Any]
"""A form: a grammar, or a part of one, in the syntax of xgrammar's structural tags; see `cluster.grammar.sources`."""
THINK_MARKS = ThinkingMarks("<think>", "</think>")
ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return a new id of a call."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Return a new id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(ID_CHARS) for _ in range(9))


def const_text(value: str) -> GrammarForm:
    """Return the grammar of exactly this text. `with_token_ids` later replaces special tokens in it by token ids."""
    return {"type": "const_string", "value": value}


def json_value(schema: Any) -> GrammarForm:
    """Return the grammar of the JSON texts that follow a schema."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*forms: GrammarForm) -> GrammarForm:
    """Return the grammar that matches all of the grammars `forms`, one after the other."""
    flattened = [element for form in forms for element in (form["elements"] if form["type"] == "sequence" else [form])]
    elements = [form for form in flattened if form != const_text("")]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def any_of(forms: Sequence[GrammarForm]) -> GrammarForm:
    """Return the grammar that matches any one of the grammars `forms`."""
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def with_token_ids(form: Any, token_ids: Mapping[str, int]) -> Any:
    """Return the grammar `form` with the special tokens inside constant texts replaced by their ids. `token_ids` maps
    the names of special tokens to ids.
    """
    if isinstance(form, list):
        return [with_token_ids(inner, token_ids) for inner in form]
    if not isinstance(form, dict) or form.get("type") in ("json_schema", "regex", "grammar"):
        return form
    if form.get("type") != "const_string":
        return {name: with_token_ids(inner, token_ids) for name, inner in form.items()}
    elements = _split(form["value"], token_ids)
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _split(value: str, token_ids: Mapping[str, int]) -> list[GrammarForm]:
    """Split a text at the special tokens of `token_ids`. Return the grammars of the parts, in order."""
    matches = [(position, -len(name), name) for name in token_ids if (position := value.find(name)) >= 0]
    if not matches:
        return [{"type": "const_string", "value": value}]
    position, _, name = min(matches)
    leading_text = [{"type": "const_string", "value": value[:position]}] if position else []
    rest = value[position + len(name) :]
    return [*leading_text, {"type": "token", "token": token_ids[name]}, *(_split(rest, token_ids) if rest else [])]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls: `opening`, the calls separated by `separator`, `closing`. Each call is `prefix(name)`,
    the arguments, `suffix`. `arguments` returns the grammar of the arguments for their schema. `several` says whether
    an answer may have more than one call.
    """

    prefix: Callable[[str], str]
    suffix: str = ""
    opening: str = ""
    closing: str = ""
    separator: str = ""
    arguments: Callable[[Mapping[str, Any]], GrammarForm] = json_value
    several: bool = True

    def calls_form(self, tools: Tools, several: bool) -> GrammarForm:
        """Return the grammar of one call of one of `tools`. If the argument `several` and the field `several` are both
        true, return the grammar of one or more calls.
        """
        call_forms = [
            sequence(const_text(self.prefix(name)), self.arguments(schema), const_text(self.suffix))
            for name, schema in tools.items()
        ]
        call, further_calls = any_of(call_forms), list[GrammarForm]()
        if several and self.several:
            repetition = {"type": "star", "content": sequence(const_text(self.separator), call)}
            call, further_calls = (call, [repetition]) if self.separator else ({"type": "plus", "content": call}, [])
        return sequence(const_text(self.opening), call, *further_calls, const_text(self.closing))


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What comes before an answer: the text of the prompt, and the text of the assistant's message that the answer
    continues. `continued_message` is None if the answer begins a new message.
    """

    prompt: str = ""
    continued_message: str | None = None


AnswerForm = GrammarForm | Literal["free"] | None
"""The grammar of an answer's text. "free" allows any text. None allows no text, so the answer must be calls."""


class ChatFormat(Protocol):
    """The format of a model family."""

    @property
    def name(self) -> str:
        """The name of the format in the settings."""
        ...

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that the reader must see in an answer. In some tokenizers of the family they are special tokens."""
        ...

    @property
    def reasoning_field(self) -> str:
        """The name that the family's templates use for the reasoning of an assistant's message."""
        ...

    def needs_reader(self, has_tools: bool, context: PromptContext) -> bool:
        """Return whether an answer may contain more than text. `has_tools` says whether tools may be called."""
        ...

    def reader(self, tools: Tools | None, separate_reasoning: bool, context: PromptContext) -> AnswerReader:
        """Return a reader for one answer. If `tools` is None, no tool may be called. With `separate_reasoning`,
        reasoning becomes `ReasoningPiece` events, otherwise it is part of the text.
        """
        ...

    def answer_form(self, answer: AnswerForm, calls: GrammarForm | None, context: PromptContext) -> GrammarForm:
        """Return the grammar of a whole answer: reasoning, then a text of the grammar `answer`, or `calls`. `calls` is
        None if no tool may be called. If `answer` is "free", the model chooses whether it calls tools. At least one of
        `answer` and `calls` is not None.
        """
        ...

    def calls_form(self, tools: Tools, several: bool) -> GrammarForm:
        """Return the grammar of one call of one of `tools`, or of one or more calls if `several` is true and the family
        allows several.
        """
        ...


@dataclass(frozen=True)
class MarkedFormat:
    """A format that marks reasoning and calls in running text."""

    name: str
    thinking: ThinkingMarks | None = None
    calling: CallingMarks | None = None
    call_syntax: CallSyntax | None = None
    special_tokens: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_call_id
    reasoning_field: str = "reasoning_content"

    def needs_reader(self, has_tools: bool, context: PromptContext) -> bool:
        """Return whether the answer may contain calls or reasoning. Calls are possible only if `has_tools` is true, and
        reasoning only if the prompt has not ended it.
        """
        return (has_tools and self.calling is not None) or (
            self.thinking is not None and not self._reasoning_state(context)[1]
        )

    def reader(self, tools: Tools | None, separate_reasoning: bool, context: PromptContext) -> AnswerReader:
        """Return a reader for the marks of this format; see `ChatFormat.reader`."""
        thinking = self.thinking if separate_reasoning else None
        reasoning_started, reasoning_ended = self._reasoning_state(context)
        calling = None if tools is None else self.calling
        return MarkedReader(
            thinking,
            calling,
            tools or {},
            self.new_id,
            reasoning_started=reasoning_started,
            reasoning_ended=reasoning_ended,
        )

    def answer_form(self, answer: AnswerForm, calls: GrammarForm | None, context: PromptContext) -> GrammarForm:
        """Return the grammar of a whole answer, reasoning included. If the prompt has ended the reasoning, the grammar
        covers only what follows the reasoning.
        """
        reasoning_started, reasoning_ended = self._reasoning_state(context)
        rest = self._after_reasoning(answer, calls)
        if self.thinking is None or reasoning_ended:
            return rest
        begin, end = self.thinking.begin, self.thinking.end
        rest_of_reasoning = sequence({"type": "any_text", "excludes": [end]}, const_text(end), NEWLINES)
        reasoning = (
            rest_of_reasoning
            if reasoning_started
            else {"type": "optional", "content": sequence(const_text(begin), rest_of_reasoning)}
        )
        return sequence(reasoning, rest)

    def _after_reasoning(self, answer: AnswerForm, calls: GrammarForm | None) -> GrammarForm:
        """Return the grammar of what follows the reasoning."""
        if answer != "free":
            return any_of([form for form in (answer, calls) if form is not None])
        if calls is None:
            return self._any_text()
        if self.calling is not None and self.calling.only_at_start:
            return any_of([self._any_text(), calls])
        return sequence(self._any_text(), {"type": "optional", "content": calls})

    def calls_form(self, tools: Tools, several: bool) -> GrammarForm:
        """Return the grammar that `call_syntax` gives for calls of `tools`."""
        assert self.call_syntax is not None
        return self.call_syntax.calls_form(tools, several)

    def _any_text(self) -> GrammarForm:
        """Return the grammar of text without calls."""
        triggers = [] if self.calling is None else [mark for mark in self.calling.triggers if len(mark) > 1]
        rest = {"type": "any_text", "excludes": list(dict.fromkeys([*triggers, *self.special_tokens]))}
        if self.calling is None or not self.calling.only_at_start:
            return rest
        first_char = {"type": "regex", "pattern": r"[^\s{;<]"}
        return {"type": "optional", "content": sequence(first_char, rest)}

    def _reasoning_state(self, context: PromptContext) -> tuple[bool, bool]:
        """Return two booleans: whether the prompt ends inside the reasoning, and whether it has ended the reasoning. If
        the answer continues a message in which no reasoning is open, the reasoning counts as ended.
        """
        if self.thinking is None:
            return False, False
        if context.continued_message is not None:
            is_started = (
                self.thinking.begin in context.continued_message and self.thinking.end not in context.continued_message
            )
            return is_started, not is_started
        prompt = context.prompt.rstrip()
        return prompt.endswith(self.thinking.begin), prompt.endswith(self.thinking.end)


NEWLINES: GrammarForm = {"type": "regex", "pattern": r"\n{0,2}"}
