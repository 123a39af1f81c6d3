"""Tests of grammars of the kind `regex`: they accept exactly the texts that Python's `re.fullmatch` matches.

Unsupported syntax is refused by name.
"""

import itertools
import json
import random
import re
from collections.abc import Sequence

import pytest

from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.regex import length_bounds, parse
from tests.grammar.walks import bytewise, demo, walk

EXPRESSIONS = [
    r"a",
    r"",
    r"a|",
    r"(yes|no|maybe)",
    r"^abc$",
    r"(?:^a|b$)",
    r"[a-c]{2,4}",
    r"[a-c]{0}b",
    r"\d{3}-\d{4}",
    r"[^ab]{1,3}",
    r".{1,3}",
    r"a.c",
    r"\w+",
    r"\w+@\w+\.com",
    r"\s\S{2}",
    r"[\s\S]{1,2}",
    r"[\w.+-]{1,5}",
    r"[^\s]{2}",
    r"[^\d\W]+",
    r"\-?(0|[1-9]\d*)(\.\d+)?",
    r"(a|b)*abb",
    r"(ab?){2,3}",
    r"(?:a{1,2}){2}",
    r"(?P<year>\d{2})-(?:0[1-9]|1[0-2])",
    r"[a\]\-^]+",
    r"[-a]+",
    r"\[\{\(\)\}\]",
    r"a+?b*?c??",
    r"é[à-ü]{1,2}",
    r"\u20ac\x41\t",
    r"[\u4e00-\u9fff]{1,3}",
    r"[a-z]{3,130}",
    r"[\u0400-\u04ffa-z]{1,200}",
    r"\.\*\+\?\\\/\|",
    r"}]",
]
ALPHABET = 'abc019 -.@\n\t"\\]^{}é€中A_yesno'


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_generated_outputs_match_the_expression(expression: str) -> None:
    finished_count = 0
    for grammars in (demo(), bytewise()):
        for seed in range(12):
            output = walk(grammars, grammars.matcher(Grammar("regex", expression)), seed, max_tokens=250)
            if output is not None:
                finished_count += 1
                text = output.decode()  # raises if an output ends within a character
                assert re.fullmatch(expression, text, re.ASCII), text
    assert finished_count >= 6


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_regex_grammar_accepts_exactly_what_python_matches(expression: str) -> None:
    rng = random.Random(5)
    grammar = Grammar("regex", expression)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randint(0, 6))) for _ in range(300)]
    texts += [
        "a",
        "abc",
        "yes",
        "12-09",
        "555-1234",
        "ab",
        "aabb",
        "x@y.com",
        "-1.5",
        "€A\t",
        "éà",
        "中",
        "[{()}]",
        ".*+?\\/|",
    ]
    for text in texts:
        assert demo().accepts(grammar, text) == bool(re.fullmatch(expression, text, re.ASCII)), text


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(?=a)b", "lookahead"),
        ("a(?!b)", "lookahead"),
        ("(?<=a)b", "lookbehind"),
        (r"(a)\1", "backreferences"),
        (r"(?P<x>a)(?P=x)", "backreferences"),
        (r"\bword", "is not supported"),
        (r"\p{Script=Latin}", "is not supported; known are general categories"),
        (r"\p{Cn}", "is not supported"),
        (r"\pL", r"\p{NAME}"),
        ("(?i)a", "flags"),
        ("a$b", "inside"),
        ("(a^)*", "inside"),
        ("(a", "not closed"),
        ("a)", "unmatched"),
        ("[a", "not closed"),
        ("[]", "empty class"),
        ("[z-a]", "range"),
        ("*a", "repeats nothing"),
        ("a**", "two repetitions"),
        ("a{2,1}", "repetition"),
        ("a{,3}", "repetition"),
        ("a{99999}", "repetition"),
        ("[[:alpha:]]", "in a class"),
        ("(" * 200 + ")" * 200, "deep"),
        ("^*", "cannot be repeated"),
    ],
)
def test_unsupported_regex_syntax_is_refused_by_name(expression: str, why: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(why)):
        parse(expression)


@pytest.mark.parametrize(
    ("expression", "matched", "others"),
    [
        (r"\p{L}+", "aÄжक中ª", "1_ -́"),
        (r"\p{Letter}\p{gc=Nd}", ["a1", "中٣"], ["1a", "aⅣ"]),
        (r"[\p{Lu}\d]", "AÄЖ7", "aǅ中"),
        (r"\p{LC}", "aAǅ", "中ʰ"),
        (r"\P{L}", "1 _😀", ["a", "ж", "\U000323af"]),
        (r"[^\p{L}x]", "1 _😀", ["a", "ж", "\U000323af"]),
        (r"[^\P{Lu}]", "AÄ", "a1"),
        (r"\p{Alphabetic}\p{White_Space}", ["a ", "Ⅳ "], ["1 ", "aa"]),
        (r"[\p{Extended_Pictographic}\p{Emoji_Component}]+", ["😀", "👩\u200d🚀", "5"], "ab"),
        (r"\P{Extended_Pictographic}", "a1", "😀⌚☑©"),
    ],
)
def test_unicode_properties_match_the_right_characters(
    expression: str, matched: Sequence[str], others: Sequence[str]
) -> None:
    grammar = Grammar("regex", expression)
    assert [text for text in matched if not demo().accepts(grammar, text)] == []
    assert [text for text in others if demo().accepts(grammar, text)] == []


def test_length_bounds_are_the_shortest_and_longest_match() -> None:
    assert length_bounds(parse("ab?(c|de){2,3}")) == (3, 8)
    assert length_bounds(parse("a+")) == (1, None)
    assert length_bounds(parse("(|ab)*")) == (0, None)
    assert length_bounds(parse("")) == (0, 0)


def random_expression(rng: random.Random, depth: int) -> str:
    """Return a random regular expression that is nested at most `depth` levels."""
    kind = rng.random()
    if not depth or kind < 0.25:
        return rng.choice(["a", "b", "c", "[ab]", "[^a]", "é", ".", "ab", '"', "\\\\"])
    if kind < 0.5:
        return "".join(random_expression(rng, depth - 1) for _ in range(rng.randint(1, 3)))
    if kind < 0.7:
        return (
            "(?:"
            + "|".join(random_expression(rng, depth - 1) for _ in range(rng.randint(1, 3)))
            + rng.choice(["", "|"])
            + ")"
        )
    counts = ["?", "*", "+", "{2}", "{0,2}", "{1,3}", "{2,}", "{0,1}", "{1,}"]
    return f"(?:{random_expression(rng, depth - 1)}){rng.choice(counts)}"


SHORT = ["".join(text) for size in range(4) for text in itertools.product('abcé"\\', repeat=size)]


@pytest.mark.parametrize("seed", range(60))
def test_random_expressions_match_as_in_python(seed: int) -> None:
    """xgrammar's own automata do not match as Python does: with them, `(?:ab*)?` matches `b`."""
    expression = random_expression(random.Random(seed), 3)
    for text in SHORT:
        matches = bool(re.fullmatch(expression, text))
        assert bytewise().accepts(Grammar("regex", expression), text) == matches, (expression, text)
        schema = Grammar("json_schema", json.dumps({"type": "string", "pattern": expression}))
        json_text = json.dumps(text, ensure_ascii=False)
        assert bytewise().accepts(schema, json_text) == matches, (expression, text)
