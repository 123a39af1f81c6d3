"""The form in which grammars are sent to ranks: xgrammar's source text, usually a few kilobytes.

Compiled grammars are not sent. They have a mask over all tokens of the vocabulary for each of their states. The masks
take megabytes, and reading them takes longer than compiling the text again.
"""

import json
from dataclasses import dataclass
from typing import Self

from cluster.grammar.asked import GrammarError


@dataclass(frozen=True, slots=True)
class PortableGrammar:
    """A grammar for ranks. If `is_structural_tag`, `source` is a structural tag as JSON; otherwise it is rules in
    xgrammar's notation. `special_token_ids` are the ids of the special tokens in the tag.
    """

    source: str
    is_structural_tag: bool = False
    special_token_ids: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Return the grammar as one text."""
        return json.dumps({"tag": self.is_structural_tag, "tokens": self.special_token_ids}) + "\n" + self.source

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse a text that the method `to_text` returned.

        Raises:
            GrammarError: `to_text` cannot have returned the text.
        """
        header, newline, source = text.partition("\n")
        try:
            fields = json.loads(header)
            grammar = cls(source, bool(fields["tag"]), tuple(map(int, fields["tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise GrammarError("the compiled grammar cannot be read: it has no header") from error
        if not newline:
            raise GrammarError("the compiled grammar cannot be read: it is cut off")
        return grammar
