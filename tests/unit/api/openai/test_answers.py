"""Where the tokens of a prompt begin in its text."""

import pytest

from cluster.api.openai.answers import token_offsets


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("once upon", ["once", " upon"], [0, 4]),
        ("aéz", [b"a", b"\xc3", b"\xa9", b"z"], [0, 1, 1, 2]),
        ("日本", [b"\xe6", b"\x97\xa5\xe6\x9c", b"\xac"], [0, 0, 1]),
        ("Hello world", ["<s>", " Hello", " world"], [0, 0, 5]),
        ("<|user|>hi", ["<|user|>", "hi"], [0, 8]),
        ("hi", ["<s>", "hi", "</s>"], [0, 0, 2]),
        ("a\u0301b", ["á", "b"], [0, 2]),
        ("a  b", ["a", " b"], [0, 2]),
        ("ab\ufffd", [b"ab", b"\xff", b"\xe2"], [0, 2, 3]),
        ("", ["<s>"], [0]),
    ],
)
def test_token_offsets_give_the_start_of_each_token(text: str, tokens: list[str | bytes], expected: list[int]) -> None:
    raw = [token if isinstance(token, bytes) else token.encode() for token in tokens]
    found = token_offsets(text, raw)
    assert found == expected
    assert found == sorted(found) and all(at <= len(text) for at in found)
