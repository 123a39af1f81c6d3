"""The strings that a schema allows, as one expression or as the automaton of an intersection of expressions."""

from collections.abc import Sequence

from cluster.grammar.asked import GrammarError
from cluster.grammar.automata import Automaton, TooLargeError, includes, intersection
from cluster.grammar.nodes import (
    EMPTY,
    MAX_CODE_POINT,
    NO_MATCH,
    Alt,
    Literal,
    Node,
    Ref,
    Repeat,
    Seq,
    alt,
    chars,
    repeat,
    seq,
)
from cluster.grammar.regex import (
    ANY,
    END,
    Lookahead,
    length_bounds,
    parse,
    parse_with_anchors,
    with_open_sides,
    without_anchors,
)
from cluster.grammar.schema.formats import ENCODINGS, FORMATS, NARROWER, UNRESTRICTED
from cluster.grammar.schema.keywords import Schema, size_keyword

ANY_CHARACTER = chars((0, MAX_CODE_POINT))
# If a repetition repeats a part that has no maximum length, the allowed length is divided by at most this many copies
# of the part (or by the required number of copies, if that is larger).
MAX_SHARED_COPIES = 8
# characters that an automaton may count; a longer bound is divided between the repetitions of the expression
MAX_COUNTED_LENGTH = 300


def strings_of_schema(schema: Schema, excluded: Sequence[str] = ()) -> Node | Automaton:
    """Return the strings allowed by `minLength`, `maxLength`, `pattern`, `format` and `contentEncoding`, without
    `excluded`.

    If the expression of one keyword, restricted to the lengths, satisfies all other keywords, that expression is
    returned. Otherwise the automaton of the intersection of all expressions is returned or, if it is too large, an
    expression for some of the allowed strings.

    Raises:
        GrammarError: these keywords cannot be enforced, or no string satisfies all of them.
    """
    min_length, max_length = size_keyword(schema, "minLength") or 0, size_keyword(schema, "maxLength")
    if max_length is not None and max_length < min_length:
        raise GrammarError(f"minLength {min_length} is more than maxLength {max_length}")
    patterns = _pattern_nodes(schema)
    format_patterns = _format_patterns(schema, has_pattern=bool(patterns))
    required: list[Node] = [*patterns, *map(parse, format_patterns), *excluding(excluded)]
    for index in range(len(required)):
        required[index], (low, high) = without_length_lookaheads(required[index])
        min_length, max_length = (
            max(min_length, low),
            high if max_length is None else max_length if high is None else min(max_length, high),
        )
    if max_length is not None and max_length < min_length:
        raise GrammarError(_unsatisfiable_message(schema))
    required = list(dict.fromkeys(required))
    if not required:
        return repeat(ANY_CHARACTER, min_length, max_length)
    # Pairs (expression without anchors, requirement): all texts of the expression match this requirement.
    candidates = [(node, requirement) for requirement in required if (node := without_anchors(requirement)) is not None]
    name = str(schema.get("format"))
    if format_patterns and name in NARROWER:
        candidates.append((parse(NARROWER[name]), parse(FORMATS[name])))
    for candidate, requirement in candidates:
        restricted = with_lengths(candidate, min_length, max_length)
        if restricted is not None and _satisfies_others(required, requirement, restricted):
            return restricted
    return _intersect(schema, required, candidates, min_length, max_length)


def _intersect(
    schema: Schema,
    required: Sequence[Node],
    candidates: Sequence[tuple[Node, Node]],
    min_length: int,
    max_length: int | None,
) -> Node | Automaton:
    """Return the automaton of the intersection within the lengths. If the automaton is too large, return an expression
    for some of its texts.
    """
    try:
        if max(min_length, max_length or 0) <= MAX_COUNTED_LENGTH:
            length_nodes = (
                [repeat(ANY_CHARACTER, min_length, max_length)] if (min_length, max_length) != (0, None) else []
            )
            automaton = intersection([*required, *length_nodes])
            if automaton is None:
                raise GrammarError(_unsatisfiable_message(schema))
            return automaton
    except TooLargeError:
        pass
    for candidate, requirement in reversed(candidates):  # the narrower candidate comes last and needs fewer states
        restricted = candidate if max_length is None else limit_length(candidate, max_length)
        if (
            length_bounds(restricted)[0] >= min_length
            and restricted != NO_MATCH
            and _satisfies_others(required, requirement, restricted)
        ):
            return restricted
    raise GrammarError(
        f"a string cannot satisfy {_keyword_names(schema)}: it needs too many states; make the pattern simpler, or "
        "write the bounds into it, as in ^[a-z]{2,5}$"
    )


def excluding(texts: Sequence[str]) -> list[Node]:
    """Return a list with one expression, for any text except `texts`. If `texts` is empty, the list is empty."""
    return (
        [seq(Lookahead("?!", seq(alt(*map(Literal, texts)), END), negated=True), repeat(ANY_CHARACTER))]
        if texts
        else []
    )


def _satisfies_others(required: Sequence[Node], requirement: Node, candidate: Node) -> bool:
    """Whether every expression except `requirement` matches all texts of `candidate`."""
    others = [node for node in required if node != requirement]
    return not others or includes(others, candidate)


def _keyword_names(schema: Schema) -> str:
    names = [name for name in ("pattern", "format", "contentEncoding", "minLength", "maxLength") if name in schema]
    return " and ".join(names)


def _unsatisfiable_message(schema: Schema) -> str:
    return f"no string holds {_keyword_names(schema)}" + (
        "" if len(_keyword_names(schema).split()) == 1 else " together"
    )


def _pattern_nodes(schema: Schema) -> list[Node]:
    pattern_value = schema.get("pattern", ())
    # a tuple of patterns, if schemas were merged
    patterns = pattern_value if isinstance(pattern_value, tuple) else (pattern_value,)
    if not all(isinstance(text, str) for text in patterns):
        raise GrammarError("pattern must be a string")
    return [with_open_sides(parse_with_anchors(text), repeat(ANY_CHARACTER)) for text in patterns]


def _format_patterns(schema: Schema, has_pattern: bool) -> list[str]:
    """Return the expressions of `format` and `contentEncoding`.

    A format in `FORMATS` gives an expression, one in `UNRESTRICTED` gives none. Any other format is ignored if the
    schema also has a `pattern`, because programs that generate schemas often write both. Otherwise the format is
    refused, because the client means a restriction.
    """
    patterns = []
    format_name, encoding = schema.get("format"), schema.get("contentEncoding")
    if format_name is not None and format_name not in UNRESTRICTED:
        if str(format_name) in FORMATS:
            patterns.append(FORMATS[str(format_name)])
        elif not has_pattern:
            raise GrammarError(
                f"format {str(format_name)[:40]!r} is not enforced; write its pattern beside it, or leave it out"
            )
    if encoding is not None:
        if not isinstance(encoding, str) or encoding.lower() not in ENCODINGS:
            raise GrammarError(
                f"contentEncoding {str(encoding)[:40]!r} is not enforced; known are {', '.join(ENCODINGS)}"
            )
        patterns.append(ENCODINGS[encoding.lower()])
    return patterns


def without_length_lookaheads(node: Node) -> tuple[Node, tuple[int, int | None]]:
    """Return an expression without its lookaheads that count characters, `^(?=.{a,b}$)`; and the bounds (a, b) of all
    these lookaheads together.

    `(?=.{a,b}\\.?$)` is read as the bounds (a, b) too: any text of a to b characters satisfies that lookahead. Without
    such lookaheads, the bounds are (0, None).
    """
    other_parts: list[Node] = []
    bounds = []
    for child in node.children if isinstance(node, Seq) else (node,):
        part_bounds = (
            _length_lookahead_bounds(child) if all(isinstance(previous, Ref) for previous in other_parts) else None
        )
        if part_bounds is None:
            other_parts.append(child)
        else:
            bounds.append(part_bounds)
    if not bounds:
        return node, (0, None)
    rest = seq(*other_parts)
    without_lookaheads = without_anchors(rest)
    if without_lookaheads is None or not includes([repeat(ANY)], without_lookaheads):
        # the lookahead also required that the text has no line ends, which `.` does not match
        rest = seq(Lookahead("?=", seq(repeat(ANY), END), negated=False), rest)
    return rest, (max(low for low, _ in bounds), min(high for _, high in bounds))


def _length_lookahead_bounds(lookahead: Node) -> tuple[int, int] | None:
    if not isinstance(lookahead, Lookahead) or lookahead.negated or not isinstance(lookahead.child, Seq):
        return None
    first, *rest = lookahead.child.children
    if not isinstance(first, Repeat) or first.child != ANY or first.max_count is None or rest[-1:] != [END]:
        return None
    rest_is_optional = all(isinstance(element, Repeat) and element.min_count == 0 for element in rest[:-1])
    return (first.min_count, first.max_count) if rest_is_optional else None


def with_lengths(node: Node, min_length: int, max_length: int | None) -> Node | None:
    """Return an expression without anchors, restricted to texts of `min_length` to `max_length` characters. Only the
    counts of its only part of variable length, a repetition, are changed. Return None if that is not possible.
    """
    low, high = length_bounds(node)
    if low >= min_length and (max_length is None or (high is not None and high <= max_length)):
        return node
    children = node.children if isinstance(node, Seq) else (node,)
    flexible_indices = [index for index, child in enumerate(children) if len(set(length_bounds(child))) > 1]
    if (
        len(flexible_indices) != 1
        or not isinstance(child := children[flexible_indices[0]], Repeat)
        or len(set(length_bounds(child.child))) > 1
    ):
        return None
    unit_length, fixed_length = length_bounds(child.child)[0], low - length_bounds(child)[0]
    if not unit_length:
        return None
    min_count = max(child.min_count, -(-(min_length - fixed_length) // unit_length))
    max_count = (
        child.max_count
        if max_length is None
        else min(
            (max_length - fixed_length) // unit_length,
            (max_length - fixed_length) // unit_length if child.max_count is None else child.max_count,
        )
    )
    if max_count is not None and max_count < min_count:
        return None
    return seq(
        *children[: flexible_indices[0]],
        repeat(child.child, min_count, max_count),
        *children[flexible_indices[0] + 1 :],
    )


def limit_length(node: Node, max_length: int) -> Node:
    """Return an expression that matches some of the node's texts, with at most `max_length` characters. This length is
    divided among the repetitions. Return `NO_MATCH` if no text is short enough, or if the division leaves none.
    """
    low, high = length_bounds(node)
    if low > max_length:
        return NO_MATCH
    if high is not None and high <= max_length:
        return node
    match node:
        case Alt(children):
            return alt(*(limit_length(child, max_length) for child in children))
        case Seq(children):
            bounds = [length_bounds(child) for child in children]
            flexible_lengths = [0 if max_part is None else max_part - min_part for min_part, max_part in bounds]
            num_unbounded = [max_part is None for _, max_part in bounds].count(True)
            extra_length = max_length - low
            # the length left for each unbounded part if all bounded parts have their full length
            length_per_unbounded = max(0, extra_length - sum(flexible_lengths)) // max(1, num_unbounded)
            flexible_share = min(
                1.0, (extra_length - length_per_unbounded * num_unbounded) / max(1, sum(flexible_lengths))
            )
            extra_lengths = [
                length_per_unbounded if max_part is None else int((max_part - min_part) * flexible_share)
                for min_part, max_part in bounds
            ]
            limited = [
                limit_length(child, min_part + extra)
                for child, (min_part, _), extra in zip(children, bounds, extra_lengths, strict=True)
            ]
            return NO_MATCH if NO_MATCH in limited else seq(*limited)
        case Repeat(child, min_count, max_count):
            if length_bounds(child)[1] is None:
                child = limit_length(
                    child, max_length // max(min_count, min(MAX_SHARED_COPIES, max_count or MAX_SHARED_COPIES))
                )
            if child == NO_MATCH:
                return NO_MATCH if min_count else EMPTY
            max_child_length = max(1, length_bounds(child)[1] or 1)
            num_fitting = max_length // max_child_length
            return (
                repeat(child, min_count, num_fitting if max_count is None else min(num_fitting, max_count))
                if num_fitting >= min_count
                else NO_MATCH
            )
        case _:
            return node
