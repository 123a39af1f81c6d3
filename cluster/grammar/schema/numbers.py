"""JSON numbers within exact bounds as grammars. A bound is a decimal of at most `MAX_DIGITS` digits, and a grammar
compares digit by digit.
"""

import math
from decimal import Decimal

from cluster.grammar.asked import GrammarError
from cluster.grammar.automata import TooLargeError, intersection, product
from cluster.grammar.ebnf import Rules
from cluster.grammar.nodes import EMPTY, Chars, Literal, Node, Repeat, alt, chars, chars_of, repeat, seq
from cluster.grammar.schema.formats import FORMATS, INTEGERS, STORAGE_TYPES, UNRESTRICTED
from cluster.grammar.schema.keywords import Schema
from cluster.grammar.schema.stepwise import automaton_rules

DIGIT = chars((0x30, 0x39))
DIGITS = Repeat(DIGIT, 0, None)
FRACTION = repeat(seq(Literal("."), DIGIT, DIGITS), 0, 1)
UNSIGNED_INTEGER = alt(Literal("0"), seq(chars((0x31, 0x39)), DIGITS))
MINUS = Literal("-")
INTEGER = alt(Literal("0"), seq(repeat(MINUS, 0, 1), chars((0x31, 0x39)), DIGITS))
EXPONENT = repeat(seq(chars_of("eE"), repeat(chars_of("+-"), 0, 1), DIGIT, DIGITS), 0, 1)
NUMBER = seq(repeat(MINUS, 0, 1), UNSIGNED_INTEGER, FRACTION, EXPONENT)
MAX_DIGITS = 100  # maximum number of digits of a bound
MAX_MULTIPLES = 2000


def integer(rules: Rules, schema: Schema) -> Node:
    """Return the grammar of the integers allowed by `minimum`, `maximum`, their exclusive forms, `multipleOf` and
    `format`.
    """
    minimum, maximum = _integer_bounds(schema)
    if minimum is not None and maximum is not None and minimum > maximum:
        raise GrammarError("no integer lies between minimum and maximum")
    step = _number_keyword(schema, "multipleOf")
    if step is not None and step != 1:
        return _integer_multiples(rules, step, minimum, maximum)
    if minimum is None and maximum is None:
        return INTEGER
    return rules.add(_signed_integers(minimum, maximum))


def _integer_bounds(schema: Schema) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer that the bounds and the format of a schema allow. None stands for no
    bound.
    """
    low, low_exclusive = _lower_bound(schema)
    high, high_exclusive = _upper_bound(schema)
    minimum = None if low is None else math.ceil(low)
    maximum = None if high is None else math.floor(high)
    minimum = minimum + 1 if minimum is not None and low_exclusive and minimum == low else minimum
    maximum = maximum - 1 if maximum is not None and high_exclusive and maximum == high else maximum
    format_min, format_max = _format_bounds(schema) or (None, None)
    minimum = format_min if minimum is None else minimum if format_min is None else max(minimum, format_min)
    maximum = format_max if maximum is None else maximum if format_max is None else min(maximum, format_max)
    return minimum, maximum


def _format_bounds(schema: Schema) -> tuple[int, int] | None:
    """Return the bounds of a `format` of integers, or None if the format sets no bounds, such as a format of
    strings.
    """
    name = str(schema.get("format", "float"))
    if name not in INTEGERS and name not in STORAGE_TYPES and name not in FORMATS and name not in UNRESTRICTED:
        known = ", ".join(sorted([*INTEGERS, *STORAGE_TYPES]))
        raise GrammarError(f"format {name[:40]!r} of a number is not enforced; known are {known}")
    return INTEGERS.get(name)


def number(rules: Rules, schema: Schema) -> Node:
    """Return the grammar of numbers that `minimum`, `maximum`, their exclusive forms, `multipleOf` and `format` allow.
    If any of these keywords limits the numbers, they are written without exponent.
    """
    step = _number_keyword(schema, "multipleOf")
    if _format_bounds(schema) is not None or (step is not None and step == math.floor(step)):
        return integer(rules, schema)  # a multiple of a whole number is a whole number
    bounded_node = _bounded_number(schema)
    if step is not None:
        return _multiples_of(
            rules,
            seq(repeat(MINUS, 0, 1), UNSIGNED_INTEGER, FRACTION) if bounded_node == NUMBER else bounded_node,
            step,
        )
    return bounded_node if bounded_node == NUMBER else rules.add(bounded_node)


def _bounded_number(schema: Schema) -> Node:
    """Return the grammar of numbers within the bounds of a schema."""
    low, low_exclusive = _lower_bound(schema)
    high, high_exclusive = _upper_bound(schema)
    if low is None and high is None:
        return NUMBER
    if low is not None and high is not None and (low > high or (low == high and (low_exclusive or high_exclusive))):
        raise GrammarError("no number lies between minimum and maximum")
    parts = []
    if low is None or low < 0:
        low_magnitude = (high.copy_abs(), high_exclusive) if high is not None and high <= 0 else (Decimal(0), True)
        parts.append(
            seq(MINUS, _unsigned_numbers(low_magnitude, None if low is None else (low.copy_abs(), low_exclusive)))
        )
    if high is None or high > 0 or (high == 0 and not high_exclusive):
        low_magnitude = (low, low_exclusive) if low is not None and low >= 0 else (Decimal(0), False)
        parts.append(_unsigned_numbers(low_magnitude, None if high is None else (high, high_exclusive)))
    return alt(*parts)


def _lower_bound(schema: Schema) -> tuple[Decimal | None, bool]:
    """Return the lower bound, and whether it is exclusive."""
    minimum, exclusive_minimum = _number_keyword(schema, "minimum"), _number_keyword(schema, "exclusiveMinimum")
    return (
        (exclusive_minimum, True)
        if exclusive_minimum is not None and (minimum is None or exclusive_minimum >= minimum)
        else (minimum, False)
    )


def _upper_bound(schema: Schema) -> tuple[Decimal | None, bool]:
    maximum, exclusive_maximum = _number_keyword(schema, "maximum"), _number_keyword(schema, "exclusiveMaximum")
    return (
        (exclusive_maximum, True)
        if exclusive_maximum is not None and (maximum is None or exclusive_maximum <= maximum)
        else (maximum, False)
    )


def _number_keyword(schema: Schema, name: str) -> Decimal | None:
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


def _signed_integers(minimum: int | None, maximum: int | None) -> Node:
    alternatives: list[Node] = []
    if minimum is None or minimum < 0:
        min_magnitude = max(1, -maximum) if maximum is not None else 1
        alternatives.append(seq(MINUS, _unsigned_integers(min_magnitude, None if minimum is None else -minimum)))
    if (minimum is None or minimum <= 0) and (maximum is None or maximum >= 0):
        alternatives.append(Literal("0"))
    if maximum is None or maximum > 0:
        alternatives.append(_unsigned_integers(max(1, minimum or 1), maximum))
    return alt(*alternatives)


def _unsigned_integers(minimum: int, maximum: int | None) -> Node:
    """Return the grammar of integers from `minimum` (0 or more) to `maximum`, written without leading zeros."""
    min_digits = str(minimum)
    if maximum is None:
        longer = seq(chars((0x31, 0x39)), repeat(DIGIT, len(min_digits), len(min_digits)), DIGITS)
        return alt(_digits_of_same_length(min_digits, "9" * len(min_digits)), longer)
    max_digits = str(maximum)
    alternatives = []
    for length in range(len(min_digits), len(max_digits) + 1):
        first_digits = min_digits if length == len(min_digits) else "1" + "0" * (length - 1)
        last_digits = max_digits if length == len(max_digits) else "9" * length
        if int(first_digits) <= int(last_digits):
            alternatives.append(_digits_of_same_length(first_digits, last_digits))
    return alt(*alternatives)


def _digits_of_same_length(low: str, high: str) -> Node:
    """Return the grammar of the digit strings from `low` to `high`, which have the same length."""
    if not low:
        return EMPTY
    rest_length = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return seq(_digit_range(low[0], high[0]), repeat(DIGIT, rest_length, rest_length))
    if low[0] == high[0]:
        return seq(Literal(low[0]), _digits_of_same_length(low[1:], high[1:]))
    middle_digits = _digit_range(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))
    return alt(
        seq(Literal(low[0]), _digits_of_same_length(low[1:], "9" * rest_length)),
        seq(middle_digits, repeat(DIGIT, rest_length, rest_length)) if middle_digits.ranges else Chars(()),
        seq(Literal(high[0]), _digits_of_same_length("0" * rest_length, high[1:])),
    )


def _digit_range(low: str, high: str) -> Chars:
    return chars((ord(low), ord(high))) if low <= high else Chars(())


Bound = tuple[Decimal, bool]


def _unsigned_numbers(low: Bound, high: Bound | None) -> Node:
    """Return the grammar of numbers without a sign, from `low` (0 or more) to `high`. A bound is (value, whether it is
    exclusive).
    """
    low_integer, low_fraction = _split_decimal(low[0])
    if high is None:
        return alt(
            seq(_unsigned_integers(low_integer + 1, None), FRACTION),
            seq(Literal(str(low_integer)), _fraction_at_least(low_fraction, low[1])),
        )
    high_integer, high_fraction = _split_decimal(high[0])
    if low_integer == high_integer:
        return seq(Literal(str(low_integer)), _fraction_between(low_fraction, low[1], high_fraction, high[1]))
    return alt(
        seq(Literal(str(low_integer)), _fraction_at_least(low_fraction, low[1])),
        seq(_unsigned_integers(low_integer + 1, high_integer - 1), FRACTION)
        if high_integer - low_integer > 1
        else Chars(()),
        seq(Literal(str(high_integer)), _fraction_at_most(high_fraction, high[1])),
    )


def _split_decimal(value: Decimal) -> tuple[int, str]:
    integer, _, fraction = f"{value:f}".partition(".")
    return int(integer), fraction.rstrip("0")


def _fraction_at_least(bound: str, is_exclusive: bool) -> Node:
    """Return the grammar of fraction parts, such as `.25`, whose value is at least 0.BOUND, where BOUND stands for the
    digits `bound`. If `is_exclusive`, the value must be greater. An absent fraction part counts as 0.
    """
    if not bound and not is_exclusive:
        return FRACTION
    return seq(Literal("."), _digits_at_least(bound, is_exclusive))


def _fraction_at_most(bound: str, is_exclusive: bool) -> Node:
    if not bound:
        return Chars(()) if is_exclusive else repeat(seq(Literal("."), repeat(chars_of("0"), 1)), 0, 1)
    return repeat(seq(Literal("."), _digits_at_most(bound, is_exclusive)), 0, 1)


def _fraction_between(low: str, low_exclusive: bool, high: str, high_exclusive: bool) -> Node:
    width = max(len(low), len(high))
    digits = _digits_between(low.ljust(width, "0"), low_exclusive, high.ljust(width, "0"), high_exclusive)
    may_be_absent = not low and not low_exclusive
    return repeat(seq(Literal("."), digits), 0, 1) if may_be_absent else seq(Literal("."), digits)


def _digits_at_least(bound: str, is_exclusive: bool) -> Node:
    """Return the grammar of one or more digits DIGITS for which 0.DIGITS is at least 0.BOUND, where BOUND stands for
    the digits `bound`. If `is_exclusive`, 0.DIGITS must be greater.
    """
    if not bound:
        return seq(repeat(chars_of("0")), chars((0x31, 0x39)), DIGITS) if is_exclusive else seq(DIGIT, DIGITS)
    rest_digits = _digits_at_least(bound[1:], is_exclusive)
    rest_or_end = alt(rest_digits, EMPTY) if not bound[1:] and not is_exclusive else rest_digits
    return alt(seq(_digit_range(chr(ord(bound[0]) + 1), "9"), DIGITS), seq(Literal(bound[0]), rest_or_end))


def _digits_at_most(bound: str, is_exclusive: bool) -> Node:
    """Return the grammar of one or more digits DIGITS for which 0.DIGITS is at most 0.BOUND, where BOUND stands for the
    digits `bound`. If `is_exclusive`, 0.DIGITS must be smaller.
    """
    if not bound:
        return Chars(()) if is_exclusive else repeat(chars_of("0"), 1)
    smaller_digits = _digit_range("0", chr(ord(bound[0]) - 1))
    more_to_come = set(bound[1:]) - {"0"}
    end: Node = EMPTY if more_to_come or not is_exclusive else Chars(())
    return alt(
        seq(smaller_digits, DIGITS) if smaller_digits.ranges else Chars(()),
        seq(Literal(bound[0]), alt(end, _digits_at_most(bound[1:], is_exclusive))),
    )


def _digits_between(low: str, low_exclusive: bool, high: str, high_exclusive: bool) -> Node:
    """Return the grammar of one or more digits DIGITS for which 0.DIGITS is from 0.LOW to 0.HIGH, where LOW and HIGH
    stand for the digits `low` and `high`, which have the same length. `low_exclusive` and `high_exclusive` say whether
    the bounds are exclusive.
    """
    if not low:
        return Chars(()) if low_exclusive or high_exclusive else repeat(chars_of("0"), 1)
    if low[0] == high[0]:
        may_end = not low_exclusive and not set(low[1:]) - {"0"}
        return seq(
            Literal(low[0]),
            alt(EMPTY if may_end else Chars(()), _digits_between(low[1:], low_exclusive, high[1:], high_exclusive)),
        )
    middle_digits = _digit_range(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))
    low_rest, high_rest = low[1:].rstrip("0"), high[1:].rstrip("0")
    return alt(
        seq(
            Literal(low[0]),
            alt(EMPTY if not low_rest and not low_exclusive else Chars(()), _digits_at_least(low_rest, low_exclusive)),
        ),
        seq(middle_digits, DIGITS) if middle_digits.ranges else Chars(()),
        seq(
            Literal(high[0]),
            alt(EMPTY if high_rest or not high_exclusive else Chars(()), _digits_at_most(high_rest, high_exclusive)),
        ),
    )


def _integer_multiples(rules: Rules, step: Decimal, minimum: int | None, maximum: int | None) -> Node:
    """Return the grammar of integers from `minimum` to `maximum` that are multiples of `step`. None means no bound."""
    integer_step = step.as_integer_ratio()[0]  # an integer is a multiple of 2.5 = 5/2 exactly if it is a multiple of 5
    if minimum is not None and maximum is not None and (maximum - minimum) // integer_step <= MAX_MULTIPLES:
        multiples = [
            Literal(str(value))
            for value in range(-(-minimum // integer_step) * integer_step, maximum + 1, integer_step)
        ]
        if not multiples:
            raise GrammarError("no multiple lies between minimum and maximum")
        return rules.add(alt(*multiples))
    return _multiples_of(
        rules,
        INTEGER if minimum is None and maximum is None else _signed_integers(minimum, maximum),
        Decimal(integer_step),
    )


RemainderState = tuple[int, int | None]


def _multiples_of(rules: Rules, allowed: Node, step: Decimal) -> Node:
    """Return the grammar of the numbers that `allowed` matches and that are multiples of `step`. `allowed` has no
    exponents.

    A state of the machine that tests this is (remainder, decimals). `remainder` is the integer of all digits read so
    far, modulo the integer of the step's digits. `decimals` is the number of digits read after the point, or None
    before the point. A multiple is written with no more decimals than the step.
    """
    decimal_places = max(0, -int(step.normalize().as_tuple().exponent))
    divisor = int(step.scaleb(decimal_places))

    def next_state(state: RemainderState, character: str) -> RemainderState | None:
        remainder, decimals = state
        if character == "-":
            return state
        if character == ".":
            return (remainder, 0) if decimal_places else None
        if decimals == decimal_places and decimal_places:
            return None
        return (10 * remainder + int(character)) % divisor, None if decimals is None else decimals + 1

    def is_multiple(state: RemainderState) -> bool:
        remainder, decimals = state
        return bool(remainder * 10 ** (decimal_places - (decimals or 0)) % divisor == 0)

    start: RemainderState = (0, None)
    try:
        allowed_automaton = intersection([allowed])
        result = None if allowed_automaton is None else product(allowed_automaton, start, next_state, is_multiple)
    except TooLargeError as error:
        raise GrammarError(
            f"multipleOf {step} is not enforced: {error}; take a smaller one, or fewer digits"
        ) from error
    if result is None:
        raise GrammarError("no multiple lies between minimum and maximum")
    return rules.add(automaton_rules(rules, result, lambda characters: characters))
