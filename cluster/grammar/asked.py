"""What a request asks of its output's form, as plain values that travel, and why that may be refused."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag", "chat"]


class GrammarError(ValueError):
    """A grammar that is not honoured, or an output that is not in it; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as the client wrote it.

    `text` is by `kind`: json_object: empty. json_schema: the schema, as JSON. regex: the expression. ebnf: rules in
    GBNF (llama.cpp's notation, as xgrammar reads it), the first of them called root. choice: a JSON list of strings.
    structural_tag: xgrammar's structural tag, as JSON. chat: the same, in which tokens may stand; no client writes one.
    `compact`: JSON without white space between its tokens.
    """

    kind: Kind
    text: str = ""
    compact: bool = False
