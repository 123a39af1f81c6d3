"""What a chat's answer is read by and held to, by the model's format of calls and thought."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.api.openai.constraints import Constraint, refused
from cluster.api.openai.errors import ApiError
from cluster.api.openai.protocol import ChatRequest
from cluster.api.openai.tokenizer import ChatTokenizer
from cluster.api.openai.tools import Tool
from cluster.chat.formats.plan import Answer, Form, Format, Prompted, json_value, with_tokens
from cluster.chat.json_text import loaded
from cluster.chat.reading import Reader, Tools
from cluster.grammar.asked import Grammar, GrammarError

ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class Chat:
    """How one chat is answered: by a format, or as mere text without one. `tools` are those that may be called."""

    format: Format | None = None
    tools: Tools | None = None
    split: bool = True
    prompted: Prompted = field(default_factory=Prompted)
    special: Mapping[int, str] | None = None
    constraint: Constraint | None = None

    def reader(self) -> Reader | None:
        """A reader for one answer; None where it is mere text."""
        return None if self.format is None else self.format.reader(self.tools, self.split, self.prompted)


def chat_of(tokenizer: ChatTokenizer, fields: ChatRequest, prompt: str) -> Chat:
    """How a request whose prompt is `prompt` is answered.

    Raises:
        ApiError: 400: its tools cannot be called in this model's format, or what it asks of the output is malformed.
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
        return Chat(constraint=asked)
    special = {token: name for token, name in tokenizer.special.items() if name in format.special}
    try:
        held = _held(format, fields, asked, prompted)
    except GrammarError as error:
        raise refused(error, "tools" if fields.callable_tools or asked is None else asked.field) from None
    if held is not None:
        form = with_tokens(held.form, {name: token for token, name in special.items()})
        text = json.dumps({"type": "structural_tag", "format": form})
        asked = Constraint(held.field, Grammar("chat", text))
    schemas = {tool.function.name: tool.function.schema_of_arguments for tool in callable_tools}
    return Chat(format, schemas or None, fields.separate_reasoning, prompted, special, asked)


@dataclass(frozen=True, slots=True)
class _Held:
    """The form of a whole answer, and the field that asked for it."""

    field: str
    form: Form


def _held(format: Format, fields: ChatRequest, asked: Constraint | None, prompted: Prompted) -> _Held | None:
    """What an answer is held to; nothing where it is free."""
    tools, choice = fields.callable_tools, fields.choice
    answer: Answer = None if asked is None else _form_of(asked.grammar)
    if not tools:
        return None if asked is None else _Held(asked.field, format.form(answer, None, prompted))
    several = fields.parallel_tool_calls and not choice.single
    if choice.mode == "required":
        calls = format.written({tool.function.name: tool.function.schema_of_arguments for tool in tools}, several)
        return _Held("tools", format.form(None, calls, prompted))
    strict = any(tool.function.strict for tool in tools)
    if asked is None and several and not strict and choice.names is None:
        return None
    calls = format.written({tool.function.name: _schema(tool) for tool in tools}, several)
    return _Held("tools" if asked is None else asked.field, format.form(answer or "free", calls, prompted))


def _schema(tool: Tool) -> Mapping[str, Any]:
    """What the arguments are held to where the model need not call: the schema if it is strict."""
    return tool.function.schema_of_arguments if tool.function.strict else ANY_ARGUMENTS


def _form_of(grammar: Grammar) -> Form:
    """A grammar that a request asks for, as a part of a larger one."""
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
