"""The strings that a schema allows, as one expression or as the automaton of an intersection of expressions."""

from collections.abc import Sequence

from cluster.grammar.asked import GrammarError
from cluster.grammar.automata import Automaton, TooLargeError, includes, intersection
from cluster.grammar.nodes import EMPTY, LAST, NOTHING, Alt, Literal, Node, Ref, Repeat, Seq, alt, chars, repeat, seq
from cluster.grammar.regex import ANY, END, Look, lengths, open_sided, parse, plain, read
from cluster.grammar.schema.formats import ENCODINGS, FORMATS, NARROWER, UNRESTRICTED
from cluster.grammar.schema.keywords import Schema, size

ALL = chars((0, LAST))
SHARED_BY = 8  # the length is divided between at most this many copies of a repeated part that is itself unbounded
# characters that an automaton may count; a longer bound is divided between the repetitions of the expression
MOST_COUNTED = 300


def text_of_schema(schema: Schema, excluded: Sequence[str] = ()) -> Node | Automaton:
    """Return the strings allowed by `minLength`, `maxLength`, `pattern`, `format` and `contentEncoding`, without
    `excluded`.

    If one expression, restricted to the lengths, satisfies all keywords, that expression is returned. Otherwise the
    automaton of the intersection is returned or, if it is too large, an expression for some of the allowed strings.

    Raises:
        GrammarError: these keywords cannot be enforced, or no string satisfies all of them.
    """
    least, most = size(schema, "minLength") or 0, size(schema, "maxLength")
    if most is not None and most < least:
        raise GrammarError(f"minLength {least} is more than maxLength {most}")
    patterns = _patterns(schema)
    named = _named(schema, beside_pattern=bool(patterns))
    required: list[Node] = [*patterns, *map(parse, named), *other_than(excluded)]
    for at in range(len(required)):
        required[at], (low, high) = without_counting(required[at])
        least, most = max(least, low), high if most is None else most if high is None else min(most, high)
    if most is not None and most < least:
        raise GrammarError(_excluded(schema))
    required = list(dict.fromkeys(required))
    if not required:
        return repeat(ALL, least, most)
    # Pairs of a plain expression and the element of `required` whose condition it satisfies.
    candidates = [(node, part) for part in required if (node := plain(part)) is not None]
    name = str(schema.get("format"))
    if named and name in NARROWER:
        candidates.append((parse(NARROWER[name]), parse(FORMATS[name])))
    for candidate, part in candidates:
        fitted = with_lengths(candidate, least, most)
        if fitted is not None and _held_by_others(required, part, fitted):
            return fitted
    return _together(schema, required, candidates, least, most)


def _together(
    schema: Schema, required: Sequence[Node], candidates: Sequence[tuple[Node, Node]], least: int, most: int | None
) -> Node | Automaton:
    """Return the automaton of the intersection within the lengths. If the automaton is too large, return an expression
    for some of its texts.
    """
    try:
        if max(least, most or 0) <= MOST_COUNTED:
            bounds = [repeat(ALL, least, most)] if (least, most) != (0, None) else []
            found = intersection([*required, *bounds])
            if found is None:
                raise GrammarError(_excluded(schema))
            return found
    except TooLargeError:
        pass
    for candidate, part in reversed(candidates):  # the narrower candidate comes last and needs fewer states
        shorter = candidate if most is None else at_most(candidate, most)
        if lengths(shorter)[0] >= least and shorter != NOTHING and _held_by_others(required, part, shorter):
            return shorter
    raise GrammarError(
        f"a string cannot be held to {_names(schema)}: it needs too many states; make the pattern simpler, or write "
        "the bounds into it, as in ^[a-z]{2,5}$"
    )


def other_than(texts: Sequence[str]) -> list[Node]:
    """Return a list with one expression, for any text except `texts`. If `texts` is empty, the list is empty."""
    return [seq(Look("?!", seq(alt(*map(Literal, texts)), END), negated=True), repeat(ALL))] if texts else []


def _held_by_others(required: Sequence[Node], part: Node, fitted: Node) -> bool:
    """Whether every expression except `part` matches all texts of `fitted`."""
    others = [node for node in required if node != part]
    return not others or includes(others, fitted)


def _names(schema: Schema) -> str:
    names = [name for name in ("pattern", "format", "contentEncoding", "minLength", "maxLength") if name in schema]
    return " and ".join(names)


def _excluded(schema: Schema) -> str:
    return f"no string holds {_names(schema)}" + ("" if len(_names(schema).split()) == 1 else " together")


def _patterns(schema: Schema) -> list[Node]:
    written = schema.get("pattern", ())
    found = written if isinstance(written, tuple) else (written,)  # a tuple of patterns, if schemas were merged
    if not all(isinstance(text, str) for text in found):
        raise GrammarError("pattern must be a string")
    return [open_sided(read(text), repeat(ALL)) for text in found]


def _named(schema: Schema, beside_pattern: bool) -> list[str]:
    """Return the expressions of `format` and `contentEncoding`.

    A format that JSON Schema does not define restricts nothing. If the schema also has a `pattern`, as generators
    write, the pattern decides. Otherwise the format is refused, because the client means a restriction.
    """
    found = []
    name, encoding = schema.get("format"), schema.get("contentEncoding")
    if name is not None and name not in UNRESTRICTED:
        if str(name) in FORMATS:
            found.append(FORMATS[str(name)])
        elif not beside_pattern:
            raise GrammarError(
                f"format {str(name)[:40]!r} is not enforced; write its pattern beside it, or leave it out"
            )
    if encoding is not None:
        if not isinstance(encoding, str) or encoding.lower() not in ENCODINGS:
            raise GrammarError(
                f"contentEncoding {str(encoding)[:40]!r} is not enforced; known are {', '.join(ENCODINGS)}"
            )
        found.append(ENCODINGS[encoding.lower()])
    return found


def without_counting(node: Node) -> tuple[Node, tuple[int, int | None]]:
    """Return an expression without its lookaheads that count characters, `^(?=.{a,b}$)`; and the bounds (a, b) of all
    these lookaheads together.

    `(?=.{a,b}\\.?$)` is read as the bounds (a, b) too: any text of a to b characters satisfies that lookahead.
    """
    kept: list[Node] = []
    bounds = []
    for part in node.parts if isinstance(node, Seq) else (node,):
        counted = _counted(part) if all(isinstance(before, Ref) for before in kept) else None
        if counted is None:
            kept.append(part)
        else:
            bounds.append(counted)
    if not bounds:
        return node, (0, None)
    rest = seq(*kept)
    found = plain(rest)
    if found is None or not includes([repeat(ANY)], found):
        # the lookahead also required that the text has no line ends, which `.` does not match
        rest = seq(Look("?=", seq(repeat(ANY), END), negated=False), rest)
    return rest, (max(low for low, _ in bounds), min(high for _, high in bounds))


def _counted(part: Node) -> tuple[int, int] | None:
    if not isinstance(part, Look) or part.negated or not isinstance(part.part, Seq):
        return None
    first, *rest = part.part.parts
    if not isinstance(first, Repeat) or first.part != ANY or first.most is None or rest[-1:] != [END]:
        return None
    optional = all(isinstance(node, Repeat) and node.least == 0 for node in rest[:-1])
    return (first.least, first.most) if optional else None


def with_lengths(node: Node, least: int, most: int | None) -> Node | None:
    """Return a plain expression, restricted to texts of `least` to `most` characters by changing the counts of its only
    repetition of variable length. Return None if that is not possible.
    """
    low, high = lengths(node)
    if low >= least and (most is None or (high is not None and high <= most)):
        return node
    parts = node.parts if isinstance(node, Seq) else (node,)
    flexible = [at for at, part in enumerate(parts) if len(set(lengths(part))) > 1]
    if len(flexible) != 1 or not isinstance(part := parts[flexible[0]], Repeat) or len(set(lengths(part.part))) > 1:
        return None
    unit, fixed = lengths(part.part)[0], low - lengths(part)[0]
    if not unit:
        return None
    fewest = max(part.least, -(-(least - fixed) // unit))
    times = (
        part.most
        if most is None
        else min((most - fixed) // unit, (most - fixed) // unit if part.most is None else part.most)
    )
    if times is not None and times < fewest:
        return None
    return seq(*parts[: flexible[0]], repeat(part.part, fewest, times), *parts[flexible[0] + 1 :])


def at_most(node: Node, most: int) -> Node:
    """Return an expression for some of the texts with at most `most` characters. The repetitions share this length."""
    low, high = lengths(node)
    if low > most:
        return NOTHING
    if high is not None and high <= most:
        return node
    match node:
        case Alt(parts):
            return alt(*(at_most(part, most) for part in parts))
        case Seq(parts):
            spans = [lengths(part) for part in parts]
            fixed = [0 if last is None else last - first for first, last in spans]
            endless = [last is None for _, last in spans].count(True)
            room = most - low
            # the length left for each unbounded part if all bounded parts have their full length
            each = max(0, room - sum(fixed)) // max(1, endless)
            share = min(1.0, (room - each * endless) / max(1, sum(fixed)))
            rooms = [each if last is None else int((last - first) * share) for first, last in spans]
            shorter = [at_most(part, first + more) for part, (first, _), more in zip(parts, spans, rooms, strict=True)]
            return NOTHING if NOTHING in shorter else seq(*shorter)
        case Repeat(part, least, times):
            if lengths(part)[1] is None:
                part = at_most(part, most // max(least, min(SHARED_BY, times or SHARED_BY)))
            if part == NOTHING:
                return NOTHING if least else EMPTY
            longest = max(1, lengths(part)[1] or 1)
            fits = most // longest
            return repeat(part, least, fits if times is None else min(fits, times)) if fits >= least else NOTHING
        case _:
            return node
