"""Grammars as values: a handful of nodes, named rules, and how they are written in the notation that xgrammar reads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.grammar.asked import GrammarError

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no character of a text; xgrammar's own `[^..]` lets them through
MOST_BLOCKS = 20  # of a repetition that is written in blocks
MOST_STATES = 100  # of one automaton, roughly: xgrammar does not compute the masks of a larger one beforehand
UTF8_LENGTHS = (0x80, 0x800, 0x10000, LAST + 1)  # its expressions let through bytes that are no text where a range
# goes over one of these
MAX_RULES = 20_000

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


Node = Chars | Literal | Ref | Seq | Alt | Repeat | Regular
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


@dataclass(slots=True)
class Rule:
    """What a name stands for. `before`: how what follows begins, as far as is known."""

    body: Node
    before: Node | None = None


@dataclass(slots=True)
class Rules:
    """Named rules as they are made."""

    rules: dict[str, Rule] = field(default_factory=dict)
    _names: dict[Node, str] = field(default_factory=dict)

    def reserve(self) -> Ref:
        """A name whose rule is told later, so that it may refer to itself."""
        if len(self.rules) >= MAX_RULES:
            raise GrammarError(f"it needs more than {MAX_RULES} rules; make it shorter")
        name = f"r{len(self.rules)}"
        self.rules[name] = Rule(NOTHING)
        return Ref(name)

    def tell(self, name: Ref, body: Node, before: Node | None = None) -> Ref:
        """What a reserved name stands for."""
        self.rules[name.name] = Rule(body, before)
        return name

    def add(self, body: Node, before: Node | None = None) -> Ref:
        """A rule of this body; the one there is, if there is one."""
        if isinstance(body, Ref):
            return body
        known = self._names.get(body)
        if known is None:
            known = self._names[body] = self.tell(self.reserve(), body, before).name
        return Ref(known)

    def written(self, root: Node) -> str:
        """The grammar of `root` in xgrammar's notation, without what has no end.

        Raises:
            GrammarError: nothing matches.
        """
        useful = self._useful()
        body = _pruned(root, useful)
        if body is None:
            raise GrammarError("nothing can match: something requires itself without end, or allows no value")
        lines = [f"root ::= {_text(body)}"]
        waiting = list(_names(body))
        seen = set(waiting)
        while waiting:
            rule = self.rules[name := waiting.pop()]
            kept = _pruned(rule.body, useful) or EMPTY
            before = "" if rule.before is None else f" (= {_text(rule.before)})"
            lines.append(f"{name} ::= ({_text(kept)}){before}")
            more = [other for other in _names(kept) if other not in seen]
            seen.update(more)
            waiting += dict.fromkeys(more)
        return "\n".join(lines) + "\n"

    def _useful(self) -> set[str]:
        """The rules that something finite matches."""
        useful: set[str] = set()
        before = -1
        while len(useful) > before:
            before = len(useful)
            for name, rule in self.rules.items():  # most refer to earlier ones, so this goes over them twice or so
                if name not in useful and _ends(rule.body, useful):
                    useful.add(name)
        return useful


def _ends(node: Node, useful: set[str]) -> bool:
    """Whether something finite matches, by the rules that are known to be useful."""
    match node:
        case Ref(name):
            return name in useful
        case Seq(parts):
            return all(_ends(part, useful) for part in parts)
        case Alt(parts):
            return any(_ends(part, useful) for part in parts)
        case Repeat(part, least, _):
            return least == 0 or _ends(part, useful)
        case Regular(part):
            return _ends(part, useful)
        case Chars(ranges):
            return bool(ranges)
        case Literal():
            return True


def _pruned(node: Node, useful: set[str]) -> Node | None:
    """The node without what has no end; None where nothing is left."""
    if not _ends(node, useful):
        return None
    match node:
        case Seq(parts):
            return Seq(tuple(kept for part in parts if (kept := _pruned(part, useful)) is not None))
        case Alt(parts):
            return Alt(tuple(kept for part in parts if (kept := _pruned(part, useful)) is not None))
        case Repeat(part, least, most):
            kept = _pruned(part, useful)
            return EMPTY if kept is None else Repeat(kept, least, most)
        case Regular(part):
            return Regular(_pruned(part, useful) or EMPTY)
        case _:
            return node


def _names(node: Node) -> Iterator[str]:
    """The rules that a node refers to."""
    match node:
        case Ref(name):
            yield name
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from _names(part)
        case Repeat(part, _, _):
            yield from _names(part)


def _text(node: Node) -> str:
    match node:
        case Literal(text):
            return '"' + "".join(_escaped(ord(character), '"\\') for character in text) + '"'
        case Chars(ranges):
            return "[" + "".join(_range(low, high) for low, high in ranges) + "]"
        case Ref(name):
            return name
        case Seq(parts):
            return " ".join(f"({_text(part)})" if isinstance(part, Alt) else _text(part) for part in parts)
        case Alt(parts):
            return " | ".join(map(_text, parts))
        case Repeat(part, least, most):
            inner = _text(part) if isinstance(part, Chars | Ref) else f"({_text(part)})"
            if isinstance(part, Chars) and max(least, most or 0) > MOST_STATES:
                if _mixes(part) and most is not None and most <= MOST_STATES * MOST_BLOCKS:
                    return f"({_text(_in_blocks(part, least, most))})"
                inner = _often(part)
            if most is None and least <= 1:
                return inner + "*+"[least]
            return inner + ("?" if (least, most) == (0, 1) else f"{{{least},{'' if most is None else most}}}")
        case Regular(part):
            return f"Regex({_text(Literal(_expression(part)))})"


def _mixes(part: Chars) -> bool:
    """Whether a class has characters of ASCII and some, but not all, of those at the end of Unicode."""
    return bool(part.ranges) and part.ranges[0][0] < 0x80 <= part.ranges[-1][1] < LAST


def _in_blocks(part: Chars, least: int, most: int) -> Node:
    """A repetition as repetitions of at most `MOST_STATES`, each of which has masks made beforehand."""
    block = MOST_STATES
    if most <= block:
        return Repeat(part, least, most)
    whole, rest = Repeat(part, block, block), _in_blocks(part, max(1, least - block), most - block)
    return Seq((whole, rest)) if least > block else Alt((Repeat(part, least, block), Seq((whole, rest))))


def _often(part: Chars) -> str:
    """A class that is repeated often. Where it mixes ASCII with a part of the rest, xgrammar's masks allow what it then
    does not accept, so it is written as what it lacks, or apart.
    """
    if part.ranges and part.ranges[-1][1] == LAST:
        return "[^" + "".join(_range(low, high) for low, high in _lacking(part)) + "]"
    apart = [inside for inside in (both(part, chars((0, 0x7F))), both(part, chars((0x80, LAST)))) if inside.ranges]
    return f"({' | '.join(map(_text, apart))})"


def _lacking(part: Chars) -> Iterator[tuple[int, int]]:
    """The code points that a class lacks, surrogates too."""
    after = 0
    for low, high in part.ranges:
        if low > after:
            yield after, low - 1
        after = high + 1


def _range(low: int, high: int) -> str:
    first, last = _escaped(low, "\\]^-["), _escaped(high, "\\]^-[")
    return first if low == high else f"{first}-{last}"


def _escaped(code: int, special: str) -> str:
    if 0x20 <= code < 0x7F:
        return f"\\{chr(code)}" if chr(code) in special else chr(code)
    return f"\\U{code:08x}"


def _expression(node: Node) -> str:
    """The node as a regular expression of xgrammar's."""
    match node:
        case Literal(text):
            return "".join(map(_quoted, text))
        case Chars():
            borders = zip((0, *UTF8_LENGTHS), UTF8_LENGTHS, strict=False)
            classes = [both(node, chars((low, high - 1))).ranges for low, high in borders]
            written = ["".join(_span(low, high) for low, high in ranges) for ranges in classes if ranges]
            return _choice([f"[{inside}]" for inside in written])
        case Seq(parts):
            return "".join(map(_expression, parts))
        case Alt(parts):
            return _choice([_expression(part) for part in parts])
        case Repeat(part, least, most):
            count = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
            return f"(?:{_expression(part)}){count}"
        case _:
            raise AssertionError(f"{node} is not regular")


def _choice(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _span(low: int, high: int) -> str:
    return _quoted(chr(low)) if low == high else f"{_quoted(chr(low))}-{_quoted(chr(high))}"


def _quoted(character: str) -> str:
    return f"\\{character}" if character in "^$\\.*+?()[]{}|/-" else character
