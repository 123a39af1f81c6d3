"""Automata of expressions match what Python's `re` matches: alone, together, and one within another."""

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
        steps = automaton.transitions[state].items()
        code = ord(character)
        state = next(
            (
                to
                for to, parse_with_anchors in steps
                if any(low <= code <= high for low, high in parse_with_anchors.ranges)
            ),
            None,
        )
    return automaton is not None and state is not None and automaton.accepting[state]


def made_up(chance: random.Random, depth: int) -> str:
    kind = chance.random()
    if not depth or kind < 0.25:
        return chance.choice(["a", "b", "1", "[ab]", "[^a]", ".", r"\d", r"\w", "ab", "^", "$"])
    if kind < 0.5:
        return "".join(made_up(chance, depth - 1) for _ in range(chance.randint(1, 3)))
    if kind < 0.65:
        return f"(?:{'|'.join(made_up(chance, depth - 1) for _ in range(chance.randint(1, 3)))})"
    if kind < 0.8:
        return f"(?{chance.choice('=!')}{made_up(chance, depth - 1)})"
    return f"(?:{made_up(chance, depth - 1)}){chance.choice(['?', '*', '+', '{2}', '{0,2}', '{1,3}', '{2,}'])}"


def expressions(seed: int, count: int) -> list[str]:
    """Expressions that are read, with lookaheads and anchors in any place."""
    chance, found = random.Random(seed), []
    while len(found) < count:
        expression = made_up(chance, 3)
        try:
            parse_with_anchors(expression)
        except ValueError:
            continue
        found.append(expression)
    return found


def matches(expression: str, text: str) -> bool:
    python = expression.replace("$", r"\Z")  # Python's own $ also matches before a last line end
    return re.fullmatch(python, text, re.ASCII) is not None


@pytest.mark.parametrize("seed", range(60))
def test_automaton_matches_the_same_texts_as_python_re(seed: int) -> None:
    (expression,) = expressions(seed, 1)
    automaton = intersection([parse_with_anchors(expression)])
    assert [text for text in TEXTS if accepts(automaton, text)] == [
        text for text in TEXTS if matches(expression, text)
    ], expression


@pytest.mark.parametrize("seed", range(40))
def test_intersection_and_inclusion_agree_with_python_re(seed: int) -> None:
    several = expressions(1000 + seed, 2)
    automaton = intersection([parse_with_anchors(expression) for expression in several])
    both = [text for text in TEXTS if all(matches(expression, text) for expression in several)]
    assert [text for text in TEXTS if accepts(automaton, text)] == both, several
    one, two = several
    if includes([parse_with_anchors(one)], parse_with_anchors(two)):
        assert all(matches(one, text) for text in TEXTS if matches(two, text)), several


def test_includes_is_right_for_known_expressions() -> None:
    assert includes([parse_with_anchors(r"^\d{4}-\d{2}-\d{2}$")], parse(FORMATS["date"]))
    assert not includes([parse(FORMATS["date"])], parse_with_anchors(r"^\d{4}-\d{2}-\d{2}$"))
    assert includes([parse(FORMATS["uuid"])], parse(FORMATS["uuid4"]))
    assert (
        includes([parse_with_anchors("^(?!x)"), parse_with_anchors("a*")], parse_with_anchors("a{2,3}")) is False
    )  # `^(?!x)` as a whole text is the empty one


@pytest.mark.parametrize("name", NARROWER)
def test_narrower_format_is_included_in_the_format_of_its_rfc(name: str) -> None:
    label = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    whole = {
        "email": rf"(?=[^@]{{1,64}}@)[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{label}(?:\.{label})*",
        "uri": rf"[a-zA-Z]+://{label}(?:\.{label})*(?::\d+)?(?:/[^?#]*)?(?:\?[^#]*)?(?:#[^#]*)?",
    }
    assert includes([parse_with_anchors(whole[name])], parse(NARROWER[name]))


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
