"""Grammars over token ids, as small random automata: whatever a real grammar does, with an oracle that is a table."""

import json
from collections.abc import Sequence
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.engine import Rank
from cluster.sampling.grammars import Matcher, MatcherFactory
from tests.parity.harness import VOCAB

R = TypeVar("R", bound=Rank)
EOS = 1


def automaton(seed: int, states: int = 6) -> str:
    """For each state the tokens that may come and the state after each, as JSON. Some states force one token; in some a
    text may end.
    """
    random = Random(seed)
    lines = []
    for _ in range(states):
        count = random.choice((1, 1, 2, 5, 12))
        tokens = random.sample(range(2, VOCAB), count)
        line = {str(token): random.randrange(states) for token in tokens}
        lines.append(line | ({str(EOS): -1} if random.random() < 0.3 else {}))
    return json.dumps(lines)


def follows(text: str, tokens: Sequence[int]) -> bool:
    """Whether tokens are the beginning of a text of the automaton; after its end there is only the end."""
    states, state = json.loads(text), 0
    for token in tokens:
        if state < 0:
            return token == EOS
        if str(token) not in states[state]:
            return False
        state = states[state][str(token)]
    return True


class Walker:
    """A `Matcher` of an automaton."""

    def __init__(self, text: str) -> None:
        self.text, self._states, self._state = text, json.loads(text), 0

    def accept(self, tokens: Sequence[int]) -> None:
        self._state = self._after(tokens)
        assert self._state > -2, "a token came that the grammar does not have"

    def fill(self, path: Sequence[int], out: NDArray[np.int32]) -> None:
        state = self._after(path)
        allowed = [EOS] if state < 0 else [int(token) for token in self._states[state]]
        out.fill(0)
        for token in allowed:
            out[token // 32] |= 1 << (token % 32)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        found: list[int] = []
        state = self._after(path)
        while state >= 0 and len(found) < most and len(self._states[state]) == 1:
            ((token, state),) = self._states[state].items()
            found.append(int(token))
        return found

    def _after(self, tokens: Sequence[int]) -> int:
        """-1 after the end, -2 after what is not in the grammar."""
        state = self._state
        for token in tokens:
            if state < 0:
                state = -1 if state == -1 and token == EOS else -2
            else:
                state = self._states[state].get(str(token), -2)
        return state


class Either:
    """Makes matchers of automata, which are lists, and of compiled grammars as they are made otherwise."""

    def __init__(self, true: MatcherFactory) -> None:
        self.preload, self._inner = true.preload, true

    def __call__(self, grammar: str) -> Matcher:
        return Walker(grammar) if grammar.startswith("[") else self._inner(grammar)


def walked(rank: R) -> R:
    """Have a rank match automata too."""
    rank.lockstep.grammars._create_matcher = Either(rank.lockstep.grammars._create_matcher)
    return rank
