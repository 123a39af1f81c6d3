"""The nodes of a grammar's syntax tree, and functions that build and simplify them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # never in valid text; xgrammar's own `[^..]` would allow them
MOST_STATES = 100  # of one automaton, roughly; xgrammar does not precompute the masks of a larger automaton
# First code points of each UTF-8 length. A range in xgrammar's Regex(..) that crosses such a code point also matches
# invalid bytes.
UTF8_LENGTHS = (0x80, 0x800, 0x10000, LAST + 1)

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of inclusive ranges of code points. The ranges are sorted, disjoint and hold no surrogates."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly these characters; the empty text if `text` is empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the rule of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """The parts, one after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the parts. If there are no parts, the node matches nothing, not even the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part`, repeated `least` to `most` times. If `most` is None, there is no upper bound."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Regular:
    """A `part` without references to rules. xgrammar compiles it as one automaton, which is much faster."""

    part: "Node"


@dataclass(frozen=True, slots=True)
class Blank:
    """White space without meaning. A compact grammar leaves the `part` out."""

    part: "Node"


Node = Chars | Literal | Ref | Seq | Alt | Repeat | Regular | Blank
EMPTY = Literal("")
NOTHING = Alt(())


def chars(*ranges: tuple[int, int]) -> Chars:
    """Return the characters of these ranges, without surrogates. The ranges may overlap."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return Chars(tuple(_without(merged, *SURROGATES)))


def _without(ranges: Iterable[Sequence[int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges without the code points `low` to `high`."""
    for first, last in ranges:
        if first < low:
            yield first, min(last, low - 1)
        if last > high:
            yield max(first, high + 1), last


def one_of(text: str) -> Chars:
    """Return a node that matches one of these characters."""
    return chars(*((ord(character), ord(character)) for character in text))


def complement(of: Chars) -> Chars:
    """Return all characters that are not in `of`."""
    return minus(chars((0, LAST)), of)


def minus(one: Chars, other: Chars) -> Chars:
    """Return the characters of `one` that are not in `other`."""
    ranges: list[tuple[int, int]] = list(one.ranges)
    for low, high in other.ranges:
        ranges = list(_without(ranges, low, high))
    return Chars(tuple(ranges))


def both(one: Chars, other: Chars) -> Chars:
    """Return the characters that are in both classes."""
    return minus(one, minus(one, other))


def seq(*parts: Node) -> Node:
    """Return the parts in sequence: nested sequences flattened, adjacent literals joined, empty parts dropped."""
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
    """Return a choice of the parts: nested choices flattened, duplicates and empty classes dropped."""
    flat = (inner for part in parts for inner in (part.parts if isinstance(part, Alt) else (part,)))
    kept = tuple(dict.fromkeys(part for part in flat if part != Chars(())))
    return kept[0] if len(kept) == 1 else Alt(kept)


def repeat(part: Node, least: int = 0, most: int | None = None) -> Node:
    """Return `part` repeated `least` to `most` times. If `most` is None, there is no upper bound."""
    return part if (least, most) == (1, 1) else EMPTY if most == 0 else Repeat(part, least, most)


def automaton(node: Node) -> Node:
    """Return the node in a `Regular` if xgrammar compiles that correctly and fast, otherwise the node itself."""
    return Regular(node) if fits_automaton(node) else node


def fits_automaton(node: Node) -> bool:
    """Whether xgrammar compiles a node without rule references as one automaton, correctly and with precomputed masks.

    xgrammar's automata are wrong for some repetitions inside other repetitions or branches: its `(?:ab*)?` matches b.
    So the node must be a sequence; its parts may be repeated, but inside a part there must be no repetition.
    """
    parts = node.parts if isinstance(node, Seq) else (node,)
    repeated = (part.part if isinstance(part, Repeat) else part for part in parts)
    return all(map(_is_simple, repeated)) and states(node) <= MOST_STATES


def _is_simple(node: Node) -> bool:
    """Whether a node consists only of characters, sequences and branches."""
    if isinstance(node, Seq | Alt):
        return all(map(_is_simple, node.parts))
    return isinstance(node, Chars | Literal) and node != EMPTY


def states(node: Node) -> int:
    """Return the approximate number of states of the node's automaton."""
    match node:
        case Literal(text):
            return len(text)
        case Seq(parts) | Alt(parts):
            return sum(map(states, parts))
        case Repeat(part, least, most):
            return states(part) * max(1, least if most is None else most)
        case _:
            return 1
