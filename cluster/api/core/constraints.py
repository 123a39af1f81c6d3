"""What the answer must look like: the output constraint of a request, and the parser and grammar of a chat's answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import (
    invalid_type,
    invalid_value,
    missing_parameter,
    truncated_repr,
    unsupported_parameter,
)
from cluster.api.core.generation import GenerationFields
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.api.core.tools import ChatCustomTool, Function
from cluster.chat.blocks import try_parse_json
from cluster.chat.custom import INPUT_FIELD, CustomReader, input_schema
from cluster.chat.formats.plan import AnswerForm, ChatFormat, GrammarForm, PromptContext, json_value, with_token_ids
from cluster.chat.reading import AnswerReader, Tools
from cluster.grammar.asked import Grammar, GrammarError, GrammarKind
from cluster.grammar.regex import parse

# STRUCTURED_OUTPUTS_KINDS maps the keys of vLLM's `structured_outputs` to kinds of grammars. TOP_LEVEL_KINDS does the
# same for fields at the top level of a body: older fields of vLLM, and fields of SGLang. The values of OBJECT_FIELDS
# are objects.
STRUCTURED_OUTPUTS_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
OBJECT_FIELDS = ("response_format", "structured_outputs")
TOP_LEVEL_KINDS: dict[str, GrammarKind] = {
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
# Options of structured_outputs. COMPACT_OPTION is honoured; UNSUPPORTED_OPTIONS must be false or absent.
COMPACT_OPTION = "disable_any_whitespace"
UNSUPPORTED_OPTIONS = ("disable_fallback", "disable_additional_properties", "whitespace_pattern")
RESPONSE_FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")


class OutputConstraint(NamedTuple):
    """A grammar, and the path of the field that requests it."""

    field: str
    grammar: Grammar


def constraint_of(body: Mapping[str, Any]) -> OutputConstraint | None:
    """Return the output constraint that a body requests, or None if the body requests no constraint.

    Raises:
        ApiError: 400 for a malformed field, or for two fields that each request a constraint; the error names both.
    """
    constraints = [
        *_response_format_constraints(body.get("response_format")),
        *_structured_outputs_constraints(body.get("structured_outputs")),
    ]
    constraints += [
        OutputConstraint(name, grammar)
        for name, kind in TOP_LEVEL_KINDS.items()
        if (grammar := _grammar_of_field(name, kind, body.get(name)))
    ]
    if len(constraints) > 1:
        first_field, second_field = constraints[0].field, constraints[1].field
        raise invalid_value(second_field, f"{first_field} asks for a form of the output too; send one of them")
    return constraints[0] if constraints else None


def constraint_of_request(fields: GenerationFields) -> OutputConstraint | None:
    """Return the output constraint of a parsed body; see `constraint_of`."""
    return constraint_of({name: getattr(fields, name) for name in (*OBJECT_FIELDS, *TOP_LEVEL_KINDS)})


def _response_format_constraints(value: Any) -> list[OutputConstraint]:
    if value is None:
        return []
    name = "response_format"
    if not isinstance(value, dict):
        raise invalid_type(name, "an object", value)
    format_type = value.get("type")
    if format_type not in RESPONSE_FORMAT_TYPES:
        raise invalid_value(
            f"{name}.type", f"must be one of {', '.join(RESPONSE_FORMAT_TYPES)}, got {truncated_repr(format_type)}"
        )
    if format_type == "structural_tag":
        return [OutputConstraint(name, Grammar("structural_tag", json.dumps(value)))]
    extra_fields = {"json_schema": ("json_schema",), "json_object": ("schema",)}.get(format_type, ())
    _check_known_fields(name, value, ("type", *extra_fields))
    if format_type == "json_object":
        schema = _grammar_of_field(f"{name}.schema", "json_schema", value.get("schema"))
        return [
            OutputConstraint(name, Grammar("json_object"))
            if schema is None
            else OutputConstraint(f"{name}.schema", schema)
        ]
    return [_named_schema(f"{name}.json_schema", value.get("json_schema"))] if format_type == "json_schema" else []


def _named_schema(name: str, value: Any) -> OutputConstraint:
    """Read OpenAI's named JSON schema. The schema is enforced even with `strict: false`."""
    if not isinstance(value, dict):
        raise invalid_type(name, "an object", value)
    _check_known_fields(name, value, ("name", "description", "schema", "strict"))
    for key, expected_type in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(key), expected_type | None):
            raise invalid_type(f"{name}.{key}", "a string" if expected_type is str else "true or false", value[key])
    grammar = _grammar_of_field(f"{name}.schema", "json_schema", value.get("schema"))
    if grammar is None:
        raise missing_parameter(f"{name}.schema")
    return OutputConstraint(f"{name}.schema", grammar)


def _structured_outputs_constraints(value: Any) -> list[OutputConstraint]:
    if value is None:
        return []
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid_type(name, "an object", value)
    _check_known_fields(name, value, (*STRUCTURED_OUTPUTS_KINDS, *UNSUPPORTED_OPTIONS, COMPACT_OPTION))
    compact = value.get(COMPACT_OPTION) or False
    if not isinstance(compact, bool):
        raise invalid_type(f"{name}.{COMPACT_OPTION}", "true or false", compact)
    for option in UNSUPPORTED_OPTIONS:
        if value.get(option) not in (None, False):
            raise invalid_value(
                f"{name}.{option}", f"{truncated_repr(value[option])} is not supported by this server; leave it out"
            )
    grammars = (
        (f"{name}.{key}", _grammar_of_field(f"{name}.{key}", kind, value.get(key)))
        for key, kind in STRUCTURED_OUTPUTS_KINDS.items()
    )
    return [
        OutputConstraint(path, replace(grammar, compact=compact)) for path, grammar in grammars if grammar is not None
    ]


def _grammar_of_field(name: str, kind: GrammarKind, value: Any) -> Grammar | None:
    """Return the grammar in one field, or None if the field requests no grammar."""
    if value is None:
        return None
    if kind == "json_object":
        if not isinstance(value, bool):
            raise invalid_type(name, "true or false", value)
        return Grammar(kind) if value else None
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise invalid_type(name, "a list of strings", value)
        return Grammar(kind, json.dumps(value)) if value else None
    if isinstance(value, str):
        return Grammar(kind, value)
    if kind == "json_schema" and isinstance(value, dict | bool):
        return Grammar(kind, json.dumps(value))
    if kind == "structural_tag" and isinstance(value, dict):
        return Grammar(kind, json.dumps(value))
    raise invalid_type(name, "a string" if kind in ("regex", "ebnf") else "an object, or its JSON as a string", value)


def _check_known_fields(name: str, value: Mapping[str, Any], known_fields: tuple[str, ...]) -> None:
    for key in value:
        if key not in known_fields:
            raise invalid_value(f"{name}.{key[:60]}", f"unknown field; known are {', '.join(known_fields)}")


ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How the answer to one chat is parsed and constrained. If `format` is None, the answer is plain text.

    `tools` maps the names of the callable tools to the schemas of their arguments; None means that there are none. If
    `separate_reasoning` is true, reasoning is separated from the text. `prompted` holds the prompt, and the message
    that the answer continues. `special_tokens` has the special tokens that stay in the text, because the parser needs
    them. `constraint` is the grammar of the answer; None allows any answer. `custom_tools` has the names of the
    request's custom tools. `warnings` say which grammars of custom tools are not enforced.
    """

    format: ChatFormat | None = None
    tools: Tools | None = None
    separate_reasoning: bool = True
    prompted: PromptContext = field(default_factory=PromptContext)
    special_tokens: Mapping[int, str] | None = None
    constraint: OutputConstraint | None = None
    custom_tools: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    def reader(self) -> AnswerReader | None:
        """Return a new parser for one answer, or None if the answer is plain text."""
        if self.format is None:
            return None
        reader = self.format.reader(self.tools, self.separate_reasoning, self.prompted)
        return CustomReader(reader, self.custom_tools) if self.custom_tools else reader


def chat_output_of(tokenizer: ChatTokenizer, fields: ChatRequest, prompt: str) -> ChatOutput:
    """Return how the answer to a request is parsed and constrained. `prompt` is the rendered prompt.

    Raises:
        ApiError: 400 if the request's tools cannot be called in this model's format, or its output constraint is
            malformed.
    """
    callable_tools = fields.callable_tools
    chat_format = tokenizer.chosen_format.format
    if callable_tools and tokenizer.chosen_format.call_format == "none":
        raise unsupported_parameter(
            "tools",
            "it is not known how this model writes calls; leave them out, send tool_choice: none, or start the server "
            "with a tool_call_parser",
        )
    constraint = constraint_of_request(fields)
    prompted = PromptContext(prompt, fields.messages[-1].content if fields.continue_final_message else None)
    if chat_format is None or not chat_format.needs_reader(bool(callable_tools), prompted):
        return ChatOutput(constraint=constraint)
    special_tokens = {
        token: name for token, name in tokenizer.special_tokens.items() if name in chat_format.special_tokens
    }
    functions, warnings = _callable_functions(chat_format, fields)
    try:
        answer_grammar = _answer_grammar(chat_format, fields, functions, constraint, prompted)
    except GrammarError as error:
        raise invalid_value(
            "tools" if fields.callable_tools or constraint is None else constraint.field, str(error)
        ) from None
    if answer_grammar is not None:
        form = with_token_ids(answer_grammar.form, {name: token for token, name in special_tokens.items()})
        text = json.dumps({"type": "structural_tag", "format": form})
        constraint = OutputConstraint(answer_grammar.field, Grammar("chat", text))
    argument_schemas = {function.name: function.schema_of_arguments for function in functions}
    custom_names = frozenset(tool.custom.name for tool in fields.supported_tools if isinstance(tool, ChatCustomTool))
    separate_reasoning = fields.separate_reasoning
    return ChatOutput(
        chat_format,
        argument_schemas or None,
        separate_reasoning,
        prompted,
        special_tokens,
        constraint,
        custom_names,
        tuple(warnings),
    )


def _callable_functions(chat_format: ChatFormat, fields: ChatRequest) -> tuple[list[Function], list[str]]:
    """Return the tools that the answer may call as functions, and warnings. A custom tool becomes a function with one
    string argument. If the tool's grammar cannot be enforced in this format, any string is allowed, and a warning says
    so.
    """
    functions, warnings = list[Function](), list[str]()
    for tool in fields.callable_tools:
        function = tool.function
        if isinstance(tool, ChatCustomTool) and tool.grammar is not None:
            reason = (
                "only regular expressions can be"
                if tool.grammar.syntax != "regex"
                else _unenforceable_reason(chat_format, function)
            )
            if reason:
                path = f"tools.{fields.tools.index(tool)}.custom.format"
                reason = " ".join(reason.split())  # the warning goes into a header, which must be one line
                warnings.append(f"{path}: the grammar is shown to the model and not enforced: {reason}")
                function = function.model_copy(update={"parameters": input_schema(), "strict": None})
        functions.append(function)
    return functions, warnings


def _unenforceable_reason(chat_format: ChatFormat, function: Function) -> str:
    """Return why the pattern of a custom tool's input cannot be enforced, or an empty string if it can be."""
    try:
        parse(function.schema_of_arguments["properties"][INPUT_FIELD]["pattern"])
        chat_format.calls_form({function.name: function.schema_of_arguments}, False)
    except GrammarError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class _AnswerGrammar:
    """`form` is the grammar of a whole answer. Errors about this grammar name `field`."""

    field: str
    form: GrammarForm


def _answer_grammar(
    chat_format: ChatFormat,
    fields: ChatRequest,
    functions: Sequence[Function],
    constraint: OutputConstraint | None,
    prompted: PromptContext,
) -> _AnswerGrammar | None:
    """Return the grammar of the whole answer (reasoning, text and calls), or None if the model may write anything."""
    choice = fields.choice
    answer_form: AnswerForm = None if constraint is None else _form_of(constraint.grammar)
    if not functions:
        return (
            None
            if constraint is None
            else _AnswerGrammar(constraint.field, chat_format.answer_form(answer_form, None, prompted))
        )
    allow_parallel = fields.parallel_tool_calls and not choice.single
    if choice.mode == "required":
        call_form = chat_format.calls_form(
            {function.name: function.schema_of_arguments for function in functions}, allow_parallel
        )
        return _AnswerGrammar("tools", chat_format.answer_form(None, call_form, prompted))
    has_strict = any(function.strict for function in functions)
    if constraint is None and allow_parallel and not has_strict and choice.names is None:
        return None  # no grammar where none is needed: it costs time in every step
    call_form = chat_format.calls_form(
        {function.name: _enforced_schema(function) for function in functions}, allow_parallel
    )
    return _AnswerGrammar(
        "tools" if constraint is None else constraint.field,
        chat_format.answer_form(answer_form or "free", call_form, prompted),
    )


def _enforced_schema(function: Function) -> Mapping[str, Any]:
    """Return the schema that the arguments of a call must match if the answer need not call a tool. If the tool is not
    strict, any object matches.
    """
    return function.schema_of_arguments if function.strict else ANY_ARGUMENTS


def _form_of(grammar: Grammar) -> GrammarForm:
    """Return a request's grammar in the form that may be a part of a larger structural tag.

    Raises:
        GrammarError: the grammar is a structural tag without a `format` object.
    """
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
                "elements": [{"type": "const_string", "value": choice} for choice in json.loads(grammar.text)],
            }
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case _:
            tag = try_parse_json(grammar.text)
            if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
                raise GrammarError("together with tools or reasoning, the format of a structural tag must be an object")
            return dict(tag["format"])
