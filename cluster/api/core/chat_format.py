"""How one chat is answered: the parser and the grammar that follow from the model's format of reasoning and calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.api.core.constraints import OutputConstraint, refused
from cluster.api.core.errors import ApiError
from cluster.api.core.protocol import ChatRequest
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.api.core.tools import ChatCustomTool, Function
from cluster.chat.custom import FIELD, CustomReader, schema_of_input
from cluster.chat.formats.plan import Answer, ChatFormat, Form, Prompted, json_value, with_tokens
from cluster.chat.json_text import loaded
from cluster.chat.reading import AnswerReader, Tools
from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.regex import parse

ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How the answer to one chat is parsed and constrained. If `format` is None, it is parsed as plain text.

    `tools` has the argument schemas of the callable tools. If `split` is true, reasoning is separated from the text.
    `prompted` is what precedes the answer. `special` has the special tokens that the text keeps, because the parser
    needs them. `constraint` is the grammar of the answer. `custom` names all custom tools. `warnings` say what is not
    enforced.
    """

    format: ChatFormat | None = None
    tools: Tools | None = None
    split: bool = True
    prompted: Prompted = field(default_factory=Prompted)
    special: Mapping[int, str] | None = None
    constraint: OutputConstraint | None = None
    custom: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    def reader(self) -> AnswerReader | None:
        """Return a new parser for one answer, or None if the answer is plain text."""
        if self.format is None:
            return None
        reader = self.format.reader(self.tools, self.split, self.prompted)
        return CustomReader(reader, self.custom) if self.custom else reader


def chat_of(tokenizer: ChatTokenizer, fields: ChatRequest, prompt: str) -> ChatOutput:
    """Return how the answer to a request is parsed and constrained. `prompt` is the rendered prompt.

    Raises:
        ApiError: 400 if the request's tools cannot be called in this model's format, or its output constraint is
            malformed.
    """
    callable_tools = fields.callable_tools
    format = tokenizer.chosen.format
    if callable_tools and tokenizer.chosen.calls == "none":
        message = (
            "tools: it is not known how this model writes calls; leave them out, send tool_choice: none, or start the "
            "server with a tool_call_parser"
        )
        raise ApiError(message, param="tools", code="unsupported_parameter")
    asked = fields.constraint()
    prompted = Prompted(prompt, fields.messages[-1].content if fields.continue_final_message else None)
    if format is None or not format.reads(bool(callable_tools), prompted):
        return ChatOutput(constraint=asked)
    special = {token: name for token, name in tokenizer.special.items() if name in format.special}
    functions, warnings = _functions(format, fields)
    try:
        held = _held(format, fields, functions, asked, prompted)
    except GrammarError as error:
        raise refused(error, "tools" if fields.callable_tools or asked is None else asked.field) from None
    if held is not None:
        form = with_tokens(held.form, {name: token for token, name in special.items()})
        text = json.dumps({"type": "structural_tag", "format": form})
        asked = OutputConstraint(held.field, Grammar("chat", text))
    schemas = {function.name: function.schema_of_arguments for function in functions}
    custom = frozenset(tool.custom.name for tool in fields.served_tools if isinstance(tool, ChatCustomTool))
    split = fields.separate_reasoning
    return ChatOutput(format, schemas or None, split, prompted, special, asked, custom, tuple(warnings))


def _functions(format: ChatFormat, fields: ChatRequest) -> tuple[list[Function], list[str]]:
    """Return the callable functions, and warnings. A custom tool becomes a function with one string argument. If the
    tool's grammar cannot be enforced in this format, any string is allowed, and a warning says so.
    """
    functions, warnings = list[Function](), list[str]()
    for tool in fields.callable_tools:
        function = tool.function
        if isinstance(tool, ChatCustomTool) and tool.grammar is not None:
            why = "only regular expressions can be" if tool.grammar.syntax != "regex" else _refusal(format, function)
            if why:
                place = f"tools.{fields.tools.index(tool)}.custom.format"
                why = " ".join(why.split())  # the warning goes into a header, which must be one line
                warnings.append(f"{place}: the grammar is shown to the model and not enforced: {why}")
                function = function.model_copy(update={"parameters": schema_of_input(), "strict": None})
        functions.append(function)
    return functions, warnings


def _refusal(format: ChatFormat, function: Function) -> str:
    """Return why the pattern of a custom tool's input cannot be enforced, or an empty string if it can."""
    try:
        parse(function.schema_of_arguments["properties"][FIELD]["pattern"])
        format.written({function.name: function.schema_of_arguments}, False)
    except GrammarError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class _Held:
    """`form` is the grammar of a whole answer. Errors about this grammar name `field`."""

    field: str
    form: Form


def _held(
    format: ChatFormat,
    fields: ChatRequest,
    functions: Sequence[Function],
    asked: OutputConstraint | None,
    prompted: Prompted,
) -> _Held | None:
    """Return the grammar of the whole answer, or None if the model may write anything."""
    choice = fields.choice
    answer: Answer = None if asked is None else _form_of(asked.grammar)
    if not functions:
        return None if asked is None else _Held(asked.field, format.form(answer, None, prompted))
    several = fields.parallel_tool_calls and not choice.single
    if choice.mode == "required":
        calls = format.written({function.name: function.schema_of_arguments for function in functions}, several)
        return _Held("tools", format.form(None, calls, prompted))
    strict = any(function.strict for function in functions)
    if asked is None and several and not strict and choice.names is None:
        return None  # no grammar where none is needed: it costs time in every step
    calls = format.written({function.name: _schema(function) for function in functions}, several)
    return _Held("tools" if asked is None else asked.field, format.form(answer or "free", calls, prompted))


def _schema(function: Function) -> Mapping[str, Any]:
    """Return the schema of arguments that is enforced if calls are optional. If the tool is not strict, any object is
    allowed.
    """
    return function.schema_of_arguments if function.strict else ANY_ARGUMENTS


def _form_of(grammar: Grammar) -> Form:
    """Return a request's grammar as a part that fits into a larger structural tag."""
    match grammar.kind:
        case "json_schema":
            return {**json_value(grammar.text), "compact": grammar.compact}
        case "json_object":
            return {**json_value(ANY_ARGUMENTS), "compact": grammar.compact}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            return {
                "type": "or",
                "elements": [{"type": "const_string", "value": one} for one in json.loads(grammar.text)],
            }
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case _:
            tag = loaded(grammar.text)
            if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
                raise GrammarError(
                    "beside tools, and where the model thinks, the format of a structural tag must be an object"
                )
            return dict(tag["format"])
