"""Deterministic automata of expressions: intersection of several expressions, and tests of inclusion.

An expression becomes a nondeterministic automaton. A state of the deterministic automaton is a Boolean formula over
nondeterministic states: `or` where an expression branches; `and` where two expressions, or a lookahead and the rest,
must both match; `not` where an expression must not match. The method is derivatives of extended regular expressions
(Brzozowski 1964) over alternating automata.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from cluster.grammar.asked import GrammarError
from cluster.grammar.nodes import LAST, SURROGATES, Alt, Chars, Literal, Node, Ref, Repeat, Seq, chars
from cluster.grammar.regex import END, START, Look

MAX_STATES = 600  # of a deterministic automaton; xgrammar needs one mask over the vocabulary for each state
MAX_EXPLORED = 6000  # formulas that one inclusion test explores
MAX_NONDETERMINISTIC = 20_000
MAX_VISITED = 400_000  # visits of nondeterministic states along steps that read nothing; takes about a second

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

    `steps[state]` maps each next state to the characters that lead there.
    """

    steps: list[dict[int, Chars]]
    accepting: list[bool]


def intersection(required: Sequence[Node], most: int = MAX_STATES) -> Automaton | None:
    """Return the automaton of the texts that match every expression of `required`, or None if no text does.

    The expressions come from `regex.read`.

    Raises:
        TooLargeError: the automaton would need more than `most` states.
    """
    space = _Space()
    start = _all([space.start(node) for node in required])
    return _minimal(*space.explored(start, 2 * most), most)


def includes(outer: Sequence[Node], inner: Node) -> bool:
    """Whether every text that matches `inner` matches all of `outer`. Also False if the test needs too many states."""
    space = _Space()
    # `inner` is included exactly if "inner and not outer" accepts no text: search its derivatives for an accepting one.
    start = _all([space.start(inner), _not(_all([space.start(node) for node in outer]))])
    space.settle()
    seen, waiting = {start}, [start]
    while waiting:
        formula = waiting.pop()
        if space.accepts(formula):
            return False
        if len(seen) > MAX_EXPLORED:
            return False
        for letter in range(len(space.letters)):
            after = space.derivative(formula, letter)
            if after != FALSE and after not in seen:
                seen.add(after)
                waiting.append(after)
    return True


def _any(formulas: Iterable[Formula]) -> Formula:
    return _joined("or", formulas, neutral=FALSE, absorbing=TRUE)


def _all(formulas: Iterable[Formula]) -> Formula:
    return _joined("and", formulas, neutral=TRUE, absorbing=FALSE)


def _joined(kind: str, formulas: Iterable[Formula], neutral: Formula, absorbing: Formula) -> Formula:
    parts: set[Formula] = set()
    for formula in formulas:
        if formula == absorbing:
            return absorbing
        if not isinstance(formula, int) and formula[0] == kind:
            parts |= formula[1]
        elif formula != neutral:
            parts.add(formula)
    if len(parts) == 1:
        return parts.pop()
    return (kind, frozenset(parts)) if parts else neutral


def _not(formula: Formula) -> Formula:
    if formula in (TRUE, FALSE):
        return FALSE if formula == TRUE else TRUE
    if not isinstance(formula, int) and formula[0] == "not":
        return next(iter(formula[1]))
    return ("not", frozenset((formula,)))


@dataclass(slots=True)
class _State:
    """A state of the nondeterministic automaton.

    Either it reads a character of `reads` and goes to the state `after`; or, without reading, it goes to any state in
    `free`. An entry of `free` is (condition, state); the condition is None, START, END or a lookahead. If `rest`, this
    state accepts any remaining text.
    """

    reads: Chars | None = None
    after: int = 0
    free: list[tuple[Ref | None, int]] = field(default_factory=list)
    rest: bool = False


@dataclass(slots=True)
class _Space:
    """The nondeterministic states of all expressions of one query, and derivatives of formulas over these states."""

    states: list[_State] = field(default_factory=list)
    letters: list[Chars] = field(default_factory=list)  # classes; no expression distinguishes characters of one class
    _letters_of: dict[Chars, frozenset[int]] = field(default_factory=dict)
    _looks: dict[Look, int] = field(default_factory=dict)
    _visited: int = 0
    _expanded: dict[int, Formula] = field(default_factory=dict)
    _derived: dict[tuple[Formula, int], Formula] = field(default_factory=dict)

    def start(self, node: Node) -> Formula:
        """Build the states of an expression. Return the formula that holds for exactly the texts that match it."""
        return self._expand(
            self._built(node, self._add(_State(free=[(END, self._add(_State(rest=True)))]))), True, set()
        )

    def _add(self, state: _State) -> int:
        if len(self.states) >= MAX_NONDETERMINISTIC:
            raise TooLargeError("the expression is too large")
        self.states.append(state)
        return len(self.states) - 1

    def _built(self, node: Node, then: int) -> int:
        """Build the states of a node, followed by the state `then`; return the first state."""
        match node:
            case Chars():
                return self._add(_State(reads=node, after=then))
            case Literal(text):
                for character in reversed(text):
                    then = self._add(_State(reads=Chars(((ord(character),) * 2,)), after=then))
                return then
            case Seq(parts):
                for part in reversed(parts):
                    then = self._built(part, then)
                return then
            case Alt(parts):
                return self._add(_State(free=[(None, self._built(part, then)) for part in parts]))
            case Repeat(part, least, most):
                return self._repeated(part, least, most, then)
            case Look():
                if node not in self._looks:
                    self._looks[node] = self._built(node.part, self._add(_State(rest=True)))
                return self._add(_State(free=[(node, then)]))
            case Ref():
                return self._add(_State(free=[(node, then)]))
            case _:
                raise AssertionError(f"{node} is no expression")

    def _repeated(self, part: Node, least: int, most: int | None, then: int) -> int:
        """Build the states of a repetition before the state `then`: `least` copies, then a loop or optional copies."""
        if most is None:
            loop = self._add(_State())
            self.states[loop].free = [(None, then), (None, self._built(part, loop))]
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._add(_State(free=[(None, end), (None, self._built(part, then))]))
        for _ in range(least):
            then = self._built(part, then)
        return then

    def _expand(self, state: int, first: bool, above: set[int]) -> Formula:
        """Return the formula, over states that read a character, that means the same as `state`.

        `first`: no character has been read yet. `above`: states that were passed without reading before `state`;
        returning to such a state adds nothing.
        """
        if not first and not above and state in self._expanded:
            return self._expanded[state]
        parts: list[Formula] = []
        seen, waiting = {state} | above, [state]
        while waiting:
            at = self.states[current := waiting.pop()]
            self._visited += 1
            if self._visited > MAX_VISITED:
                raise TooLargeError("the expressions need too many states together")
            if at.rest:
                parts.append(TRUE)
            elif at.reads is not None:
                parts.append(current)
            for condition, target in at.free:
                if target in seen or (condition == START and not first):
                    continue
                if condition is None or condition == START:
                    seen.add(target)
                    waiting.append(target)
                    continue
                held: Formula = AT_END
                if isinstance(condition, Look):
                    held = self._expand(self._looks[condition], first, set())
                    held = _not(held) if condition.negated else held
                parts.append(_all([held, self._expand(target, first, seen)]))
        found = _any(parts)
        if not first and not above:
            self._expanded[state] = found
        return found

    def settle(self) -> None:
        """Split all characters into `letters`: classes of characters that no expression distinguishes. Call this after
        the last `start`.
        """
        classes = {state.reads for state in self.states if state.reads is not None}
        borders = {0, SURROGATES[0], SURROGATES[1] + 1, LAST + 1}
        borders.update(border for one in classes for low, high in one.ranges for border in (low, high + 1))
        cuts = sorted(borders)
        held: list[list[Chars]] = [[] for _ in cuts]
        places = {cut: at for at, cut in enumerate(cuts)}
        for one in classes:
            for low, high in one.ranges:
                for at in range(places[low], places[high + 1]):
                    held[at].append(one)
        ranges: dict[frozenset[Chars], list[tuple[int, int]]] = {}
        for at, (low, after) in enumerate(pairwise(cuts)):
            if low != SURROGATES[0]:
                ranges.setdefault(frozenset(held[at]), []).append((low, after - 1))
        self.letters = [chars(*found) for found in ranges.values()]
        self._letters_of = {one: frozenset(at for at, of in enumerate(ranges) if one in of) for one in classes}

    def derivative(self, formula: Formula, letter: int) -> Formula:
        """Return the formula that must hold for the rest of a text if `formula` holds for `letter` and that rest."""
        if isinstance(formula, int):
            state = self.states[formula] if formula != AT_END else _State()
            if state.reads is None or letter not in self._letters_of[state.reads]:
                return FALSE
            return self._expand(state.after, False, set())
        key = (formula, letter)
        found = self._derived.get(key)
        if found is None:
            kind, parts = formula
            derived = [self.derivative(part, letter) for part in parts]
            found = _not(derived[0]) if kind == "not" else _any(derived) if kind == "or" else _all(derived)
            self._derived[key] = found
        return found

    def accepts(self, formula: Formula) -> bool:
        """Whether a formula holds for the empty text."""
        if isinstance(formula, int):
            return formula == AT_END
        kind, parts = formula
        if kind == "not":
            return not self.accepts(next(iter(parts)))
        return any(map(self.accepts, parts)) if kind == "or" else all(map(self.accepts, parts))

    def explored(self, start: Formula, most: int) -> tuple[list[dict[int, int]], list[bool], list[Chars]]:
        """Return the deterministic automaton of a formula: next states by letter, accepting flags, and the letters.

        Raises:
            TooLargeError: the automaton needs more than `most` states.
        """
        self.settle()
        numbers, order = {start: 0}, [start]
        steps: list[dict[int, int]] = []
        for formula in order:  # `order` grows during this loop
            found = {}
            for letter in range(len(self.letters)):
                after = self.derivative(formula, letter)
                if after == FALSE:
                    continue
                if after not in numbers:
                    if len(order) >= most:
                        raise TooLargeError("the expressions need too many states together")
                    numbers[after] = len(order)
                    order.append(after)
                found[letter] = numbers[after]
            steps.append(found)
        return steps, [self.accepts(formula) for formula in order], self.letters


def _minimal(
    steps: list[dict[int, int]], accepting: list[bool], letters: list[Chars], most: int = MAX_STATES
) -> Automaton | None:
    """Return the minimal automaton (Moore 1956): equivalent states are merged, and states that cannot reach an
    accepting state are dropped. Return None if no text is accepted.

    Raises:
        TooLargeError: the minimal automaton has more than `most` states.
    """
    live = {state for state, accepts in enumerate(accepting) if accepts}
    before = -1
    while len(live) > before:
        before = len(live)
        live.update(state for state, after in enumerate(steps) if not live.isdisjoint(after.values()))
    if 0 not in live:
        return None
    kept = sorted(live)
    useful = {state: {letter: to for letter, to in steps[state].items() if to in live} for state in kept}
    blocks = {state: int(accepting[state]) for state in kept}
    count = 0
    while len(set(blocks.values())) > count:
        count = len(set(blocks.values()))
        # Two states stay in one block while they agree on acceptance and step to the same blocks. Refine until stable.
        signs: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        blocks = {
            state: signs.setdefault(
                (blocks[state], tuple((letter, blocks[to]) for letter, to in sorted(useful[state].items()))), len(signs)
            )
            for state in kept
        }
    if count > most:
        raise TooLargeError("the expressions need too many states together")
    found: list[dict[int, Chars]] = [{} for _ in range(count)]
    ends = [False] * count
    for state in kept:
        ends[blocks[state]] = accepting[state]
        ranges: dict[int, list[tuple[int, int]]] = {}
        for letter, to in useful[state].items():
            ranges.setdefault(blocks[to], []).extend(letters[letter].ranges)
        found[blocks[state]] = {to: chars(*parts) for to, parts in ranges.items()}
    return Automaton(found, ends)


def restricted(
    automaton: Automaton, start: S, step: Callable[[S, str], S | None], accepts: Callable[[S], bool]
) -> Automaton | None:
    """Return the automaton of the texts that both `automaton` and a second machine accept, or None if there is no such
    text.

    `start` is the second machine's first state. `step` returns its state after a character, or None if the machine
    rejects the text. `accepts` tells whether a state accepts. `automaton` must use few characters, because each code
    point becomes a letter.

    Raises:
        TooLargeError: the product has too many states.
    """
    letters = sorted({code for after in automaton.steps for read in after.values() for code in codes(read)})
    places = {code: at for at, code in enumerate(letters)}
    numbers, order = {(0, start): 0}, [(0, start)]
    steps: list[dict[int, int]] = []
    for state, inner in order:  # `order` grows during this loop
        found = {}
        for to, read in automaton.steps[state].items():
            for code in codes(read):
                after = step(inner, chr(code))
                if after is None:
                    continue
                if (to, after) not in numbers:
                    if len(order) >= MAX_EXPLORED:
                        raise TooLargeError("it needs too many states")
                    numbers[to, after] = len(order)
                    order.append((to, after))
                found[places[code]] = numbers[to, after]
        steps.append(found)
    ends = [automaton.accepting[state] and accepts(inner) for state, inner in order]
    return _minimal(steps, ends, [Chars(((code, code),)) for code in letters])


def codes(read: Chars) -> Iterator[int]:
    """Return the code points of a class."""
    return (code for low, high in read.ranges for code in range(low, high + 1))
