"""JSON numbers within exact bounds as grammars: bounds are decimals of any size, compared digit by digit."""

import math
from decimal import Decimal

from cluster.grammar.asked import GrammarError
from cluster.grammar.automata import TooLargeError, intersection, restricted
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, Chars, Literal, Node, Repeat, alt, chars, one_of, repeat, seq
from cluster.grammar.schema.formats import FORMATS, INTEGERS, STORED, UNRESTRICTED
from cluster.grammar.schema.keywords import Schema
from cluster.grammar.schema.stepwise import rules_of

DIGIT = chars((0x30, 0x39))
DIGITS = Repeat(DIGIT, 0, None)
FRACTION = repeat(seq(Literal("."), DIGIT, DIGITS), 0, 1)
WHOLE = alt(Literal("0"), seq(chars((0x31, 0x39)), DIGITS))
MINUS = Literal("-")
INTEGER = alt(Literal("0"), seq(repeat(MINUS, 0, 1), chars((0x31, 0x39)), DIGITS))
EXPONENT = repeat(seq(one_of("eE"), repeat(one_of("+-"), 0, 1), DIGIT, DIGITS), 0, 1)
NUMBER = seq(repeat(MINUS, 0, 1), WHOLE, FRACTION, EXPONENT)
MAX_DIGITS = 100  # maximum number of digits of a bound
MAX_MULTIPLES = 2000


def integer(rules: Rules, schema: Schema) -> Node:
    """Return an integer by `minimum`, `maximum`, their exclusive forms, `multipleOf` and `format`."""
    least, most = _whole_bounds(schema)
    if least is not None and most is not None and least > most:
        raise GrammarError("no integer lies between minimum and maximum")
    step = _number(schema, "multipleOf")
    if step is not None and step != 1:
        return _multiples(rules, step, least, most)
    if least is None and most is None:
        return INTEGER
    return rules.add(_signed(least, most))


def _whole_bounds(schema: Schema) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer that the bounds and the format of a schema allow. None stands for no
    bound.
    """
    low, above = _lower(schema)
    high, below = _upper(schema)
    least = None if low is None else math.ceil(low)
    most = None if high is None else math.floor(high)
    least = least + 1 if least is not None and above and least == low else least
    most = most - 1 if most is not None and below and most == high else most
    first, last = _stored(schema) or (None, None)
    least = first if least is None else least if first is None else max(least, first)
    most = last if most is None else most if last is None else min(most, last)
    return least, most


def _stored(schema: Schema) -> tuple[int, int] | None:
    """Return the bounds of a `format` of integers, or None if the format sets no bounds, such as a format of
    strings.
    """
    name = str(schema.get("format", "float"))
    if name not in INTEGERS and name not in STORED and name not in FORMATS and name not in UNRESTRICTED:
        known = ", ".join(sorted([*INTEGERS, *STORED]))
        raise GrammarError(f"format {name[:40]!r} of a number is not enforced; known are {known}")
    return INTEGERS.get(name)


def number(rules: Rules, schema: Schema) -> Node:
    """Return a number by `minimum`, `maximum`, their exclusive forms and `multipleOf`. If the schema has any of these
    keywords, the number is written without exponent.
    """
    step = _number(schema, "multipleOf")
    if _stored(schema) is not None or (step is not None and step == math.floor(step)):
        return integer(rules, schema)  # a multiple of a whole number is a whole number
    bounded = _bounded(schema)
    if step is not None:
        return _stepped(rules, seq(repeat(MINUS, 0, 1), WHOLE, FRACTION) if bounded == NUMBER else bounded, step)
    return bounded if bounded == NUMBER else rules.add(bounded)


def _bounded(schema: Schema) -> Node:
    """Return a number within the bounds of a schema."""
    low, above = _lower(schema)
    high, below = _upper(schema)
    if low is None and high is None:
        return NUMBER
    if low is not None and high is not None and (low > high or (low == high and (above or below))):
        raise GrammarError("no number lies between minimum and maximum")
    parts = []
    if low is None or low < 0:
        smallest = (high.copy_abs(), below) if high is not None and high <= 0 else (Decimal(0), True)
        parts.append(seq(MINUS, _magnitude(smallest, None if low is None else (low.copy_abs(), above))))
    if high is None or high > 0 or (high == 0 and not below):
        smallest = (low, above) if low is not None and low >= 0 else (Decimal(0), False)
        parts.append(_magnitude(smallest, None if high is None else (high, below)))
    return alt(*parts)


def _lower(schema: Schema) -> tuple[Decimal | None, bool]:
    """Return the lower bound, and whether it is exclusive."""
    low, over = _number(schema, "minimum"), _number(schema, "exclusiveMinimum")
    return (over, True) if over is not None and (low is None or over >= low) else (low, False)


def _upper(schema: Schema) -> tuple[Decimal | None, bool]:
    high, under = _number(schema, "maximum"), _number(schema, "exclusiveMaximum")
    return (under, True) if under is not None and (high is None or under <= high) else (high, False)


def _number(schema: Schema, name: str) -> Decimal | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise GrammarError(f"{name} must be a number")
    exact = Decimal(value)
    if abs(exact.adjusted()) > MAX_DIGITS or len(exact.as_tuple().digits) > MAX_DIGITS:
        raise GrammarError(f"{name} has more than {MAX_DIGITS} digits")
    if name == "multipleOf" and exact <= 0:
        raise GrammarError("multipleOf must be more than 0")
    return Decimal(int(exact)) if exact == exact.to_integral_value() else exact


def _signed(least: int | None, most: int | None) -> Node:
    parts: list[Node] = []
    if least is None or least < 0:
        smallest = max(1, -most) if most is not None else 1
        parts.append(seq(MINUS, _whole(smallest, None if least is None else -least)))
    if (least is None or least <= 0) and (most is None or most >= 0):
        parts.append(Literal("0"))
    if most is None or most > 0:
        parts.append(_whole(max(1, least or 1), most))
    return alt(*parts)


def _whole(least: int, most: int | None) -> Node:
    """Return an integer from `least` (0 or more) to `most`, without leading zeros."""
    low = str(least)
    if most is None:
        longer = seq(chars((0x31, 0x39)), repeat(DIGIT, len(low), len(low)), DIGITS)
        return alt(_same_length(low, "9" * len(low)), longer)
    high = str(most)
    parts = []
    for length in range(len(low), len(high) + 1):
        first = low if length == len(low) else "1" + "0" * (length - 1)
        last = high if length == len(high) else "9" * length
        if int(first) <= int(last):
            parts.append(_same_length(first, last))
    return alt(*parts)


def _same_length(low: str, high: str) -> Node:
    """Return the digit strings from `low` to `high`, which have the same length."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return seq(_digit(low[0], high[0]), repeat(DIGIT, rest, rest))
    if low[0] == high[0]:
        return seq(Literal(low[0]), _same_length(low[1:], high[1:]))
    between = _digit(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))
    return alt(
        seq(Literal(low[0]), _same_length(low[1:], "9" * rest)),
        seq(between, repeat(DIGIT, rest, rest)) if between.ranges else Chars(()),
        seq(Literal(high[0]), _same_length("0" * rest, high[1:])),
    )


def _digit(low: str, high: str) -> Chars:
    return chars((ord(low), ord(high))) if low <= high else Chars(())


Bound = tuple[Decimal, bool]


def _magnitude(low: Bound, high: Bound | None) -> Node:
    """Return a number without sign from `low` (0 or more) to `high`. A bound is (value, whether it is exclusive)."""
    whole, fraction = _digits(low[0])
    if high is None:
        return alt(seq(_whole(whole + 1, None), FRACTION), seq(Literal(str(whole)), _above(fraction, low[1])))
    most, last = _digits(high[0])
    if whole == most:
        return seq(Literal(str(whole)), _between(fraction, low[1], last, high[1]))
    return alt(
        seq(Literal(str(whole)), _above(fraction, low[1])),
        seq(_whole(whole + 1, most - 1), FRACTION) if most - whole > 1 else Chars(()),
        seq(Literal(str(most)), _below(last, high[1])),
    )


def _digits(value: Decimal) -> tuple[int, str]:
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _above(bound: str, strict: bool) -> Node:
    """Return a fraction part, or none, with a value of at least the fraction digits `bound`; if `strict`, above
    them.
    """
    if not bound and not strict:
        return FRACTION
    return seq(Literal("."), _more(bound, strict))


def _below(bound: str, strict: bool) -> Node:
    if not bound:
        return Chars(()) if strict else repeat(seq(Literal("."), repeat(one_of("0"), 1)), 0, 1)
    return repeat(seq(Literal("."), _less(bound, strict)), 0, 1)


def _between(low: str, above: bool, high: str, below: bool) -> Node:
    width = max(len(low), len(high))
    inside = _inside(low.ljust(width, "0"), above, high.ljust(width, "0"), below)
    none = not low and not above
    return repeat(seq(Literal("."), inside), 0, 1) if none else seq(Literal("."), inside)


def _more(bound: str, strict: bool) -> Node:
    """Return one or more digits whose value as a fraction is at least that of `bound`; if `strict`, above it."""
    if not bound:
        return seq(repeat(one_of("0")), chars((0x31, 0x39)), DIGITS) if strict else seq(DIGIT, DIGITS)
    rest = _more(bound[1:], strict)
    after = alt(rest, EMPTY) if not bound[1:] and not strict else rest
    return alt(seq(_digit(chr(ord(bound[0]) + 1), "9"), DIGITS), seq(Literal(bound[0]), after))


def _less(bound: str, strict: bool) -> Node:
    """Return one or more digits whose value as a fraction is at most that of `bound`; if `strict`, below it."""
    if not bound:
        return Chars(()) if strict else repeat(one_of("0"), 1)
    smaller = _digit("0", chr(ord(bound[0]) - 1))
    more_to_come = set(bound[1:]) - {"0"}
    end: Node = EMPTY if more_to_come or not strict else Chars(())
    return alt(
        seq(smaller, DIGITS) if smaller.ranges else Chars(()),
        seq(Literal(bound[0]), alt(end, _less(bound[1:], strict))),
    )


def _inside(low: str, above: bool, high: str, below: bool) -> Node:
    """Return one or more digits whose value as a fraction is between two bounds of the same length. `above` and `below`
    say whether the bounds `low` and `high` are exclusive.
    """
    if not low:
        return Chars(()) if above or below else repeat(one_of("0"), 1)
    if low[0] == high[0]:
        reached = not above and not set(low[1:]) - {"0"}
        return seq(Literal(low[0]), alt(EMPTY if reached else Chars(()), _inside(low[1:], above, high[1:], below)))
    between = _digit(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))
    rest, last = low[1:].rstrip("0"), high[1:].rstrip("0")
    return alt(
        seq(Literal(low[0]), alt(EMPTY if not rest and not above else Chars(()), _more(rest, above))),
        seq(between, DIGITS) if between.ranges else Chars(()),
        seq(Literal(high[0]), alt(EMPTY if last or not below else Chars(()), _less(last, below))),
    )


def _multiples(rules: Rules, step: Decimal, least: int | None, most: int | None) -> Node:
    """Return an integer between bounds that is a multiple of a step."""
    whole = step.as_integer_ratio()[0]  # an integer is a multiple of 2.5 = 5/2 exactly if it is a multiple of 5
    if least is not None and most is not None and (most - least) // whole <= MAX_MULTIPLES:
        found = [Literal(str(value)) for value in range(-(-least // whole) * whole, most + 1, whole)]
        if not found:
            raise GrammarError("no multiple lies between minimum and maximum")
        return rules.add(alt(*found))
    return _stepped(rules, INTEGER if least is None and most is None else _signed(least, most), Decimal(whole))


State = tuple[int, int | None]


def _stepped(rules: Rules, allowed: Node, step: Decimal) -> Node:
    """Return the numbers of `allowed`, without exponent, that are multiples of a step.

    The state of the automaton is the remainder of the digits so far, and the number of decimals so far, which is None
    before the decimal point. A multiple has no more decimals than its step.
    """
    places = max(0, -int(step.normalize().as_tuple().exponent))
    by = int(step.scaleb(places))

    def after(state: State, character: str) -> State | None:
        remainder, decimals = state
        if character == "-":
            return state
        if character == ".":
            return (remainder, 0) if places else None
        if decimals == places and places:
            return None
        return (10 * remainder + int(character)) % by, None if decimals is None else decimals + 1

    def holds(state: State) -> bool:
        remainder, decimals = state
        return bool(remainder * 10 ** (places - (decimals or 0)) % by == 0)

    start: State = (0, None)
    try:
        whole = intersection([allowed])
        found = None if whole is None else restricted(whole, start, after, holds)
    except TooLargeError as error:
        raise GrammarError(
            f"multipleOf {step} is not enforced: {error}; take a smaller one, or fewer digits"
        ) from error
    if found is None:
        raise GrammarError("no multiple lies between minimum and maximum")
    return rules.add(rules_of(rules, found, lambda read: read))
