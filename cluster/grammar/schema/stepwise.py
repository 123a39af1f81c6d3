"""Writes automata as rules. A state that several other states lead to gets a rule; other states are written inline."""

from collections import Counter
from collections.abc import Callable

from cluster.grammar.automata import Automaton
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NOTHING, Chars, Node, alt, repeat, seq

MOST_NESTED = 12  # maximum depth of states written inline


def rules_of(
    rules: Rules, automaton: Automaton, written: Callable[[Chars], Node], end: Node = EMPTY, before: Node | None = None
) -> Node:
    """Return the rules of an automaton. `written` returns the grammar of one character class; `end` follows the whole
    text. Every rule reads the rest of the text and `end`, so the same lookahead `before` holds after every rule.
    """
    named = {0: rules.reserve()} if _is_entered(automaton, 0) else {}
    waiting = list(named)
    entries = Counter(to for at, steps in enumerate(automaton.steps) for to in steps if to != at)

    def reached(state: int, nested: int) -> Node:
        if state not in named and entries[state] == 1 and nested < MOST_NESTED:
            return body(state, nested + 1)
        if state not in named:
            named[state] = rules.reserve()
            waiting.append(state)
        return named[state]

    def body(state: int, nested: int) -> Node:
        steps = automaton.steps[state]
        loop: Node = repeat(written(steps[state])) if state in steps else EMPTY
        after = [seq(written(read), reached(to, nested)) for to, read in steps.items() if to != state]
        return seq(loop, alt(*after, end if automaton.accepting[state] else NOTHING))

    start = named.get(0) or body(0, 0)
    while waiting:
        state = waiting.pop()
        rules.tell(named[state], body(state, 0), before)
    return start


def _is_entered(automaton: Automaton, state: int) -> bool:
    return any(state in steps for at, steps in enumerate(automaton.steps) if at != state)
