"""Writes grammar nodes in the notation that xgrammar reads."""

from collections.abc import Iterator

from cluster.grammar.nodes import (
    LAST,
    MOST_STATES,
    UTF8_LENGTHS,
    Alt,
    Blank,
    Chars,
    Literal,
    Node,
    Ref,
    Regular,
    Repeat,
    Seq,
    both,
    chars,
)

MOST_BLOCKS = 20  # a long repetition is split into at most this many blocks


def text_of(node: Node) -> str:
    """Return a node in the notation of a rule's body."""
    match node:
        case Literal(text):
            return '"' + "".join(_escaped(ord(character), '"\\') for character in text) + '"'
        case Chars(ranges):
            return "[" + "".join(_range(low, high) for low, high in ranges) + "]"
        case Ref(name):
            return name
        case Seq(parts):
            return " ".join(f"({text_of(part)})" if isinstance(part, Alt) else text_of(part) for part in parts)
        case Alt(parts):
            return " | ".join(map(text_of, parts))
        case Repeat(part, least, most):
            inner = text_of(part) if isinstance(part, Chars | Ref) else f"({text_of(part)})"
            if isinstance(part, Chars) and max(least, most or 0) > MOST_STATES:
                if _mixes(part) and most is not None and most <= MOST_STATES * MOST_BLOCKS:
                    return f"({text_of(_in_blocks(part, least, most))})"
                inner = _often(part)
            if most is None and least <= 1:
                return inner + "*+"[least]
            return inner + ("?" if (least, most) == (0, 1) else f"{{{least},{'' if most is None else most}}}")
        case Blank(part):
            return f"({text_of(part)})"
        case Regular(part):
            return f"Regex({text_of(Literal(_expression(part)))})"


def _mixes(part: Chars) -> bool:
    """Whether a class has ASCII characters, and other characters but not the last one of Unicode."""
    return bool(part.ranges) and part.ranges[0][0] < 0x80 <= part.ranges[-1][1] < LAST


def _in_blocks(part: Chars, least: int, most: int) -> Node:
    """Split a repetition into repetitions of at most `MOST_STATES`, whose masks xgrammar precomputes."""
    block = MOST_STATES
    if most <= block:
        return Repeat(part, least, most)
    whole, rest = Repeat(part, block, block), _in_blocks(part, max(1, least - block), most - block)
    return Seq((whole, rest)) if least > block else Alt((Repeat(part, least, block), Seq((whole, rest))))


def _often(part: Chars) -> str:
    """Return a class in a form that may be repeated more than `MOST_STATES` times.

    If a class repeated so often mixes ASCII with some other characters, xgrammar's masks allow tokens that its matcher
    then rejects. So the class is written as a negated class, or as an alternative of its ASCII and its other part.
    """
    if part.ranges and part.ranges[-1][1] == LAST:
        return "[^" + "".join(_range(low, high) for low, high in _lacking(part)) + "]"
    apart = [inside for inside in (both(part, chars((0, 0x7F))), both(part, chars((0x80, LAST)))) if inside.ranges]
    return f"({' | '.join(map(text_of, apart))})"


def _lacking(part: Chars) -> Iterator[tuple[int, int]]:
    """Yield the ranges of code points, surrogates included, that a class does not contain."""
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
    """Return the node as a regular expression in xgrammar's syntax."""
    match node:
        case Literal(text):
            return "".join(map(_quoted, text))
        case Chars():
            # One class per UTF-8 length, because a range across two lengths would also match invalid bytes.
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
