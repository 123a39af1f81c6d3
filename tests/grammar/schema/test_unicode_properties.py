"""Tests of schema patterns with Unicode properties, as zod and users write them.

The package `regex` is the reference for what the patterns match.
"""

import json
from typing import Any

import pytest

from cluster.grammar.asked import Grammar
from tests.grammar.walks import bytewise, demo, walk

regex = pytest.importorskip("regex", reason="needs the package regex (transformers requires it); re has no properties")

EMOJI = (
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$"
)
LETTERS = r"^\p{Lu}[\p{L}' -]{1,20}$"
SCHEMAS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "letters": ({"pattern": LETTERS}, ["Žižek Ив", "D'A"], ["žižek", "Z1", "Ž"]),
    "no letters": ({"pattern": r"^[^\p{L}]+\P{Lu}$"}, ["1 a", "😀ж"], ["ab", "1A"]),
    "z.emoji()": ({"pattern": EMOJI, "format": "emoji"}, ["😀👍"], ["a", "5", ""]),
    "z.emoji().max(4)": ({"pattern": EMOJI, "format": "emoji", "maxLength": 4}, ["😀👍"], ["a", "😀😀😀😀😀"]),
    "an older z.emoji()": ({"pattern": r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$"}, ["👩‍🚀"], ["a"]),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_unicode_properties_in_patterns_are_enforced(name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    grammar = Grammar("json_schema", json.dumps({"type": "string", **schema}))
    for text in valid:
        assert demo().accepts(grammar, json.dumps(text, ensure_ascii=False)), text
    for text in invalid:
        assert not demo().accepts(grammar, json.dumps(text, ensure_ascii=False)), text
    finished_count = 0
    for grammars in (demo(), bytewise()):
        for seed in range(15):
            output = walk(grammars, grammars.matcher(grammar), seed, free_tokens=seed)
            if output is not None:
                finished_count += 1
                text = json.loads(output.decode())
                assert regex.search(schema["pattern"], text) and len(text) <= schema.get("maxLength", len(text)), text
    assert finished_count >= 10
