"""Grammars over token ids: small random automata. They do all that a real grammar does, and their oracle is a table."""

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


def automaton(seed: int, state_count: int = 6) -> str:
    """Return an automaton as JSON: for each state, a map from each allowed token to the state after it. Some states
    allow a single token, so that it is forced. In some states EOS is allowed, so that a text may end.
    """
    random = Random(seed)
    transition_tables = []
    for _ in range(state_count):
        count = random.choice((1, 1, 2, 5, 12))
        tokens = random.sample(range(2, VOCAB), count)
        transitions = {str(token): random.randrange(state_count) for token in tokens}
        transition_tables.append(transitions | ({str(EOS): -1} if random.random() < 0.3 else {}))
    return json.dumps(transition_tables)


def follows_automaton(automaton_json: str, tokens: Sequence[int]) -> bool:
    """Return whether the tokens are a prefix of a text of the automaton. After the end of the text only EOS follows."""
    states, state = json.loads(automaton_json), 0
    for token in tokens:
        if state < 0:
            return token == EOS
        if str(token) not in states[state]:
            return False
        state = states[state][str(token)]
    return True


class AutomatonMatcher:
    """A grammar `Matcher` whose grammar is an automaton."""

    def __init__(self, automaton_json: str) -> None:
        self.text, self._states, self._state = automaton_json, json.loads(automaton_json), 0

    def accept(self, tokens: Sequence[int]) -> None:
        self._state = self._state_after(tokens)
        assert self._state > -2, "the engine committed a token that the grammar does not allow"

    def fill(self, path: Sequence[int], out: NDArray[np.int32]) -> None:
        state = self._state_after(path)
        allowed = [EOS] if state < 0 else [int(token) for token in self._states[state]]
        out.fill(0)
        for token in allowed:
            out[token // 32] |= 1 << (token % 32)

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        forced_tokens: list[int] = []
        state = self._state_after(path)
        while state >= 0 and len(forced_tokens) < most and len(self._states[state]) == 1:
            ((token, state),) = self._states[state].items()
            forced_tokens.append(int(token))
        return forced_tokens

    def _state_after(self, tokens: Sequence[int]) -> int:
        """Return the state after the tokens: -1 after the end of the text, -2 after a token that is not allowed."""
        state = self._state
        for token in tokens:
            if state < 0:
                state = -1 if state == -1 and token == EOS else -2
            else:
                state = self._states[state].get(str(token), -2)
        return state


class AutomatonOrGrammarFactory:
    """A matcher factory for both kinds of grammars. The JSON of an automaton is a list and gives an `AutomatonMatcher`;
    every other grammar goes to the real factory.
    """

    def __init__(self, grammar_factory: MatcherFactory) -> None:
        self.preload, self._grammar_factory = grammar_factory.preload, grammar_factory

    def __call__(self, grammar: str) -> Matcher:
        return AutomatonMatcher(grammar) if grammar.startswith("[") else self._grammar_factory(grammar)


def with_automata(rank: R) -> R:
    """Make the rank accept automata as grammars, beside real grammars; return the rank."""
    rank.lockstep.grammars._create_matcher = AutomatonOrGrammarFactory(rank.lockstep.grammars._create_matcher)
    return rank
