"""Grammars as values: a handful of nodes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no character of a text; xgrammar's own `[^..]` lets them through
MOST_STATES = 100  # of one automaton, roughly: xgrammar does not compute the masks of a larger one beforehand
UTF8_LENGTHS = (0x80, 0x800, 0x10000, LAST + 1)  # its expressions let through bytes that are no text where a range
# goes over one of these

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of inclusive ranges of code points, in order and apart; none of them is a surrogate."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Literal:
    """These characters; the empty text where there are none."""

    text: str


@dataclass(frozen=True, slots=True)
class Ref:
    """What the rule of this name describes."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of them; nothing at all where there are none."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; without end where `most` is None."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Regular:
    """The same as its part, which refers to no rule; xgrammar makes one automaton of it, which is much faster."""

    part: "Node"


@dataclass(frozen=True, slots=True)
class Blank:
    """White space that says nothing; where a text is to be compact there is none."""

    part: "Node"


Node = Chars | Literal | Ref | Seq | Alt | Repeat | Regular | Blank
EMPTY = Literal("")
NOTHING = Alt(())


def chars(*ranges: tuple[int, int]) -> Chars:
    """The characters of these ranges, which may overlap and hold surrogates."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return Chars(tuple(_without(merged, *SURROGATES)))


def _without(ranges: Iterable[Sequence[int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    for first, last in ranges:
        if first < low:
            yield first, min(last, low - 1)
        if last > high:
            yield max(first, high + 1), last


def one_of(text: str) -> Chars:
    """One of these characters."""
    return chars(*((ord(character), ord(character)) for character in text))


def complement(of: Chars) -> Chars:
    """Any other character."""
    return minus(chars((0, LAST)), of)


def minus(one: Chars, other: Chars) -> Chars:
    """The characters of the first that the second lacks."""
    ranges: list[tuple[int, int]] = list(one.ranges)
    for low, high in other.ranges:
        ranges = list(_without(ranges, low, high))
    return Chars(tuple(ranges))


def both(one: Chars, other: Chars) -> Chars:
    """The characters that are in both."""
    return minus(one, minus(one, other))


def seq(*parts: Node) -> Node:
    """One after the other, without needless nesting."""
    kept: list[Node] = []
    flat = (inner for part in parts for inner in (part.parts if isinstance(part, Seq) else (part,)))
    for part in flat:
        before = kept[-1] if kept else None
        if isinstance(part, Literal) and isinstance(before, Literal):
            kept[-1] = Literal(before.text + part.text)
        elif part != EMPTY:
            kept.append(part)
    return kept[0] if len(kept) == 1 else Seq(tuple(kept)) if kept else EMPTY


def alt(*parts: Node) -> Node:
    """One of them, each once."""
    flat = (inner for part in parts for inner in (part.parts if isinstance(part, Alt) else (part,)))
    kept = tuple(dict.fromkeys(part for part in flat if part != Chars(())))
    return kept[0] if len(kept) == 1 else Alt(kept)


def repeat(part: Node, least: int = 0, most: int | None = None) -> Node:
    """`least` to `most` times."""
    return part if (least, most) == (1, 1) else EMPTY if most == 0 else Repeat(part, least, most)


def automaton(node: Node) -> Node:
    """The same as one automaton, where that is of use and right."""
    return Regular(node) if fits_automaton(node) else node


def fits_automaton(node: Node) -> bool:
    """Whether xgrammar makes one automaton of a node that refers to no rule, rightly and with masks made beforehand.

    Its automata are wrong for some repetitions inside of others or of branches, as in `(?:ab*)?`, which matches b. In
    a sequence of parts each of which is repeated or not, and holds no repetition, there is none of these.
    """
    parts = node.parts if isinstance(node, Seq) else (node,)
    repeated = (part.part if isinstance(part, Repeat) else part for part in parts)
    return all(map(_is_simple, repeated)) and states(node) <= MOST_STATES


def _is_simple(node: Node) -> bool:
    """Whether a node is characters in a row, and branches of these."""
    if isinstance(node, Seq | Alt):
        return all(map(_is_simple, node.parts))
    return isinstance(node, Chars | Literal) and node != EMPTY


def states(node: Node) -> int:
    """About how many states the automaton of a node has."""
    match node:
        case Literal(text):
            return len(text)
        case Seq(parts) | Alt(parts):
            return sum(map(states, parts))
        case Repeat(part, least, most):
            return states(part) * max(1, least if most is None else most)
        case _:
            return 1
