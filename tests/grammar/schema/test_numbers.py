"""Numbers between bounds: exactly those are accepted, compared as decimals."""

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


def holds(value: Decimal, bounds: dict[str, str]) -> bool:
    return (
        value >= Decimal(bounds.get("minimum", "-Infinity"))
        and value <= Decimal(bounds.get("maximum", "Infinity"))
        and value > Decimal(bounds.get("exclusiveMinimum", "-Infinity"))
        and value < Decimal(bounds.get("exclusiveMaximum", "Infinity"))
    )


def number(chance: random.Random, digits: int) -> str:
    whole = str(chance.randint(-(10 ** chance.randint(0, digits)), 10 ** chance.randint(0, digits)))
    return whole + (f".{chance.randint(0, 10 ** chance.randint(0, 3))}" if chance.random() < 0.6 else "")


def near(chance: random.Random, bound: str) -> str:
    """A number that differs from a bound in a digit, has one more or one less, or is the bound."""
    text = list(bound)
    at = chance.randrange(len(text))
    if text[at].isdigit():
        text[at] = str(chance.randint(0, 9))
    return "".join(text) + chance.choice(["", "0", "1", "00", ".0", ".001"])


@pytest.mark.parametrize("seed", range(40))
def test_number_bounds_accept_exactly_the_numbers_within(seed: int) -> None:
    chance = random.Random(seed)
    kind = chance.choice(["number", "integer"])
    names = chance.choice(
        [("minimum",), ("maximum",), ("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("exclusiveMaximum",),
         ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")]
    )  # fmt: skip
    values = sorted((number(chance, 4) for _ in names), key=Decimal)
    bounds = dict(zip(names, values, strict=True))
    texts = [number(chance, 5) for _ in range(150)] + [near(chance, value) for value in values for _ in range(150)]
    texts = [text for text in texts if re.fullmatch(r"-?\d+(\.\d+)?", text)]
    try:
        schema_grammar(
            parse_exact_json(
                json.dumps({"type": kind}).replace("}", "".join(f', "{k}": {v}' for k, v in bounds.items()) + "}")
            )
        )
    except GrammarError:
        assert not any(holds(Decimal(text), bounds) and (kind == "number" or "." not in text) for text in texts)
        return
    for text in texts:
        written = PLAIN.fullmatch(text) and (kind == "number" or ("." not in text and text != "-0"))
        if text.startswith("-0") and Decimal(text) == 0:
            continue  # a zero with a sign is a matter of taste
        assert accepts(text, type=json.dumps(kind), **bounds) == bool(written and holds(Decimal(text), bounds)), (
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
    chance = random.Random(step)
    for value in [0, step, -step, 12 * step, *(chance.randint(-(10**6), 10**6) for _ in range(100))]:
        assert accepts(str(value), type='"integer"', multipleOf=str(step)) == (value % step == 0)
        if value < 0:
            assert not accepts(str(value), type='"integer"', multipleOf=str(step), minimum="0")
