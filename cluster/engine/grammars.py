"""Matchers of compiled grammars. What reads them is imported with the first constrained request: it takes seconds."""

from typing import TYPE_CHECKING

from cluster.forward.grammars import Matcher

if TYPE_CHECKING:
    from cluster.grammar.matching import Matchers


class LateMatchers:
    """Makes matchers over the tokens of one model."""

    def __init__(self, tokenizer_path: str, vocab: int, ends: tuple[int, ...]) -> None:
        """`tokenizer_path` is the folder of the tokenizer, `ends` are the tokens that end a text."""
        self._given = tokenizer_path, vocab, ends
        self._matchers: Matchers | None = None

    def __call__(self, grammar: str) -> Matcher:
        """The matcher of a compiled grammar, at its beginning."""
        if self._matchers is None:
            from cluster.grammar.matching import Matchers

            self._matchers = Matchers(*self._given)
        return self._matchers.of(grammar)
