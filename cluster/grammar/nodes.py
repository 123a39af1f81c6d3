"""The nodes of a grammar's syntax tree, and functions that build and simplify them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # never in valid text; xgrammar's own `[^..]` would allow them
MAX_AUTOMATON_STATES = 100  # approximate; xgrammar does not precompute the masks of an automaton with more states
# The code points from which on UTF-8 takes 2, 3 and 4 bytes, and the end of all code points. A range in xgrammar's
# Regex(..) that crosses such a code point also matches invalid bytes.
UTF8_LENGTHS = (0x80, 0x800, 0x10000, MAX_CODE_POINT + 1)

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
    """The children, one after the other."""

    children: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the children. If there are none, the node matches nothing, not even the empty text."""

    children: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`child`, repeated `min_count` to `max_count` times. If `max_count` is None, there is no upper bound."""

    child: "Node"
    min_count: int
    max_count: int | None


@dataclass(frozen=True, slots=True)
class Regular:
    """A `child` without references to rules. xgrammar compiles it as one automaton, so its masks are found faster."""

    child: "Node"


@dataclass(frozen=True, slots=True)
class Whitespace:
    """White space without meaning. A compact grammar leaves the `child` out."""

    child: "Node"


Node = Chars | Literal | Ref | Seq | Alt | Repeat | Regular | Whitespace
EMPTY = Literal("")
NO_MATCH = Alt(())


def chars(*ranges: tuple[int, int]) -> Chars:
    """Return the characters of these ranges, without surrogates. The ranges may overlap."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return Chars(tuple(_exclude_range(merged, *SURROGATES)))


def _exclude_range(ranges: Iterable[Sequence[int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges without the code points `low` to `high`."""
    for start, end in ranges:
        if start < low:
            yield start, min(end, low - 1)
        if end > high:
            yield max(start, high + 1), end


def chars_of(characters: str) -> Chars:
    """Return a node that matches one of these characters."""
    return chars(*((ord(character), ord(character)) for character in characters))


def complement(excluded: Chars) -> Chars:
    """Return all characters that are not in `excluded`."""
    return minus(chars((0, MAX_CODE_POINT)), excluded)


def minus(base: Chars, removed: Chars) -> Chars:
    """Return the characters of `base` that are not in `removed`."""
    ranges: list[tuple[int, int]] = list(base.ranges)
    for low, high in removed.ranges:
        ranges = list(_exclude_range(ranges, low, high))
    return Chars(tuple(ranges))


def common_chars(first: Chars, second: Chars) -> Chars:
    """Return the characters that are in both classes."""
    return minus(first, minus(first, second))


def seq(*nodes: Node) -> Node:
    """Return the nodes in sequence: nested sequences flattened, adjacent literals joined, empty nodes dropped."""
    elements: list[Node] = []
    flattened = (element for node in nodes for element in (node.children if isinstance(node, Seq) else (node,)))
    for node in flattened:
        previous = elements[-1] if elements else None
        if isinstance(node, Literal) and isinstance(previous, Literal):
            elements[-1] = Literal(previous.text + node.text)
        elif node != EMPTY:
            elements.append(node)
    return elements[0] if len(elements) == 1 else Seq(tuple(elements)) if elements else EMPTY


def alt(*nodes: Node) -> Node:
    """Return a choice of the nodes: nested choices flattened, duplicates and empty classes dropped."""
    flattened = (alternative for node in nodes for alternative in (node.children if isinstance(node, Alt) else (node,)))
    alternatives = tuple(dict.fromkeys(node for node in flattened if node != Chars(())))
    return alternatives[0] if len(alternatives) == 1 else Alt(alternatives)


def repeat(node: Node, min_count: int = 0, max_count: int | None = None) -> Node:
    """Return `node` repeated `min_count` to `max_count` times. If `max_count` is None, there is no upper bound."""
    return node if (min_count, max_count) == (1, 1) else EMPTY if max_count == 0 else Repeat(node, min_count, max_count)


def as_automaton(node: Node) -> Node:
    """Return the node in a `Regular` if xgrammar compiles that correctly and fast, otherwise the node itself."""
    return Regular(node) if fits_automaton(node) else node


def fits_automaton(node: Node) -> bool:
    """Return whether xgrammar compiles `node` as one automaton, correctly and with precomputed masks. It does not if
    the node has references to rules, or if the automaton would have more than `MAX_AUTOMATON_STATES` states.

    xgrammar's automata are wrong for some repetitions inside other repetitions or branches: its `(?:ab*)?` matches b.
    So each part of the node may be repeated, but must not contain a repetition. The parts are the children of a
    sequence; any other node is one part.
    """
    elements = node.children if isinstance(node, Seq) else (node,)
    bodies = (element.child if isinstance(element, Repeat) else element for element in elements)
    return all(map(_is_simple, bodies)) and count_states(node) <= MAX_AUTOMATON_STATES


def _is_simple(node: Node) -> bool:
    """Whether a node consists only of characters, sequences and branches."""
    if isinstance(node, Seq | Alt):
        return all(map(_is_simple, node.children))
    return isinstance(node, Chars | Literal) and node != EMPTY


def count_states(node: Node) -> int:
    """Return the approximate number of states of the node's automaton."""
    match node:
        case Literal(text):
            return len(text)
        case Seq(children) | Alt(children):
            return sum(map(count_states, children))
        case Repeat(child, min_count, max_count):
            return count_states(child) * max(1, min_count if max_count is None else max_count)
        case _:
            return 1
