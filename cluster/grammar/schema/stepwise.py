"""Writes automata as rules. A state gets a rule if several other states lead to it, or if it would be nested deeper
than `MAX_INLINE_DEPTH`. The start state gets a rule if any other state leads to it. Other states are written inline.
"""

from collections import Counter
from collections.abc import Callable

from cluster.grammar.automata import Automaton
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, NO_MATCH, Chars, Node, alt, repeat, seq

MAX_INLINE_DEPTH = 12  # maximum depth of states written inline


def automaton_rules(
    rules: Rules,
    automaton: Automaton,
    chars_node: Callable[[Chars], Node],
    end: Node = EMPTY,
    lookahead: Node | None = None,
) -> Node:
    """Add the rules of an automaton to `rules`. Return the grammar of the automaton's texts, each followed by `end`.

    `chars_node` returns the grammar of one character class. Every rule matches the rest of a text and `end`, so the
    same `lookahead` holds after every rule.
    """
    rule_of_state = {0: rules.reserve_name()} if _is_entered(automaton, 0) else {}
    pending = list(rule_of_state)
    entry_counts = Counter(
        target for source, transitions in enumerate(automaton.transitions) for target in transitions if target != source
    )

    def state_node(state: int, depth: int) -> Node:
        if state not in rule_of_state and entry_counts[state] == 1 and depth < MAX_INLINE_DEPTH:
            return body(state, depth + 1)
        if state not in rule_of_state:
            rule_of_state[state] = rules.reserve_name()
            pending.append(state)
        return rule_of_state[state]

    def body(state: int, depth: int) -> Node:
        transitions = automaton.transitions[state]
        loop: Node = repeat(chars_node(transitions[state])) if state in transitions else EMPTY
        branches = [
            seq(chars_node(characters), state_node(target, depth))
            for target, characters in transitions.items()
            if target != state
        ]
        return seq(loop, alt(*branches, end if automaton.accepting[state] else NO_MATCH))

    start_node = rule_of_state.get(0) or body(0, 0)
    while pending:
        state = pending.pop()
        rules.define(rule_of_state[state], body(state, 0), lookahead)
    return start_node


def _is_entered(automaton: Automaton, state: int) -> bool:
    return any(state in transitions for source, transitions in enumerate(automaton.transitions) if source != state)
