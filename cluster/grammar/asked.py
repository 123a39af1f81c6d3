"""The grammar that a request asks its output to follow, as plain values that can be serialised."""

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag", "chat"]


class GrammarError(ValueError):
    """A grammar is refused, or an output does not match its grammar. The message says why."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as the client wrote it.

    The content of `text` depends on `kind`:

    - json_object: empty.
    - json_schema: the schema, as JSON.
    - regex: the regular expression.
    - ebnf: rules in GBNF (llama.cpp's notation, as xgrammar reads it); the first rule is called root.
    - choice: a JSON list of strings.
    - structural_tag: xgrammar's structural tag, as JSON.
    - chat: a structural tag that may also contain token ids. Only this server writes it, never a client.

    If `compact`, JSON in the output has no white space between JSON tokens.
    """

    kind: GrammarKind
    text: str = ""
    compact: bool = False
