"""Generates random outputs of grammars as a model would: each token is chosen from those that the mask allows."""

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
STOP_TOKEN_IDS = (0, 2)
CLOSING = (b'"', b"}", b"]", b":", b",", *(b"%d" % digit for digit in range(10)))


@dataclass(frozen=True)
class Grammars:
    """A vocabulary, and the compiler and the matchers for it. The compiler runs in this process."""

    vocabulary: Vocabulary
    worker: Worker
    matchers: Matchers

    def matcher(self, grammar: Grammar, after: tuple[int, ...] = ()) -> TextMatcher:
        return self.matchers.matcher(self._compiled(grammar), after)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Return whether the grammar accepts the whole text. Each grammar is compiled once."""
        matcher = self.matchers.matcher(self._compiled(grammar))._matcher
        return bool(matcher.accept_string(text)) and bool(matcher.is_completed())

    @cache  # noqa: B019
    def _compiled(self, grammar: Grammar) -> str:
        return self.worker.compile(grammar)


def grammars_of(vocabulary: Vocabulary) -> Grammars:
    return Grammars(vocabulary, Worker(vocabulary), Matchers(vocabulary))


@cache
def demo() -> Grammars:
    """Return the grammars over the vocabulary of the demo target."""
    return grammars_of(Vocabulary.from_tokenizer(TextTokenizer.load(str(DEMO)), 2048, STOP_TOKEN_IDS))


@cache
def bytewise() -> Grammars:
    """Return the grammars over a vocabulary of 256 tokens of one byte each and one stop token, 256.

    With this vocabulary each byte of an output is chosen separately.
    """
    return grammars_of(Vocabulary((*(bytes((byte,)) for byte in range(256)), b""), (256,)))


def mask(matcher: TextMatcher, vocabulary: Vocabulary, path: tuple[int, ...] = ()) -> Bitmask:
    """Return the mask of the tokens that are allowed after the committed tokens and `path`."""
    row = np.full(vocabulary.bitmask_words, 0x55555555, np.int32)  # old content, which `fill` must overwrite
    matcher.fill(path, row)
    return row


def allowed(row: Bitmask) -> np.ndarray:
    """Return the ids of the tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def closing_rank(text: bytes) -> int:
    """Return the rank of a token when an output must end soon. The token with the lowest rank is taken."""
    return CLOSING.index(text) if text in CLOSING else 100 + text.isalnum()


def walk(
    grammars: Grammars, matcher: TextMatcher, seed: int, free_tokens: int = 25, max_tokens: int = 400
) -> bytes | None:
    """Generate an output: `free_tokens` random tokens, then tokens that end the output soon.

    Return None if the output has not ended after `max_tokens` tokens.
    """
    random = np.random.default_rng(seed)
    tokens = grammars.vocabulary.tokens
    output = b""
    # How often each token was taken to end the output. A token that was taken often does not help, and is avoided.
    steered_counts: Counter[int] = Counter()
    for step in range(max_tokens):
        allowed_ids = allowed(mask(matcher, grammars.vocabulary))
        assert len(allowed_ids), f"no token is allowed after {output!r}"
        stop_ids = [token for token in grammars.vocabulary.stop_token_ids if token in allowed_ids]
        assert bool(stop_ids) == matcher.finished
        if stop_ids and (step >= free_tokens or len(stop_ids) == len(allowed_ids) or random.random() < 0.1):
            matcher.accept([stop_ids[0]])
            assert matcher.ended
            return output
        if step >= free_tokens:
            costs = {
                token: (
                    len(tokens[token]) != 1,
                    steered_counts[token] // (30 if tokens[token] in CLOSING[:3] else 3),
                    closing_rank(tokens[token]),
                )
                for token in allowed_ids
            }
            allowed_ids = np.array([min(allowed_ids, key=lambda token: costs[token])])
        token = int(random.choice(allowed_ids))
        steered_counts[token] += step >= free_tokens
        matcher.accept([token])
        output += tokens[token]
    return None
