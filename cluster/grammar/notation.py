"""Writes grammar nodes in the notation that xgrammar reads."""

from collections.abc import Iterator

from cluster.grammar.nodes import (
    MAX_AUTOMATON_STATES,
    MAX_CODE_POINT,
    UTF8_LENGTHS,
    Alt,
    Chars,
    Literal,
    Node,
    Ref,
    Regular,
    Repeat,
    Seq,
    Whitespace,
    chars,
    common_chars,
)

MAX_BLOCKS = 20  # a repetition that would need more blocks of `MAX_AUTOMATON_STATES` characters is not split


def node_to_text(node: Node) -> str:
    """Return a node in the notation of a rule's body."""
    match node:
        case Literal(text):
            return '"' + "".join(_escape(ord(character), '"\\') for character in text) + '"'
        case Chars(ranges):
            return "[" + "".join(_class_range(low, high) for low, high in ranges) + "]"
        case Ref(name):
            return name
        case Seq(children):
            return " ".join(
                f"({node_to_text(child)})" if isinstance(child, Alt) else node_to_text(child) for child in children
            )
        case Alt(children):
            return " | ".join(map(node_to_text, children))
        case Repeat(child, min_count, max_count):
            inner = node_to_text(child) if isinstance(child, Chars | Ref) else f"({node_to_text(child)})"
            if isinstance(child, Chars) and max(min_count, max_count or 0) > MAX_AUTOMATON_STATES:
                if (
                    _mixes_ascii_with_others(child)
                    and max_count is not None
                    and max_count <= MAX_AUTOMATON_STATES * MAX_BLOCKS
                ):
                    return f"({node_to_text(_split_into_blocks(child, min_count, max_count))})"
                inner = _class_for_long_repetition(child)
            if max_count is None and min_count <= 1:
                return inner + "*+"[min_count]
            return inner + (
                "?" if (min_count, max_count) == (0, 1) else f"{{{min_count},{'' if max_count is None else max_count}}}"
            )
        case Whitespace(child):
            return f"({node_to_text(child)})"
        case Regular(child):
            return f"Regex({node_to_text(Literal(_to_regex(child)))})"


def _mixes_ascii_with_others(chars_node: Chars) -> bool:
    """Whether a class has ASCII characters and others, and does not reach up to the last code point of Unicode."""
    return bool(chars_node.ranges) and chars_node.ranges[0][0] < 0x80 <= chars_node.ranges[-1][1] < MAX_CODE_POINT


def _split_into_blocks(chars_node: Chars, min_count: int, max_count: int) -> Node:
    """Split a repetition into parts of at most `MAX_AUTOMATON_STATES` characters, whose masks xgrammar precomputes."""
    block_size = MAX_AUTOMATON_STATES
    if max_count <= block_size:
        return Repeat(chars_node, min_count, max_count)
    full_block, rest = (
        Repeat(chars_node, block_size, block_size),
        _split_into_blocks(chars_node, max(1, min_count - block_size), max_count - block_size),
    )
    return (
        Seq((full_block, rest))
        if min_count > block_size
        else Alt((Repeat(chars_node, min_count, block_size), Seq((full_block, rest))))
    )


def _class_for_long_repetition(chars_node: Chars) -> str:
    """Return a class in a form that may be repeated more than `MAX_AUTOMATON_STATES` times.

    For such a long repetition of a class that mixes ASCII with other characters, xgrammar's masks allow tokens that its
    matcher then rejects. So a class that reaches up to the last code point is written as a negated class. Any other
    class is written as a choice between its ASCII characters and its other characters.
    """
    if chars_node.ranges and chars_node.ranges[-1][1] == MAX_CODE_POINT:
        return "[^" + "".join(_class_range(low, high) for low, high in _missing_ranges(chars_node)) + "]"
    ascii_and_others = [
        subset
        for subset in (
            common_chars(chars_node, chars((0, 0x7F))),
            common_chars(chars_node, chars((0x80, MAX_CODE_POINT))),
        )
        if subset.ranges
    ]
    return f"({' | '.join(map(node_to_text, ascii_and_others))})"


def _missing_ranges(chars_node: Chars) -> Iterator[tuple[int, int]]:
    """Yield the ranges of code points, surrogates included, that a class does not contain."""
    next_code = 0
    for low, high in chars_node.ranges:
        if low > next_code:
            yield next_code, low - 1
        next_code = high + 1


def _class_range(low: int, high: int) -> str:
    start, end = _escape(low, "\\]^-["), _escape(high, "\\]^-[")
    return start if low == high else f"{start}-{end}"


def _escape(code: int, special: str) -> str:
    if 0x20 <= code < 0x7F:
        return f"\\{chr(code)}" if chr(code) in special else chr(code)
    return f"\\U{code:08x}"


def _to_regex(node: Node) -> str:
    """Return the node as a regular expression in xgrammar's syntax."""
    match node:
        case Literal(text):
            return "".join(map(_quote_regex_char, text))
        case Chars():
            # One class per UTF-8 length, because a range across two lengths would also match invalid bytes.
            length_ranges = zip((0, *UTF8_LENGTHS), UTF8_LENGTHS, strict=False)
            classes = [common_chars(node, chars((low, high - 1))).ranges for low, high in length_ranges]
            class_bodies = ["".join(_regex_range(low, high) for low, high in ranges) for ranges in classes if ranges]
            return _regex_choice([f"[{class_body}]" for class_body in class_bodies])
        case Seq(children):
            return "".join(map(_to_regex, children))
        case Alt(children):
            return _regex_choice([_to_regex(child) for child in children])
        case Repeat(child, min_count, max_count):
            quantifier = (
                "*"
                if (min_count, max_count) == (0, None)
                else f"{{{min_count},{'' if max_count is None else max_count}}}"
            )
            return f"(?:{_to_regex(child)}){quantifier}"
        case _:
            raise AssertionError(f"{node} is not regular")


def _regex_choice(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def _regex_range(low: int, high: int) -> str:
    return (
        _quote_regex_char(chr(low)) if low == high else f"{_quote_regex_char(chr(low))}-{_quote_regex_char(chr(high))}"
    )


def _quote_regex_char(character: str) -> str:
    return f"\\{character}" if character in "^$\\.*+?()[]{}|/-" else character
