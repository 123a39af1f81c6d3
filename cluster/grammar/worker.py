"""Checks a grammar before ranks get it: compiles it, and generates random tokens that it allows."""

import re

import numpy as np

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.limits import Stopwatch
from cluster.grammar.matching import Matchers, TextMatcher
from cluster.grammar.sources import to_portable
from cluster.grammar.vocabulary import Vocabulary, random_allowed_token

MAX_COMPILED_BYTES = 64 << 20  # maximum bytes of a compiled grammar in each rank, if the vocabulary is small
COMPILED_BYTES_PER_ID = 1 << 10  # the same limit per id of a large vocabulary, because a mask has one bit per id
MAX_MESSAGE_LENGTH = 300  # characters of xgrammar's error message that a client sees
NUM_WALKS = 3
WALK_TOKENS = 48
SLOW_TOKEN_S = 0.005  # a random walk may take this processor time per token, and 19 times this in addition
# xgrammar's error messages begin with the place in xgrammar's code.
CODE_LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: |^Check failed: \(.*?\) is false: ")


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
        """Compile a grammar, try it out, and return it as the text that ranks read (`Matchers.load`).

        Raises:
            GrammarError: the grammar is refused; the message says why.
            SlowGrammarError: the grammar is refused because computing its masks takes too long.
            MemoryError: there is too little memory.
        """
        text = to_portable(grammar).to_text()
        try:
            size = self._matchers.load(text).num_bytes
        except GrammarError as error:
            raise GrammarError(shorten_message(str(error))) from error
        if size > (max_size := max_compiled_bytes(len(self._vocabulary.tokens))):
            raise GrammarError(f"compiled it is larger than {max_size >> 20} MiB; bound fewer or shorter strings")
        for seed in range(NUM_WALKS):
            random_walk(self._matchers.matcher(text), self._vocabulary, seed)
        return text


def max_compiled_bytes(num_tokens: int) -> int:
    """Return the maximum size, in bytes, of a compiled grammar over a vocabulary of `num_tokens` tokens."""
    return max(MAX_COMPILED_BYTES, COMPILED_BYTES_PER_ID * num_tokens)


def shorten_message(message: str) -> str:
    """Return xgrammar's error message on one line, without xgrammar's code location, cut to `MAX_MESSAGE_LENGTH`."""
    line = " ".join(CODE_LOCATION.sub("", CODE_LOCATION.sub("", message.strip())).split())
    return line if len(line) <= MAX_MESSAGE_LENGTH else line[: MAX_MESSAGE_LENGTH - 3] + "..."


def random_walk(matcher: TextMatcher, vocabulary: Vocabulary, seed: int) -> None:
    """Commit up to `WALK_TOKENS` tokens, each a random one of the allowed tokens. `matcher` is in its first state.

    Raises:
        GrammarError: the walk reaches a place where no token is allowed and the output may not end.
        SlowGrammarError: computing the masks takes too long.
    """
    random = np.random.default_rng(seed)
    bitmask = np.zeros(vocabulary.bitmask_words, np.int32)
    not_stop_bitmask = ~vocabulary.stop_bitmask
    stopwatch = Stopwatch()
    for step in range(WALK_TOKENS):
        matcher.fill((), bitmask)
        bitmask &= not_stop_bitmask
        if not bitmask.any():
            if not matcher.finished:
                raise GrammarError("nothing can match" if not step else "it has a dead end: nothing can follow there")
            break
        matcher.accept([random_allowed_token(bitmask, random)])
        processor_s = stopwatch.measure().processor_s
        if processor_s > SLOW_TOKEN_S * (step + 20):
            raise SlowGrammarError(
                f"it is too ambiguous: a token takes {1000 * processor_s / (step + 1):.0f} ms; make it simpler"
            )
