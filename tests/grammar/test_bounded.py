"""Tests of strings with `minLength` and `maxLength`.

The grammar accepts exactly the allowed lengths, and a mask contains exactly the tokens that the matcher accepts.
"""

import json

import numpy as np
import pytest

from cluster.grammar.asked import Grammar
from cluster.grammar.bounded import BLOCK_LENGTH, SHORT_LENGTH
from tests.grammar.walks import STOP_TOKEN_IDS, allowed, bytewise, demo, mask

BOUNDS = [
    (0, 9),
    (3, 12),
    (9, 9),
    (0, SHORT_LENGTH),
    (0, SHORT_LENGTH + 1),
    (1, 2 * SHORT_LENGTH),
    (5, 100),
    (99, 101),
    (0, 300),
    (0, 5000),
]
LETTERS = ("a", "é", "大", "😀", '\\"', "\\n", "\\u0000")  # in JSON notation; each is one character


def bounded(least: int, most: int) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "string", "minLength": least, "maxLength": most}))


@pytest.mark.parametrize(("least", "most"), BOUNDS)
def test_bounded_string_accepts_exactly_the_allowed_lengths(least: int, most: int) -> None:
    random = np.random.default_rng(least + most)
    lengths = {
        0,
        least - 1,
        least,
        most,
        most + 1,
        most + 20,
        BLOCK_LENGTH,
        SHORT_LENGTH,
        SHORT_LENGTH + 1,
        2 * SHORT_LENGTH,
        (least + most) // 2,
    }
    for length in sorted(each for each in lengths if each >= 0):
        text = "".join(random.choice(LETTERS, length)) if length else ""
        assert bytewise().accepts(bounded(least, most), f'"{text}"') == (least <= length <= most), length


@pytest.mark.parametrize("most", [20, SHORT_LENGTH + 1, 60, 300])
def test_bounded_string_mask_contains_exactly_the_acceptable_tokens(most: int) -> None:
    """The masks are checked at the beginning, middle and end of each block, and near the maximum length."""
    tokens, matcher = demo().vocabulary.tokens, demo().matcher(bounded(0, most))
    ids = [token for token, text in enumerate(tokens) if text and text[:1] != b"\xff"]
    letter = tokens.index(b"a")
    matcher.accept([tokens.index(b'"')])
    for string_length in range(most + 1):
        if string_length % BLOCK_LENGTH in (0, 1, BLOCK_LENGTH // 2, BLOCK_LENGTH - 1) or most - string_length < 4:
            allowed_ids = set(allowed(mask(matcher, demo().vocabulary)).tolist()) - set(STOP_TOKEN_IDS)
            for token in ids:
                accepted = matcher._matcher.accept_token(token)
                if accepted:
                    matcher._matcher.rollback(1)
                assert accepted == (token in allowed_ids), (string_length, tokens[token])
        if string_length < most:
            matcher.accept([letter])


def test_string_bounds_share_grammar_rules() -> None:
    """Different bounds share rules, so the cached masks of a rule serve all of them.

    A long string needs only a few rules more than it has blocks.
    """
    rules = {most: set(demo()._compiled(bounded(0, most)).splitlines()) for most in (20, 25, 300)}
    assert len({line.partition("::=")[2] for line in rules[25] - rules[20]}) < 10
    assert len(rules[300]) < 2 * SHORT_LENGTH + 300 / BLOCK_LENGTH
