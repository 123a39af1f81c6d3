"""Regular expressions as grammars: the syntax that ECMAScript and Python share, with the same meaning in both.

An expression describes the whole text. Expressions are converted to grammar nodes, so xgrammar never reads them; syntax
that is not supported is refused by name. `.` is any character except line ends; `\\d` and `\\w` are ASCII only.
`\\p{L}` is a Unicode property as in ECMAScript, the dialect that JSON Schema recommends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.grammar.asked import GrammarError
from cluster.grammar.nodes import (
    EMPTY,
    Alt,
    Chars,
    Literal,
    Node,
    Ref,
    Repeat,
    Seq,
    alt,
    chars,
    complement,
    minus,
    one_of,
    repeat,
    seq,
)
from cluster.grammar.properties import OTHERS, property_of

MAX_DEPTH = 100
MAX_REPEATS = 10_000
DIGIT = one_of("0123456789")
WORD = chars((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE = one_of(" \t\n\r\f\v")
# Dialects disagree about which of these characters are white space. `\s` and `\S` both leave out the disputed
# characters, so that no dialect rejects an output.
WIDE_SPACE = chars(
    (0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
ASCII = chars((0, 0x7F))
CLASSES = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(WIDE_SPACE),
}
# inside a negated class, where the disputed characters must be in the class
OUTSIDE = CLASSES | {"s": WIDE_SPACE, "S": complement(SPACE)}
ANY = minus(complement(one_of("\n\r\x85")), chars((0x2028, 0x2029)))
CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
UNSUPPORTED = {
    "(?<=": "lookbehind",
    "(?<!": "lookbehind",
    "(?>": "atomic groups",
    "(?P=": "backreferences",
    "(?#": "comments",
    "(?(": "conditions",
}
START, END = Ref("^"), Ref("$")  # anchors, kept by `read` and removed by `plain`


@dataclass(frozen=True, slots=True)
class Look(Ref):
    """A lookahead: the rest of the text must begin with `part` or, if `negated`, must not begin with `part`. `read`
    returns such nodes; `plain` returns None if there are any.
    """

    part: Node
    negated: bool


def parse(expression: str) -> Node:
    """Return the grammar of an expression that matches the whole text.

    Raises:
        GrammarError: the text is not a valid expression, or uses unsupported syntax.
    """
    node = plain(read(expression))
    if node is None:
        raise GrammarError("lookahead is not supported here")
    return node


def read(expression: str) -> Node:
    """Return an expression with its anchors and lookaheads kept as `START`, `END` and `Look` nodes.

    Raises:
        GrammarError: the text is not a valid expression, or uses unsupported syntax.
    """
    node = _Reader(expression).read()
    _check_anchors(node, first=True, last=True)
    return node


def plain(node: Node) -> Node | None:
    """Return an expression without its anchors, so that it describes the whole text. Return None if the expression has
    lookaheads.
    """
    return None if any(isinstance(ref, Look) for ref in refs(node)) else mapped(node, lambda _: EMPTY, Ref)


def open_sided(node: Node, rest: Node) -> Node:
    """Add `rest` on the side of an expression that has no anchor: after an expression with only ^, before an expression
    with only $. An expression with both anchors, or with neither, describes the whole text and is returned unchanged.
    """
    anchors = {ref for ref in refs(node) if ref in (START, END)}
    if len(anchors) != 1:
        return node
    return seq(node, rest) if START in anchors else seq(rest, node)


def refs(node: Node) -> Iterator[Ref]:
    """Yield the anchors and lookaheads of an expression, except those inside a lookahead."""
    match node:
        case Ref():
            yield node
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from refs(part)
        case Repeat(part, _, _):
            yield from refs(part)


@dataclass(slots=True)
class _Reader:
    """A recursive-descent parser of one expression; `at` is the index of the next character."""

    text: str
    at: int = 0
    depth: int = 0

    def read(self) -> Node:
        node = self._branches()
        if self.at < len(self.text):
            raise self._wrong("unmatched )")
        return node

    def _wrong(self, what: str) -> GrammarError:
        return GrammarError(f"at character {self.at + 1} of the expression: {what}")

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _branches(self) -> Node:
        branches = [self._sequence()]
        while self._skip("|"):
            branches.append(self._sequence())
        return alt(*branches)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return seq(*parts)

    def _atom(self) -> Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape(negated=False)
        if character in "*+?{":
            raise self._wrong(f"{character} repeats nothing")
        self.at += 1
        if character in "^$":
            return START if character == "^" else END
        return ANY if character == "." else Literal(character)

    def _group(self) -> Node:
        for opening, what in UNSUPPORTED.items():
            if self.text.startswith(opening, self.at):
                raise self._wrong(f"{what} are not supported" if what[-1] == "s" else f"{what} is not supported")
        self.at += 1
        sign = self.text[self.at : self.at + 2]
        look = sign in ("?=", "?!")
        if look:
            self.at += 2
        elif self._skip("?") and not self._skip(":"):
            self._skip("P")
            name, closed, _ = self.text[self.at + 1 :].partition(">")
            if self._next() != "<" or not closed or not name.isidentifier():
                raise self._wrong("flags are not supported")
            self.at += len(name) + 2
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._wrong(f"groups are nested more than {MAX_DEPTH} deep")
        node = self._branches()
        if not self._skip(")"):
            raise self._wrong("a ( is not closed")
        self.depth -= 1
        return Look(sign, node, negated=sign == "?!") if look else node

    def _repeated(self, node: Node) -> Node:
        count = self._count()
        if count is None:
            return node
        if isinstance(node, Ref):
            raise self._wrong("^, $ and lookaheads cannot be repeated")
        self._skip("?")  # a lazy quantifier matches the same texts
        if self._next() in ("*", "+", "?") or self._count() is not None:
            raise self._wrong("two repetitions in a row")
        return repeat(node, *count)

    def _count(self) -> tuple[int, int | None] | None:
        """Consume a quantifier and return its bounds. Return None if no quantifier comes next."""
        for sign, count in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(sign):
                return count
        if not self._skip("{"):
            return None
        inside, closed, _ = self.text[self.at :].partition("}")
        least, comma, most = inside.partition(",")
        numbers = [part for part in (least, most) if part]
        if not closed or not least or not all(part.isascii() and part.isdigit() and len(part) < 9 for part in numbers):
            raise self._wrong("a repetition is {n}, {n,} or {n,m}; write \\{ for the character")
        low, high = int(least), int(most) if most else None if comma else int(least)
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise self._wrong(f"a repetition ends at {MAX_REPEATS}, and not before it begins")
        self.at += len(inside) + 1
        return low, high

    def _class(self) -> Node:
        self.at += 1
        negated = self._skip("^")
        if self._next() == "]":
            raise self._wrong("an empty class; write \\] for the character")
        found: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._member(negated)
            if self._next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._member(negated)
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or low[0][0] > high[0][0]:
                    raise self._wrong("a range that is none")
                low = ((low[0][0], high[0][0]),)
            found += low
        return complement(chars(*found)) if negated else chars(*found)

    def _member(self, negated: bool) -> tuple[tuple[int, int], ...]:
        """Consume one character or escape of a class and return its ranges."""
        character = self._next()
        if not character:
            raise self._wrong("a [ is not closed")
        if character == "\\":
            return self._escape(negated).ranges
        pair = self.text[self.at : self.at + 2]
        if pair in ("--", "&&", "||", "~~") or character == "[":
            raise self._wrong(f"write \\{character} in a class")
        self.at += 1
        return ((ord(character), ord(character)),)

    def _escape(self, negated: bool) -> Chars:
        """Consume a backslash escape and return its characters. `negated`: the escape stands in a negated class."""
        character = self.text[self.at + 1 : self.at + 2]
        classes = OUTSIDE if negated else CLASSES
        if character in ("p", "P"):
            return self._property(negated)
        if character in classes:
            self.at += 2
            return classes[character]
        digits = {"x": 2, "u": 4}.get(character)
        if digits:
            number = self.text[self.at + 2 : self.at + 2 + digits]
            if len(number) < digits or not all(digit in "0123456789abcdefABCDEF" for digit in number):
                raise self._wrong(f"\\{character} takes {digits} hexadecimal digits")
            self.at += 2 + digits
            return Chars(((int(number, 16),) * 2,))
        if character == "0" and self.text[self.at + 2 : self.at + 3].isdigit():
            raise self._wrong("octal escapes are not supported")
        if character not in CONTROL and (not character or character.isalnum()):
            backwards = character.isdigit() or character == "k"
            raise self._wrong("backreferences are not supported" if backwards else f"\\{character} is not supported")
        self.at += 2
        return one_of(CONTROL.get(character, character))

    def _property(self, negated: bool) -> Chars:
        r"""Return the characters of `\p{NAME}` or `\P{NAME}`. `negated`: the escape stands in a negated class."""
        without = self.text[self.at + 1] == "P"
        name, closed, _ = self.text[self.at + 3 :].partition("}")
        if self.text[self.at + 2 : self.at + 3] != "{" or not closed:
            raise self._wrong(r"a property is written as \p{NAME}")
        found = property_of(name)
        if found is None:
            known = f"general categories such as L and Lu, {', '.join(OTHERS)}"
            raise self._wrong(rf"\p{{{name[:40]}}} is not supported; known are {known}")
        self.at += len(name) + 4
        # An output must not hold a character that another Unicode version would reject. So \P, or \p in a negated
        # class, also excludes the characters that have the property only in some version (`possible`). \P in a negated
        # class excludes nothing: like \p, it admits only `sure`.
        members = found.possible if without != negated else found.sure
        return complement(members) if without else members


def _check_anchors(node: Node, first: bool, last: bool) -> None:
    """Raise if text could precede a ^ or follow a $. `first`: the node starts the whole text. `last`: it ends it."""
    match node:
        case Look():
            return  # anchors inside a lookahead are relative to it
        case Ref():
            if not (first if node == START else last):
                raise GrammarError("the expression has ^ or $ inside, where it cannot match")
        case Seq(parts):
            for at, part in enumerate(parts):
                begins = first and all(isinstance(before, Ref) for before in parts[:at])
                ends = last and all(isinstance(after, Ref) for after in parts[at + 1 :])
                _check_anchors(part, begins, ends)
        case Alt(parts):
            for part in parts:
                _check_anchors(part, first, last)
        case Repeat(part, _, _):
            _check_anchors(part, first=False, last=False)


def mapped(node: Node, change: Callable[[Node], Node], kind: type[Node]) -> Node:
    """Return the node with `change` applied to every part of the type `kind`."""
    if isinstance(node, kind):
        return change(node)
    match node:
        case Seq(parts):
            return seq(*(mapped(part, change, kind) for part in parts))
        case Alt(parts):
            return alt(*(mapped(part, change, kind) for part in parts))
        case Repeat(part, least, most):
            return repeat(mapped(part, change, kind), least, most)
        case _:
            return node


def lengths(node: Node) -> tuple[int, int | None]:
    """Return the minimum and maximum length, in characters, of texts that match. None means no maximum."""
    match node:
        case Literal(text):
            return len(text), len(text)
        case Seq(parts):
            pairs = [lengths(part) for part in parts]
            return sum(least for least, _ in pairs), _summed([most for _, most in pairs])
        case Alt(()):
            return 0, 0
        case Alt(parts):
            pairs = [lengths(part) for part in parts]
            ends = [most for _, most in pairs]
            most = None if None in ends else max(end for end in ends if end is not None)
            return min(least for least, _ in pairs), most
        case Repeat(part, fewest, times):
            least, most = lengths(part)
            endless = most is None or (times is None and most > 0)
            return least * fewest, None if endless else (most or 0) * (times or 0)
        case _:
            return 1, 1


def _summed(numbers: list[int | None]) -> int | None:
    return None if None in numbers else sum(number for number in numbers if number is not None)
