"""Checks a grammar before ranks get it: compiles it and takes random walks through it, as a model would."""

import re

import numpy as np

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.limits import Stopwatch
from cluster.grammar.matching import Matchers, TextMatcher
from cluster.grammar.sources import portable
from cluster.grammar.vocabulary import Vocabulary, one_of

MAX_COMPILED = 64 << 20  # bytes of a compiled grammar, in each rank that reads it, with a small vocabulary
COMPILED_PER_ID = 1 << 10  # the same limit per id of a large vocabulary, because a mask has one bit per id
SHOWN = 300  # characters of xgrammar's error message that a client sees
WALKS = 3
WALK_TOKENS = 48
SLOW_TOKEN_S = 0.005  # processor time per token, averaged over a walk
# xgrammar's error messages begin with the place in xgrammar's code.
WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: |^Check failed: \(.*?\) is false: ")


class SlowGrammarError(GrammarError):
    """A grammar is refused because computing its masks takes too long."""


class Worker:
    """Compiles and tries out grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._matchers = Matchers(vocabulary)

    def prepare(self) -> None:
        """Prepare what every grammar needs. Forks of this process inherit it."""
        self._matchers.prepare()

    def compile(self, grammar: Grammar) -> str:
        """Compile a grammar, try it out, and return it as the text that ranks read (`Matchers.read`).

        Raises:
            GrammarError: the grammar is refused; the message says why.
            SlowGrammarError: the grammar is refused because computing its masks takes too long.
            MemoryError: there is too little memory.
        """
        text = portable(grammar).text()
        try:
            size = self._matchers.read(text).bytes
        except GrammarError as error:
            raise GrammarError(shortened(str(error))) from error
        if size > (most := max_compiled(len(self._vocabulary.tokens))):
            raise GrammarError(f"compiled it is larger than {most >> 20} MiB; bound fewer or shorter strings")
        for seed in range(WALKS):
            try_out(self._matchers.matcher(text), self._vocabulary, seed)
        return text


def max_compiled(ids: int) -> int:
    """Return the maximum size, in bytes, of a compiled grammar over a vocabulary of `ids` tokens."""
    return max(MAX_COMPILED, COMPILED_PER_ID * ids)


def shortened(reason: str) -> str:
    """Return xgrammar's error message on one line, without the place in xgrammar's code, cut to `SHOWN` characters."""
    line = " ".join(WHERE.sub("", WHERE.sub("", reason.strip())).split())
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def try_out(matcher: TextMatcher, vocabulary: Vocabulary, seed: int) -> None:
    """Take one random walk through a grammar, as a model would.

    Raises:
        GrammarError: the grammar has a dead end.
        SlowGrammarError: computing the masks takes too long.
    """
    random = np.random.default_rng(seed)
    row = np.zeros(vocabulary.words, np.int32)
    text_row = ~vocabulary.stop_row
    watch = Stopwatch()
    for step in range(WALK_TOKENS):
        matcher.fill((), row)
        row &= text_row
        if not row.any():
            if not matcher.finished:
                raise GrammarError("nothing can match" if not step else "it has a dead end: nothing can follow there")
            break
        matcher.accept([one_of(row, random)])
        spent = watch.read().processor
        if spent > SLOW_TOKEN_S * (step + 20):
            raise SlowGrammarError(
                f"it is too ambiguous: a token takes {1000 * spent / (step + 1):.0f} ms; make it simpler"
            )
