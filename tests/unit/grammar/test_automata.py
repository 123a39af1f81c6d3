"""Automata of regular expressions agree with Python's `re`: single automata, intersections, and inclusions."""

import itertools
import random
import re

import pytest

from cluster.grammar.automata import Automaton, TooLargeError, includes, intersection
from cluster.grammar.regex import parse, parse_with_anchors
from cluster.grammar.schema.formats import FORMATS, NARROWER

TEXTS = ["".join(text) for size in range(5) for text in itertools.product("ab1\n", repeat=size)]


def accepts(automaton: Automaton | None, text: str) -> bool:
    state: int | None = None if automaton is None else 0
    for character in text:
        if automaton is None or state is None:
            return False
        transitions = automaton.transitions[state].items()
        code = ord(character)
        state = next(
            (
                target_state
                for target_state, characters in transitions
                if any(low <= code <= high for low, high in characters.ranges)
            ),
            None,
        )
    return automaton is not None and state is not None and automaton.accepting[state]


def random_expression(generator: random.Random, depth: int) -> str:
    kind = generator.random()
    if not depth or kind < 0.25:
        return generator.choice(["a", "b", "1", "[ab]", "[^a]", ".", r"\d", r"\w", "ab", "^", "$"])
    if kind < 0.5:
        return "".join(random_expression(generator, depth - 1) for _ in range(generator.randint(1, 3)))
    if kind < 0.65:
        return f"(?:{'|'.join(random_expression(generator, depth - 1) for _ in range(generator.randint(1, 3)))})"
    if kind < 0.8:
        return f"(?{generator.choice('=!')}{random_expression(generator, depth - 1)})"
    quantifier = generator.choice(["?", "*", "+", "{2}", "{0,2}", "{1,3}", "{2,}"])
    return f"(?:{random_expression(generator, depth - 1)}){quantifier}"


def expressions(seed: int, count: int) -> list[str]:
    """Random expressions that the parser accepts, with lookaheads and anchors in any place."""
    generator, accepted_expressions = random.Random(seed), []
    while len(accepted_expressions) < count:
        expression = random_expression(generator, 3)
        try:
            parse_with_anchors(expression)
        except ValueError:
            continue
        accepted_expressions.append(expression)
    return accepted_expressions


def matches(expression: str, text: str) -> bool:
    python_expression = expression.replace("$", r"\Z")  # Python's own $ also matches before a last line end
    return re.fullmatch(python_expression, text, re.ASCII) is not None


@pytest.mark.parametrize("seed", range(60))
def test_automaton_matches_the_same_texts_as_python_re(seed: int) -> None:
    (expression,) = expressions(seed, 1)
    automaton = intersection([parse_with_anchors(expression)])
    assert [text for text in TEXTS if accepts(automaton, text)] == [
        text for text in TEXTS if matches(expression, text)
    ], expression


@pytest.mark.parametrize("seed", range(40))
def test_intersection_and_inclusion_agree_with_python_re(seed: int) -> None:
    pair = expressions(1000 + seed, 2)
    automaton = intersection([parse_with_anchors(expression) for expression in pair])
    common_texts = [text for text in TEXTS if all(matches(expression, text) for expression in pair)]
    assert [text for text in TEXTS if accepts(automaton, text)] == common_texts, pair
    wide, narrow = pair
    if includes([parse_with_anchors(wide)], parse_with_anchors(narrow)):
        assert all(matches(wide, text) for text in TEXTS if matches(narrow, text)), pair


def test_includes_is_right_for_known_expressions() -> None:
    assert includes([parse_with_anchors(r"^\d{4}-\d{2}-\d{2}$")], parse(FORMATS["date"]))
    assert not includes([parse(FORMATS["date"])], parse_with_anchors(r"^\d{4}-\d{2}-\d{2}$"))
    assert includes([parse(FORMATS["uuid"])], parse(FORMATS["uuid4"]))
    assert (
        includes([parse_with_anchors("^(?!x)"), parse_with_anchors("a*")], parse_with_anchors("a{2,3}")) is False
    )  # as a whole text, only the empty text matches `^(?!x)`


@pytest.mark.parametrize("name", NARROWER)
def test_narrower_format_is_included_in_the_format_of_its_rfc(name: str) -> None:
    label = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    rfc_expressions = {
        "email": rf"(?=[^@]{{1,64}}@)[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{label}(?:\.{label})*",
        "uri": rf"[a-zA-Z]+://{label}(?:\.{label})*(?::\d+)?(?:/[^?#]*)?(?:\?[^#]*)?(?:#[^#]*)?",
    }
    assert includes([parse_with_anchors(rfc_expressions[name])], parse(NARROWER[name]))


def test_intersection_merges_equal_states_and_removes_dead_ends() -> None:
    automaton = intersection([parse_with_anchors("(?:aa|ba|ca)d?")])
    assert automaton is not None and len(automaton.transitions) == 4
    assert intersection([parse_with_anchors("a+"), parse_with_anchors("b+")]) is None
    assert intersection([parse_with_anchors("a(?!b)b")]) is None


def test_intersection_raises_too_large_error_at_its_limits() -> None:
    with pytest.raises(TooLargeError, match="too many states"):
        intersection([parse_with_anchors("(?:a|b)*a(?:a|b){12}")])
    with pytest.raises(TooLargeError, match="too large"):
        intersection([parse_with_anchors("(?:(?:a{100}){100}){10}")])
