"""Regular expressions as grammars: the syntax that has the same meaning in ECMAScript and Python.

An expression describes the whole text. Expressions are converted to grammar nodes, so xgrammar never reads them; syntax
that is not supported is refused by name. `.` is any character except line ends; `\\d` and `\\w` are ASCII only. Two
kinds of syntax need not exist in both languages: `\\p{L}`, a Unicode property as in ECMAScript (the dialect that JSON
Schema recommends), and the names of groups, `(?P<name>..)` or `(?<name>..)`.
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
    chars_of,
    complement,
    minus,
    repeat,
    seq,
)
from cluster.grammar.properties import OTHER_PROPERTY_NAMES, property_of

MAX_DEPTH = 100
MAX_REPEATS = 10_000
DIGIT = chars_of("0123456789")
WORD = chars((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE = chars_of(" \t\n\r\f\v")
# All characters that some dialect counts as white space. The dialects agree only about those in `SPACE`. Both `\s` and
# `\S` leave out the disputed characters, so that no dialect rejects an output.
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
# Inside a negated class, `\s` and `\S` both contain the disputed characters, so that the negation excludes them.
CLASSES_IN_NEGATED = CLASSES | {"s": WIDE_SPACE, "S": complement(SPACE)}
ANY = minus(complement(chars_of("\n\r\x85")), chars((0x2028, 0x2029)))
CONTROL_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
UNSUPPORTED = {
    "(?<=": "lookbehind",
    "(?<!": "lookbehind",
    "(?>": "atomic groups",
    "(?P=": "backreferences",
    "(?#": "comments",
    "(?(": "conditions",
}
START, END = Ref("^"), Ref("$")  # anchors, kept by `parse_with_anchors` and removed by `without_anchors`


@dataclass(frozen=True, slots=True)
class Lookahead(Ref):
    """A lookahead: the rest of the text must begin with `child` or, if `negated`, must not begin with `child`.
    `parse_with_anchors` returns such nodes; `without_anchors` returns None if there are any.
    """

    child: Node
    negated: bool


def parse(expression: str) -> Node:
    """Return the grammar of an expression that matches the whole text.

    Raises:
        GrammarError: as `parse_with_anchors`, or the expression has a lookahead.
    """
    node = without_anchors(parse_with_anchors(expression))
    if node is None:
        raise GrammarError("lookahead is not supported here")
    return node


def parse_with_anchors(expression: str) -> Node:
    """Return an expression with its anchors and lookaheads kept as `START`, `END` and `Lookahead` nodes.

    Raises:
        GrammarError: the text is not a valid expression, uses unsupported syntax, or has ^ or $ where no text matches.
    """
    node = _RegexParser(expression).parse_all()
    _check_anchors(node, is_first=True, is_last=True)
    return node


def without_anchors(node: Node) -> Node | None:
    """Return an expression without its anchors, so that it describes the whole text. Return None if the expression has
    lookaheads.
    """
    return (
        None
        if any(isinstance(ref, Lookahead) for ref in anchors_and_lookaheads(node))
        else map_nodes(node, lambda _: EMPTY, Ref)
    )


def with_open_sides(node: Node, any_text: Node) -> Node:
    """Add `any_text` on the side of an expression that has no anchor: after an expression with only ^, before an
    expression with only $. An expression with both anchors, or with neither, describes the whole text and is returned
    unchanged.
    """
    anchors = {ref for ref in anchors_and_lookaheads(node) if ref in (START, END)}
    if len(anchors) != 1:
        return node
    return seq(node, any_text) if START in anchors else seq(any_text, node)


def anchors_and_lookaheads(node: Node) -> Iterator[Ref]:
    """Yield the anchors and lookaheads of an expression, except those inside a lookahead."""
    match node:
        case Ref():
            yield node
        case Seq(children) | Alt(children):
            for child in children:
                yield from anchors_and_lookaheads(child)
        case Repeat(child, _, _):
            yield from anchors_and_lookaheads(child)


@dataclass(slots=True)
class _RegexParser:
    """A recursive-descent parser of one expression; `position` is the index of the next character."""

    text: str
    position: int = 0
    depth: int = 0

    def parse_all(self) -> Node:
        node = self._parse_branches()
        if self.position < len(self.text):
            raise self._error("unmatched )")
        return node

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(f"at character {self.position + 1} of the expression: {problem}")

    def _next_character(self) -> str:
        return self.text[self.position : self.position + 1]

    def _skip_text(self, text: str) -> bool:
        matches = self.text.startswith(text, self.position)
        self.position += len(text) if matches else 0
        return matches

    def _parse_branches(self) -> Node:
        branches = [self._parse_sequence()]
        while self._skip_text("|"):
            branches.append(self._parse_sequence())
        return alt(*branches)

    def _parse_sequence(self) -> Node:
        nodes: list[Node] = []
        while self._next_character() not in ("", "|", ")"):
            nodes.append(self._parse_quantifier(self._parse_atom()))
        return seq(*nodes)

    def _parse_atom(self) -> Node:
        character = self._next_character()
        if character == "(":
            return self._parse_group()
        if character == "[":
            return self._parse_class()
        if character == "\\":
            return self._parse_escape(negated=False)
        if character in "*+?{":
            raise self._error(f"{character} repeats nothing")
        self.position += 1
        if character in "^$":
            return START if character == "^" else END
        return ANY if character == "." else Literal(character)

    def _parse_group(self) -> Node:
        for opening, feature in UNSUPPORTED.items():
            if self.text.startswith(opening, self.position):
                raise self._error(
                    f"{feature} are not supported" if feature[-1] == "s" else f"{feature} is not supported"
                )
        self.position += 1
        prefix = self.text[self.position : self.position + 2]
        is_lookahead = prefix in ("?=", "?!")
        if is_lookahead:
            self.position += 2
        elif self._skip_text("?") and not self._skip_text(":"):
            self._skip_text("P")
            name, closing, _ = self.text[self.position + 1 :].partition(">")
            if self._next_character() != "<" or not closing or not name.isidentifier():
                raise self._error("flags are not supported")
            self.position += len(name) + 2
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        node = self._parse_branches()
        if not self._skip_text(")"):
            raise self._error("a ( is not closed")
        self.depth -= 1
        return Lookahead(prefix, node, negated=prefix == "?!") if is_lookahead else node

    def _parse_quantifier(self, node: Node) -> Node:
        count = self._parse_count()
        if count is None:
            return node
        if isinstance(node, Ref):
            raise self._error("^, $ and lookaheads cannot be repeated")
        self._skip_text("?")  # a lazy quantifier matches the same texts
        if self._next_character() in ("*", "+", "?") or self._parse_count() is not None:
            raise self._error("two repetitions in a row")
        return repeat(node, *count)

    def _parse_count(self) -> tuple[int, int | None] | None:
        """Consume a quantifier and return its bounds. Return None if no quantifier comes next."""
        for quantifier, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip_text(quantifier):
                return bounds
        if not self._skip_text("{"):
            return None
        body, closing, _ = self.text[self.position :].partition("}")
        min_text, comma, max_text = body.partition(",")
        numbers = [number for number in (min_text, max_text) if number]
        if (
            not closing
            or not min_text
            or not all(number.isascii() and number.isdigit() and len(number) < 9 for number in numbers)
        ):
            raise self._error("a repetition is {n}, {n,} or {n,m}; write \\{ for the character")
        min_count, max_count = int(min_text), int(max_text) if max_text else None if comma else int(min_text)
        if max(min_count, max_count or 0) > MAX_REPEATS or (max_count is not None and max_count < min_count):
            raise self._error(f"a repetition count is at most {MAX_REPEATS}, and its maximum is not below its minimum")
        self.position += len(body) + 1
        return min_count, max_count

    def _parse_class(self) -> Node:
        self.position += 1
        negated = self._skip_text("^")
        if self._next_character() == "]":
            raise self._error("an empty class; write \\] for the character")
        ranges: list[tuple[int, int]] = []
        while not self._skip_text("]"):
            member = self._parse_class_member(negated)
            if self._next_character() == "-" and self.text[self.position + 1 : self.position + 2] not in ("]", ""):
                self.position += 1
                range_end = self._parse_class_member(negated)
                if (
                    len(member) != 1
                    or len(range_end) != 1
                    or member[0][0] != member[0][1]
                    or member[0][0] > range_end[0][0]
                ):
                    raise self._error("an invalid range")
                member = ((member[0][0], range_end[0][0]),)
            ranges += member
        return complement(chars(*ranges)) if negated else chars(*ranges)

    def _parse_class_member(self, negated: bool) -> tuple[tuple[int, int], ...]:
        """Consume one character or escape of a class and return its ranges."""
        character = self._next_character()
        if not character:
            raise self._error("a [ is not closed")
        if character == "\\":
            return self._parse_escape(negated).ranges
        pair = self.text[self.position : self.position + 2]
        if pair in ("--", "&&", "||", "~~") or character == "[":
            raise self._error(f"write \\{character} in a class")
        self.position += 1
        return ((ord(character), ord(character)),)

    def _parse_escape(self, negated: bool) -> Chars:
        """Consume a backslash escape and return its characters. `negated`: the escape stands in a negated class."""
        character = self.text[self.position + 1 : self.position + 2]
        classes = CLASSES_IN_NEGATED if negated else CLASSES
        if character in ("p", "P"):
            return self._parse_property(negated)
        if character in classes:
            self.position += 2
            return classes[character]
        digits = {"x": 2, "u": 4}.get(character)
        if digits:
            number = self.text[self.position + 2 : self.position + 2 + digits]
            if len(number) < digits or not all(digit in "0123456789abcdefABCDEF" for digit in number):
                raise self._error(f"\\{character} takes {digits} hexadecimal digits")
            self.position += 2 + digits
            return Chars(((int(number, 16),) * 2,))
        if character == "0" and self.text[self.position + 2 : self.position + 3].isdigit():
            raise self._error("octal escapes are not supported")
        if character not in CONTROL_ESCAPES and (not character or character.isalnum()):
            backwards = character.isdigit() or character == "k"
            raise self._error("backreferences are not supported" if backwards else f"\\{character} is not supported")
        self.position += 2
        return chars_of(CONTROL_ESCAPES.get(character, character))

    def _parse_property(self, negated: bool) -> Chars:
        r"""Return the characters of `\p{NAME}` or `\P{NAME}`. `negated`: the escape stands in a negated class."""
        is_complement = self.text[self.position + 1] == "P"
        name, closing, _ = self.text[self.position + 3 :].partition("}")
        if self.text[self.position + 2 : self.position + 3] != "{" or not closing:
            raise self._error(r"a property is written as \p{NAME}")
        unicode_property = property_of(name)
        if unicode_property is None:
            known = f"general categories such as L and Lu, {', '.join(OTHER_PROPERTY_NAMES)}"
            raise self._error(rf"\p{{{name[:40]}}} is not supported; known are {known}")
        self.position += len(name) + 4
        # An output must not hold a character that another Unicode version would reject. So \P, or \p in a negated
        # class, also excludes the characters that have the property only in some version. And [^\P{NAME}], like
        # \p{NAME}, matches only the characters that have the property in every version.
        characters = unicode_property.in_some_version if is_complement != negated else unicode_property.in_every_version
        return complement(characters) if is_complement else characters


def _check_anchors(node: Node, is_first: bool, is_last: bool) -> None:
    """Raise if text could precede a ^ or follow a $. `is_first`: the node starts the whole text. `is_last`: it ends
    the whole text.
    """
    match node:
        case Lookahead():
            return  # anchors inside a lookahead are relative to it
        case Ref():
            if not (is_first if node == START else is_last):
                raise GrammarError("the expression has ^ or $ inside, where it cannot match")
        case Seq(children):
            for index, child in enumerate(children):
                starts_text = is_first and all(isinstance(previous, Ref) for previous in children[:index])
                ends_text = is_last and all(isinstance(following, Ref) for following in children[index + 1 :])
                _check_anchors(child, starts_text, ends_text)
        case Alt(children):
            for child in children:
                _check_anchors(child, is_first, is_last)
        case Repeat(child, _, _):
            _check_anchors(child, is_first=False, is_last=False)


def map_nodes(node: Node, change: Callable[[Node], Node], node_type: type[Node]) -> Node:
    """Return the node with each part of the type `node_type` replaced by `change(part)`. The search goes into `Seq`,
    `Alt` and `Repeat`, but not into a replaced part.
    """
    if isinstance(node, node_type):
        return change(node)
    match node:
        case Seq(children):
            return seq(*(map_nodes(child, change, node_type) for child in children))
        case Alt(children):
            return alt(*(map_nodes(child, change, node_type) for child in children))
        case Repeat(child, min_count, max_count):
            return repeat(map_nodes(child, change, node_type), min_count, max_count)
        case _:
            return node


def length_bounds(node: Node) -> tuple[int, int | None]:
    """Return the minimum and maximum length, in characters, of texts that match. None means no maximum."""
    match node:
        case Literal(text):
            return len(text), len(text)
        case Seq(children):
            bounds = [length_bounds(child) for child in children]
            return sum(min_length for min_length, _ in bounds), _sum_or_none([max_length for _, max_length in bounds])
        case Alt(()):
            return 0, 0
        case Alt(children):
            bounds = [length_bounds(child) for child in children]
            max_lengths = [max_length for _, max_length in bounds]
            max_length = None if None in max_lengths else max(length for length in max_lengths if length is not None)
            return min(min_length for min_length, _ in bounds), max_length
        case Repeat(child, min_count, max_count):
            min_length, max_length = length_bounds(child)
            is_unbounded = max_length is None or (max_count is None and max_length > 0)
            return min_length * min_count, None if is_unbounded else (max_length or 0) * (max_count or 0)
        case _:
            return 1, 1


def _sum_or_none(numbers: list[int | None]) -> int | None:
    return None if None in numbers else sum(number for number in numbers if number is not None)
