"""Deterministic automata of expressions: intersection of several expressions, and tests of inclusion.

An expression becomes a nondeterministic automaton. A state of the deterministic automaton is a Boolean formula over
nondeterministic states: `or` where an expression branches; `and` where two expressions must both match, or a lookahead
and what follows it; `not` where an expression must not match. The method is derivatives of extended regular expressions
(Brzozowski 1964) over alternating automata.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from cluster.grammar.asked import GrammarError
from cluster.grammar.nodes import MAX_CODE_POINT, SURROGATES, Alt, Chars, Literal, Node, Ref, Repeat, Seq, chars
from cluster.grammar.regex import END, START, Lookahead

MAX_STATES = 600  # of a deterministic automaton; xgrammar needs one mask over the vocabulary for each state
MAX_EXPLORED_FORMULAS = 6000  # formulas that one inclusion test explores
MAX_NFA_STATES = 20_000
MAX_VISITS = 400_000  # visits of nondeterministic states by steps that read no character; they take about a second

S = TypeVar("S", bound=Hashable)
Formula = int | tuple[str, frozenset["Formula"]]
TRUE: Formula = ("and", frozenset())
FALSE: Formula = ("or", frozenset())
AT_END = -1  # formula that holds only if no text is left; its derivative is always FALSE


class TooLargeError(GrammarError):
    """An automaton would need more states than allowed."""


@dataclass(slots=True)
class Automaton:
    """A minimal deterministic automaton. State 0 is the start; every state can reach an accepting state.

    `transitions[state]` maps each next state to the characters that lead there.
    """

    transitions: list[dict[int, Chars]]
    accepting: list[bool]


def intersection(required: Sequence[Node], max_states: int = MAX_STATES) -> Automaton | None:
    """Return the automaton of the texts that match every expression of `required`, or None if no text does.

    The expressions come from `regex.parse_with_anchors`.

    Raises:
        TooLargeError: the automaton has more than `max_states` states, or computing it needs too many.
    """
    nfa = _AlternatingAutomaton()
    start = _and([nfa.start_formula(node) for node in required])
    return _minimize(*nfa.determinize(start, 2 * max_states), max_states)


def includes(outer: Sequence[Node], inner: Node) -> bool:
    """Return whether every text that matches `inner` matches all of `outer`. The result is also False if the search
    ends undecided after `MAX_EXPLORED_FORMULAS` formulas. Raises TooLargeError if the expressions are too large.
    """
    nfa = _AlternatingAutomaton()
    # `inner` is included exactly if "inner and not outer" accepts no text: search its derivatives for an accepting one.
    start = _and([nfa.start_formula(inner), _not(_and([nfa.start_formula(node) for node in outer]))])
    nfa.split_alphabet()
    visited, pending = {start}, [start]
    while pending:
        formula = pending.pop()
        if nfa.accepts(formula):
            return False
        if len(visited) > MAX_EXPLORED_FORMULAS:
            return False
        for letter in range(len(nfa.alphabet)):
            derivative = nfa.derivative(formula, letter)
            if derivative != FALSE and derivative not in visited:
                visited.add(derivative)
                pending.append(derivative)
    return True


def _or(formulas: Iterable[Formula]) -> Formula:
    return _combine("or", formulas, neutral=FALSE, absorbing=TRUE)


def _and(formulas: Iterable[Formula]) -> Formula:
    return _combine("and", formulas, neutral=TRUE, absorbing=FALSE)


def _combine(operator: str, formulas: Iterable[Formula], neutral: Formula, absorbing: Formula) -> Formula:
    operands: set[Formula] = set()
    for formula in formulas:
        if formula == absorbing:
            return absorbing
        if not isinstance(formula, int) and formula[0] == operator:
            operands |= formula[1]
        elif formula != neutral:
            operands.add(formula)
    if len(operands) == 1:
        return operands.pop()
    return (operator, frozenset(operands)) if operands else neutral


def _not(formula: Formula) -> Formula:
    if formula in (TRUE, FALSE):
        return FALSE if formula == TRUE else TRUE
    if not isinstance(formula, int) and formula[0] == "not":
        return next(iter(formula[1]))
    return ("not", frozenset((formula,)))


@dataclass(slots=True)
class _NfaState:
    """A state of the nondeterministic automaton.

    Either it reads a character of `chars` and goes to the state `next_state`; or, without reading, it goes to any state
    in `epsilon_edges`. An epsilon edge is (condition, state); the condition is None, START, END or a lookahead. If
    `accepts_rest`, this state accepts any remaining text.
    """

    chars: Chars | None = None
    next_state: int = 0
    epsilon_edges: list[tuple[Ref | None, int]] = field(default_factory=list)
    accepts_rest: bool = False


@dataclass(slots=True)
class _AlternatingAutomaton:
    """The nondeterministic states of all expressions of one query, and derivatives of formulas over these states."""

    states: list[_NfaState] = field(default_factory=list)
    alphabet: list[Chars] = field(default_factory=list)  # classes; an expression treats all characters of one alike
    _letters_of_chars: dict[Chars, frozenset[int]] = field(default_factory=dict)
    _lookahead_states: dict[Lookahead, int] = field(default_factory=dict)
    _num_visits: int = 0
    _expansion_cache: dict[int, Formula] = field(default_factory=dict)
    _derivative_cache: dict[tuple[Formula, int], Formula] = field(default_factory=dict)

    def start_formula(self, node: Node) -> Formula:
        """Build the states of an expression. Return the formula that holds for exactly the texts that match it."""
        return self._expand(
            self._build(
                node, self._add_state(_NfaState(epsilon_edges=[(END, self._add_state(_NfaState(accepts_rest=True)))]))
            ),
            True,
            set(),
        )

    def _add_state(self, state: _NfaState) -> int:
        if len(self.states) >= MAX_NFA_STATES:
            raise TooLargeError("the expression is too large")
        self.states.append(state)
        return len(self.states) - 1

    def _build(self, node: Node, following: int) -> int:
        """Build the states of a node, followed by the state `following`; return the first state."""
        match node:
            case Chars():
                return self._add_state(_NfaState(chars=node, next_state=following))
            case Literal(text):
                for character in reversed(text):
                    following = self._add_state(_NfaState(chars=Chars(((ord(character),) * 2,)), next_state=following))
                return following
            case Seq(children):
                for child in reversed(children):
                    following = self._build(child, following)
                return following
            case Alt(children):
                return self._add_state(
                    _NfaState(epsilon_edges=[(None, self._build(child, following)) for child in children])
                )
            case Repeat(child, min_count, max_count):
                return self._build_repeat(child, min_count, max_count, following)
            case Lookahead():
                if node not in self._lookahead_states:
                    self._lookahead_states[node] = self._build(
                        node.child, self._add_state(_NfaState(accepts_rest=True))
                    )
                return self._add_state(_NfaState(epsilon_edges=[(node, following)]))
            case Ref():
                return self._add_state(_NfaState(epsilon_edges=[(node, following)]))
            case _:
                raise AssertionError(f"{node} is no expression")

    def _build_repeat(self, child: Node, min_count: int, max_count: int | None, following: int) -> int:
        """Build a repetition before the state `following`: `min_count` copies, then a loop or optional copies."""
        if max_count is None:
            loop = self._add_state(_NfaState())
            self.states[loop].epsilon_edges = [(None, following), (None, self._build(child, loop))]
            following = loop
        else:
            end = following
            for _ in range(max_count - min_count):
                following = self._add_state(
                    _NfaState(epsilon_edges=[(None, end), (None, self._build(child, following))])
                )
        for _ in range(min_count):
            following = self._build(child, following)
        return following

    def _expand(self, state: int, at_start: bool, passed: set[int]) -> Formula:
        """Return a formula that is equivalent to `state` and contains only states that read a character. `at_start`
        says that no character has been read yet. `passed` has the states that the search has reached already, without
        reading a character and under weaker conditions; to reach one of them again adds nothing.
        """
        if not at_start and not passed and state in self._expansion_cache:
            return self._expansion_cache[state]
        alternatives: list[Formula] = []
        visited, pending = {state} | passed, [state]
        while pending:
            nfa_state = self.states[current := pending.pop()]
            self._num_visits += 1
            if self._num_visits > MAX_VISITS:
                raise TooLargeError("the expressions need too many states together")
            if nfa_state.accepts_rest:
                alternatives.append(TRUE)
            elif nfa_state.chars is not None:
                alternatives.append(current)
            for condition, target in nfa_state.epsilon_edges:
                if target in visited or (condition == START and not at_start):
                    continue
                if condition is None or condition == START:
                    visited.add(target)
                    pending.append(target)
                    continue
                condition_formula: Formula = AT_END
                if isinstance(condition, Lookahead):
                    condition_formula = self._expand(self._lookahead_states[condition], at_start, set())
                    condition_formula = _not(condition_formula) if condition.negated else condition_formula
                alternatives.append(_and([condition_formula, self._expand(target, at_start, visited)]))
        result = _or(alternatives)
        if not at_start and not passed:
            self._expansion_cache[state] = result
        return result

    def split_alphabet(self) -> None:
        """Split all characters into the classes of `alphabet`. Call this after the last `start_formula`."""
        classes = {state.chars for state in self.states if state.chars is not None}
        borders = {0, SURROGATES[0], SURROGATES[1] + 1, MAX_CODE_POINT + 1}
        borders.update(border for char_set in classes for low, high in char_set.ranges for border in (low, high + 1))
        sorted_borders = sorted(borders)
        classes_of_interval: list[list[Chars]] = [[] for _ in sorted_borders]
        interval_of_border = {cut: index for index, cut in enumerate(sorted_borders)}
        for char_set in classes:
            for low, high in char_set.ranges:
                for index in range(interval_of_border[low], interval_of_border[high + 1]):
                    classes_of_interval[index].append(char_set)
        ranges: dict[frozenset[Chars], list[tuple[int, int]]] = {}
        for index, (low, next_low) in enumerate(pairwise(sorted_borders)):
            if low != SURROGATES[0]:
                ranges.setdefault(frozenset(classes_of_interval[index]), []).append((low, next_low - 1))
        self.alphabet = [chars(*letter_ranges) for letter_ranges in ranges.values()]
        self._letters_of_chars = {
            char_set: frozenset(index for index, char_sets in enumerate(ranges) if char_set in char_sets)
            for char_set in classes
        }

    def derivative(self, formula: Formula, letter: int) -> Formula:
        """Return the formula that holds for a text exactly if `formula` holds for `letter` followed by that text."""
        if isinstance(formula, int):
            state = self.states[formula] if formula != AT_END else _NfaState()
            if state.chars is None or letter not in self._letters_of_chars[state.chars]:
                return FALSE
            return self._expand(state.next_state, False, set())
        key = (formula, letter)
        result = self._derivative_cache.get(key)
        if result is None:
            operator, operands = formula
            derived = [self.derivative(operand, letter) for operand in operands]
            result = _not(derived[0]) if operator == "not" else _or(derived) if operator == "or" else _and(derived)
            self._derivative_cache[key] = result
        return result

    def accepts(self, formula: Formula) -> bool:
        """Whether a formula holds for the empty text."""
        if isinstance(formula, int):
            return formula == AT_END
        operator, operands = formula
        if operator == "not":
            return not self.accepts(next(iter(operands)))
        return any(map(self.accepts, operands)) if operator == "or" else all(map(self.accepts, operands))

    def determinize(self, start: Formula, max_states: int) -> tuple[list[dict[int, int]], list[bool], list[Chars]]:
        """Return the deterministic automaton of a formula: next states by letter, accepting flags, and the letters.

        Raises:
            TooLargeError: the automaton needs more than `max_states` states.
        """
        self.split_alphabet()
        state_numbers, formulas = {start: 0}, [start]
        transitions: list[dict[int, int]] = []
        for formula in formulas:  # `formulas` grows during this loop
            next_states = {}
            for letter in range(len(self.alphabet)):
                derivative = self.derivative(formula, letter)
                if derivative == FALSE:
                    continue
                if derivative not in state_numbers:
                    if len(formulas) >= max_states:
                        raise TooLargeError("the expressions need too many states together")
                    state_numbers[derivative] = len(formulas)
                    formulas.append(derivative)
                next_states[letter] = state_numbers[derivative]
            transitions.append(next_states)
        return transitions, [self.accepts(formula) for formula in formulas], self.alphabet


def _minimize(
    transitions: list[dict[int, int]], accepting: list[bool], alphabet: list[Chars], max_states: int = MAX_STATES
) -> Automaton | None:
    """Return the minimal automaton (Moore 1956): equivalent states are merged, and states that cannot reach an
    accepting state are dropped. Return None if no text is accepted.

    Raises:
        TooLargeError: the minimal automaton has more than `max_states` states.
    """
    live = {state for state, accepts in enumerate(accepting) if accepts}
    count_before = -1
    while len(live) > count_before:
        count_before = len(live)
        live.update(state for state, next_states in enumerate(transitions) if not live.isdisjoint(next_states.values()))
    if 0 not in live:
        return None
    live_states = sorted(live)
    live_transitions = {
        state: {letter: target for letter, target in transitions[state].items() if target in live}
        for state in live_states
    }
    blocks = {state: int(accepting[state]) for state in live_states}
    count = 0
    while len(set(blocks.values())) > count:
        count = len(set(blocks.values()))
        # Two states stay in one block while they agree on acceptance and step to the same blocks. Refine until stable.
        block_numbers: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        blocks = {
            state: block_numbers.setdefault(
                (
                    blocks[state],
                    tuple((letter, blocks[target]) for letter, target in sorted(live_transitions[state].items())),
                ),
                len(block_numbers),
            )
            for state in live_states
        }
    if count > max_states:
        raise TooLargeError("the expressions need too many states together")
    merged: list[dict[int, Chars]] = [{} for _ in range(count)]
    merged_accepting = [False] * count
    for state in live_states:
        merged_accepting[blocks[state]] = accepting[state]
        ranges: dict[int, list[tuple[int, int]]] = {}
        for letter, target in live_transitions[state].items():
            ranges.setdefault(blocks[target], []).extend(alphabet[letter].ranges)
        merged[blocks[state]] = {target: chars(*letter_ranges) for target, letter_ranges in ranges.items()}
    return Automaton(merged, merged_accepting)


def product(
    automaton: Automaton, start: S, next_state: Callable[[S, str], S | None], accepts: Callable[[S], bool]
) -> Automaton | None:
    """Return the automaton of the texts that both `automaton` and a second machine accept, or None if there are none.

    `start` is the second machine's first state. `next_state` returns its state after a character, or None if the
    machine rejects the text. `accepts` tells whether a state accepts. `automaton` must use few characters, because each
    code point becomes a letter.

    Raises:
        TooLargeError: the product has too many states.
    """
    letters = sorted(
        {
            code
            for successors in automaton.transitions
            for characters in successors.values()
            for code in code_points(characters)
        }
    )
    letter_of_code = {code: index for index, code in enumerate(letters)}
    state_numbers, pairs = {(0, start): 0}, [(0, start)]
    transitions: list[dict[int, int]] = []
    for state, other_state in pairs:  # `pairs` grows during this loop
        next_states = {}
        for target, characters in automaton.transitions[state].items():
            for code in code_points(characters):
                successors = next_state(other_state, chr(code))
                if successors is None:
                    continue
                if (target, successors) not in state_numbers:
                    if len(pairs) >= MAX_EXPLORED_FORMULAS:
                        raise TooLargeError("it needs too many states")
                    state_numbers[target, successors] = len(pairs)
                    pairs.append((target, successors))
                next_states[letter_of_code[code]] = state_numbers[target, successors]
        transitions.append(next_states)
    accepting = [automaton.accepting[state] and accepts(other_state) for state, other_state in pairs]
    return _minimize(transitions, accepting, [Chars(((code, code),)) for code in letters])


def code_points(characters: Chars) -> Iterator[int]:
    """Return the code points of a class."""
    return (code for low, high in characters.ranges for code in range(low, high + 1))
