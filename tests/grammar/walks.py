"""Outputs as a model might make them: token by token through the masks, at random."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from cluster.grammar.asked import Grammar
from cluster.grammar.matching import Matchers, TextMatcher
from cluster.grammar.vocabulary import Bitmask, Vocabulary
from cluster.grammar.worker import Worker
from cluster.tokenizer.tokenizer import TextTokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
STOPS = (0, 2)
CLOSING = (b'"', b"}", b"]", b":", b",", *(b"%d" % digit for digit in range(10)))


@dataclass(frozen=True)
class Grammars:
    """A vocabulary with what compiles and matches for it, in this process."""

    vocabulary: Vocabulary
    worker: Worker
    matchers: Matchers

    def matcher(self, grammar: Grammar, after: tuple[int, ...] = ()) -> TextMatcher:
        return self.matchers.matcher(self._compiled(grammar), after)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether a text is in the grammar; `compiled` once for each grammar."""
        matcher = self.matchers.matcher(self._compiled(grammar))._matcher
        return bool(matcher.accept_string(text)) and bool(matcher.is_completed())

    @cache  # noqa: B019
    def _compiled(self, grammar: Grammar) -> str:
        return self.worker.compile(grammar)


def grammars_of(vocabulary: Vocabulary) -> Grammars:
    return Grammars(vocabulary, Worker(vocabulary), Matchers(vocabulary))


@cache
def demo() -> Grammars:
    return grammars_of(Vocabulary.from_tokenizer(TextTokenizer.load(str(DEMO)), 2048, STOPS))


@cache
def bytewise() -> Grammars:
    """256 tokens of one byte each, and one that stops: where every byte of an output is a choice."""
    return grammars_of(Vocabulary((*(bytes((byte,)) for byte in range(256)), b""), (256,)))


def mask(matcher: TextMatcher, vocabulary: Vocabulary, path: tuple[int, ...] = ()) -> Bitmask:
    row = np.full(vocabulary.bitmask_words, 0x55555555, np.int32)  # whatever was there before
    matcher.fill(path, row)
    return row


def allowed(row: Bitmask) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def rank(text: bytes) -> int:
    return CLOSING.index(text) if text in CLOSING else 100 + text.isalnum()


def walk(grammars: Grammars, matcher: TextMatcher, seed: int, most: int = 25, end: int = 400) -> bytes | None:
    """An output: `most` tokens at random, then whatever closes soonest. None if it has no end after `end` tokens."""
    random = np.random.default_rng(seed)
    tokens = grammars.vocabulary.tokens
    output = b""
    steered: Counter[int] = Counter()  # how often a token was taken to come to an end; what is of no use is taken less
    for step in range(end):
        found = allowed(mask(matcher, grammars.vocabulary))
        assert len(found), f"a dead end after {output!r}"
        stops = [token for token in grammars.vocabulary.stop_token_ids if token in found]
        assert bool(stops) == matcher.finished
        if stops and (step >= most or len(stops) == len(found) or random.random() < 0.1):
            matcher.accept([stops[0]])
            assert matcher.ended
            return output
        if step >= most:
            costs = {
                token: (
                    len(tokens[token]) != 1,
                    steered[token] // (30 if tokens[token] in CLOSING[:3] else 3),
                    rank(tokens[token]),
                )
                for token in found
            }
            found = np.array([min(found, key=lambda token: costs[token])])
        token = int(random.choice(found))
        steered[token] += step >= most
        matcher.accept([token])
        output += tokens[token]
    return None
