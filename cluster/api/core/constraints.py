"""What the answer must look like: the output constraint of a request, and the parser and grammar of a chat's answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import missing, shown, unsupported, wrong, wrong_type
from cluster.api.core.generation import GenerationFields
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.api.core.tools import ChatCustomTool, Function
from cluster.chat.blocks import loaded
from cluster.chat.custom import FIELD, CustomReader, schema_of_input
from cluster.chat.formats.plan import Answer, ChatFormat, Form, Prompted, json_value, with_tokens
from cluster.chat.reading import AnswerReader, Tools
from cluster.grammar.asked import Grammar, GrammarError, Kind
from cluster.grammar.regex import parse

# The keys of vLLM's structured_outputs. FIELDS has the fields at the top level: vLLM's older ones, and SGLang's.
STRUCTURED: dict[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
NAMES = ("response_format", "structured_outputs")
FIELDS: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
# Options of structured_outputs. COMPACT is honoured; OPTIONS must be false or absent.
COMPACT = "disable_any_whitespace"
OPTIONS = ("disable_fallback", "disable_additional_properties", "whitespace_pattern")
TYPES = ("text", "json_object", "json_schema", "structural_tag")


class OutputConstraint(NamedTuple):
    """A grammar, and the path of the field that requests it."""

    field: str
    grammar: Grammar


def constraint_of(body: Mapping[str, Any]) -> OutputConstraint | None:
    """Return the output constraint that a body requests, or None if the body requests no constraint.

    Raises:
        ApiError: 400 for a malformed field, or for two fields that each request a constraint; the error names both.
    """
    found = [*_response_format(body.get("response_format")), *_structured(body.get("structured_outputs"))]
    found += [
        OutputConstraint(name, grammar)
        for name, kind in FIELDS.items()
        if (grammar := _read(name, kind, body.get(name)))
    ]
    if len(found) > 1:
        one, two = found[0].field, found[1].field
        raise wrong(two, f"{one} asks for a form of the output too; send one of them")
    return found[0] if found else None


def constraint_in(fields: GenerationFields) -> OutputConstraint | None:
    """Return the output constraint of a parsed body; see `constraint_of`."""
    return constraint_of({name: getattr(fields, name) for name in (*NAMES, *FIELDS)})


def _response_format(value: Any) -> list[OutputConstraint]:
    if value is None:
        return []
    name = "response_format"
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind = value.get("type")
    if kind not in TYPES:
        raise wrong(f"{name}.type", f"must be one of {', '.join(TYPES)}, got {shown(kind)}")
    if kind == "structural_tag":
        return [OutputConstraint(name, Grammar("structural_tag", json.dumps(value)))]
    beside = {"json_schema": ("json_schema",), "json_object": ("schema",)}.get(kind, ())
    _only(name, value, ("type", *beside))
    if kind == "json_object":
        schema = _read(f"{name}.schema", "json_schema", value.get("schema"))
        return [
            OutputConstraint(name, Grammar("json_object"))
            if schema is None
            else OutputConstraint(f"{name}.schema", schema)
        ]
    return [_named_schema(f"{name}.json_schema", value.get("json_schema"))] if kind == "json_schema" else []


def _named_schema(name: str, value: Any) -> OutputConstraint:
    """Read OpenAI's named JSON schema. The schema is enforced even with `strict: false`."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    _only(name, value, ("name", "description", "schema", "strict"))
    for part, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(part), kind | None):
            raise wrong_type(f"{name}.{part}", "a string" if kind is str else "true or false", value[part])
    grammar = _read(f"{name}.schema", "json_schema", value.get("schema"))
    if grammar is None:
        raise missing(f"{name}.schema")
    return OutputConstraint(f"{name}.schema", grammar)


def _structured(value: Any) -> list[OutputConstraint]:
    if value is None:
        return []
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    _only(name, value, (*STRUCTURED, *OPTIONS, COMPACT))
    compact = value.get(COMPACT) or False
    if not isinstance(compact, bool):
        raise wrong_type(f"{name}.{COMPACT}", "true or false", compact)
    for option in OPTIONS:
        if value.get(option) not in (None, False):
            raise wrong(f"{name}.{option}", f"{shown(value[option])} is not supported by this server; leave it out")
    fields = ((f"{name}.{part}", _read(f"{name}.{part}", kind, value.get(part))) for part, kind in STRUCTURED.items())
    return [
        OutputConstraint(field, replace(grammar, compact=compact)) for field, grammar in fields if grammar is not None
    ]


def _read(name: str, kind: Kind, value: Any) -> Grammar | None:
    """Return the grammar in one field, or None if the field requests no grammar."""
    if value is None:
        return None
    if kind == "json_object":
        if not isinstance(value, bool):
            raise wrong_type(name, "true or false", value)
        return Grammar(kind) if value else None
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise wrong_type(name, "a list of strings", value)
        return Grammar(kind, json.dumps(value)) if value else None
    if isinstance(value, str):
        return Grammar(kind, value)
    if kind == "json_schema" and isinstance(value, dict | bool):
        return Grammar(kind, json.dumps(value))
    if kind == "structural_tag" and isinstance(value, dict):
        return Grammar(kind, json.dumps(value))
    raise wrong_type(name, "a string" if kind in ("regex", "ebnf") else "an object, or its JSON as a string", value)


def _only(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for part in value:
        if part not in known:
            raise wrong(f"{name}.{part[:60]}", f"unknown field; known are {', '.join(known)}")


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
        raise unsupported(
            "tools",
            "it is not known how this model writes calls; leave them out, send tool_choice: none, or start the server "
            "with a tool_call_parser",
        )
    asked = constraint_in(fields)
    prompted = Prompted(prompt, fields.messages[-1].content if fields.continue_final_message else None)
    if format is None or not format.reads(bool(callable_tools), prompted):
        return ChatOutput(constraint=asked)
    special = {token: name for token, name in tokenizer.special.items() if name in format.special}
    functions, warnings = _functions(format, fields)
    try:
        held = _held(format, fields, functions, asked, prompted)
    except GrammarError as error:
        raise wrong("tools" if fields.callable_tools or asked is None else asked.field, str(error)) from None
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
