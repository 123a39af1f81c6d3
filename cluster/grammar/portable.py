"""Grammars as they travel to ranks: what xgrammar compiles, which is text of a few kilobytes.

A compiled grammar has masks over all tokens of the vocabulary for each of its places. These are megabytes, and reading
them takes longer than compiling the text again.
"""

import json
from dataclasses import dataclass
from typing import Self

from cluster.grammar.asked import GrammarError


@dataclass(frozen=True, slots=True)
class PortableGrammar:
    """`source` is rules in xgrammar's notation or, with `tag`, a structural tag as JSON, in which the special `tokens`
    stand.
    """

    source: str
    tag: bool = False
    tokens: tuple[int, ...] = ()

    def text(self) -> str:
        """The same as one text."""
        return json.dumps({"tag": self.tag, "tokens": self.tokens}) + "\n" + self.source

    @classmethod
    def of(cls, text: str) -> Self:
        """What `text` made.

        Raises:
            GrammarError: it is something else.
        """
        head, newline, source = text.partition("\n")
        try:
            fields = json.loads(head)
            found = cls(source, bool(fields["tag"]), tuple(map(int, fields["tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise GrammarError("the compiled grammar cannot be read: it has no head") from error
        if not newline:
            raise GrammarError("the compiled grammar cannot be read: it is cut")
        return found
