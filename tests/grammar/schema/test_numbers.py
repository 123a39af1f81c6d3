"""Tests of numbers with bounds: the grammar accepts exactly the numbers within the bounds, compared as decimals."""

import json
import random
import re
from decimal import Decimal

import pytest

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.schema.convert import parse_exact_json, schema_grammar
from tests.grammar.walks import bytewise

PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


def accepts(text: str, **schema: str) -> bool:
    fields = ", ".join(f'"{name}": {value}' for name, value in schema.items())
    return bytewise().accepts(Grammar("json_schema", "{" + fields + "}"), text)


def is_within(value: Decimal, bounds: dict[str, str]) -> bool:
    return (
        value >= Decimal(bounds.get("minimum", "-Infinity"))
        and value <= Decimal(bounds.get("maximum", "Infinity"))
        and value > Decimal(bounds.get("exclusiveMinimum", "-Infinity"))
        and value < Decimal(bounds.get("exclusiveMaximum", "Infinity"))
    )


def random_number(rng: random.Random, digits: int) -> str:
    integer_part = str(rng.randint(-(10 ** rng.randint(0, digits)), 10 ** rng.randint(0, digits)))
    return integer_part + (f".{rng.randint(0, 10 ** rng.randint(0, 3))}" if rng.random() < 0.6 else "")


def number_near(rng: random.Random, bound: str) -> str:
    """Return a number close to a bound: one digit may be replaced, and digits or a decimal part may be appended."""
    text = list(bound)
    position = rng.randrange(len(text))
    if text[position].isdigit():
        text[position] = str(rng.randint(0, 9))
    return "".join(text) + rng.choice(["", "0", "1", "00", ".0", ".001"])


@pytest.mark.parametrize("seed", range(40))
def test_number_bounds_accept_exactly_the_numbers_within(seed: int) -> None:
    rng = random.Random(seed)
    kind = rng.choice(["number", "integer"])
    names = rng.choice(
        [("minimum",), ("maximum",), ("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("exclusiveMaximum",),
         ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")]
    )  # fmt: skip
    values = sorted((random_number(rng, 4) for _ in names), key=Decimal)
    bounds = dict(zip(names, values, strict=True))
    texts = [random_number(rng, 5) for _ in range(150)] + [
        number_near(rng, value) for value in values for _ in range(150)
    ]
    texts = [text for text in texts if re.fullmatch(r"-?\d+(\.\d+)?", text)]
    try:
        schema_grammar(
            parse_exact_json(
                json.dumps({"type": kind}).replace("}", "".join(f', "{k}": {v}' for k, v in bounds.items()) + "}")
            )
        )
    except GrammarError:
        assert not any(is_within(Decimal(text), bounds) and (kind == "number" or "." not in text) for text in texts)
        return
    for text in texts:
        is_json_number = PLAIN.fullmatch(text) and (kind == "number" or ("." not in text and text != "-0"))
        if text.startswith("-0") and Decimal(text) == 0:
            continue  # a zero with a sign may be accepted or refused
        assert accepts(text, type=json.dumps(kind), **bounds) == bool(
            is_json_number and is_within(Decimal(text), bounds)
        ), (
            text,
            bounds,
        )


def test_number_bounds_of_any_size_are_exact() -> None:
    large = "9" * 40
    assert accepts(large, type='"integer"', maximum=large)
    assert not accepts("1" + "0" * 40, type='"integer"', maximum=large)
    assert accepts("0." + "0" * 30 + "1", type='"number"', minimum="1e-31")
    assert not accepts("0." + "0" * 31 + "9", type='"number"', minimum="1e-31")


def test_only_unbounded_numbers_may_have_exponents() -> None:
    assert accepts("-1.5E+10", type='"number"')
    assert not accepts("1e5", type='"number"', minimum="0")
    for wrong in ("01", "1.", ".5", "+1", "1e", "--1", "-"):
        assert not accepts(wrong, type='"number"')


@pytest.mark.parametrize("step", [2, 7, 10, 64, 100])
def test_multiple_of_accepts_exactly_the_multiples(step: int) -> None:
    rng = random.Random(step)
    for value in [0, step, -step, 12 * step, *(rng.randint(-(10**6), 10**6) for _ in range(100))]:
        assert accepts(str(value), type='"integer"', multipleOf=str(step)) == (value % step == 0)
        if value < 0:
            assert not accepts(str(value), type='"integer"', multipleOf=str(step), minimum="0")
