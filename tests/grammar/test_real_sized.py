"""Tests of grammars over a vocabulary of the size of a real model.

Tables of the vocabulary are built once, the compiled text that is sent to the ranks is small, and cached rules do not
change masks.
"""

import json
from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import xgrammar

from cluster.bench.random_vocabulary import SENTENCE_PIECE_SIZE, STOP_TOKEN_ID, random_tokens
from cluster.bench.real_sized import object_schema
from cluster.chat.formats.choose import FORMATS
from cluster.grammar.asked import Grammar
from cluster.grammar.matching import Matchers
from cluster.grammar.vocabulary import Vocabulary, allowed_token_ids, random_allowed_token
from cluster.grammar.worker import Worker, max_compiled_bytes
from tests.grammar.schema.samples import CALL, PERSON
from tests.grammar.test_matching import GRAMMARS
from tests.grammar.walks import Grammars, demo, mask

NAMES = [f"field_{at}" for at in range(20)]
KINDS = ({"type": "string"}, {"type": "integer"}, {"type": "number"}, {"enum": ["open", "closed"]}, {"type": "boolean"})
TWENTY = {
    "type": "object",
    "properties": {name: KINDS[at % len(KINDS)] for at, name in enumerate(NAMES)},
    "required": NAMES,
}
TAG = {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": CALL}, "end": "</call>"}
GRAMMARS_TO_COMPILE = (
    Grammar("json_object"),
    Grammar("json_schema", json.dumps(TWENTY)),
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("chat", json.dumps({"type": "structural_tag", "format": TAG})),
)


@cache
def large_grammars() -> Grammars:
    """Return the grammars over a random vocabulary of `SENTENCE_PIECE_SIZE` tokens, prepared for compiling."""
    vocabulary = Vocabulary(tuple(random_tokens(SENTENCE_PIECE_SIZE)), (STOP_TOKEN_ID,))
    worker = Worker(vocabulary)
    worker.prepare()
    return Grammars(vocabulary, worker, Matchers(vocabulary))


def test_vocabulary_tables_are_built_once_and_compiled_text_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, worker, matchers = large_grammars().vocabulary, large_grammars().worker, large_grammars().matchers
    built: list[str] = []
    for name in ("TokenizerInfo", "GrammarCompiler"):
        original_class = getattr(xgrammar, name)
        monkeypatch.setattr(
            xgrammar,
            name,
            lambda *a, original_class=original_class, name=name, **b: built.append(name) or original_class(*a, **b),
        )
    original_bitmask_of = Vocabulary._bitmask_of
    monkeypatch.setattr(
        Vocabulary, "_bitmask_of", lambda self, bits: built.append("row") or original_bitmask_of(self, bits)
    )
    texts = [worker.compile(grammar) for grammar in GRAMMARS_TO_COMPILE]
    assert built == [], "`prepare` must build all tables that compiling needs"
    assert max(map(len, texts)) < 20_000
    sizes = [matchers.load(text).num_bytes for text in texts]
    assert built == ["GrammarCompiler"], "a rank must build one compiler for all its grammars"
    assert min(sizes) > 1 << 20, "a loaded grammar, with its masks, takes megabytes"
    assert len(vocabulary.tokens) == SENTENCE_PIECE_SIZE


def test_grammar_of_three_tools_with_twenty_fields_fits_the_size_limit() -> None:
    """Before, two tools of twenty fields were refused with a vocabulary of 262,144 ids, and accepted with the 2,048 ids
    of the demo.
    """
    tools = {name: object_schema(20, name) for name in ("one", "two", "three")}
    calls_format = FORMATS["hermes"].calls_form(tools, True)
    text = large_grammars().worker.compile(
        Grammar("chat", json.dumps({"type": "structural_tag", "format": calls_format}))
    )
    assert 64 << 20 < large_grammars().matchers.load(text).num_bytes < max_compiled_bytes(SENTENCE_PIECE_SIZE)


def _token(token: int) -> dict[str, Any]:
    return {"type": "token", "token": token}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


DIGITS = {"type": "regex", "pattern": "[0-9]{1,3}"}
WITH_TOKENS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "after a text": lambda one, two: _sequence(_text("a"), _token(one), _text("b"), _token(two)),
    "alone": lambda one, two: _token(one),
    "repeated": lambda one, two: {"type": "star", "content": _sequence(_token(one), _text("x"), _token(two))},
    "two ways": lambda one, two: _either(_sequence(_token(one), DIGITS), _sequence(_token(two), _text("<1>"))),
    "one of two": lambda one, two: _sequence(_either(_token(one), _token(two)), DIGITS),
    "around a value": lambda one, two: _sequence(
        _token(one), {"type": "json_schema", "json_schema": CALL}, _token(two)
    ),
    "two calls": lambda one, two: {"type": "plus", "content": _sequence(_token(one), DIGITS, _token(two))},
}


@pytest.mark.parametrize("stops", [(260,), (259, 260), ()], ids=["one stop token", "two stop tokens", "no stop token"])
def test_grammar_cache_distinguishes_special_tokens(stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules differ only in a special token. xgrammar's cache of rules would confuse them."""
    texts = [bytes((byte,)) for byte in range(256)] + [f"\xff{name}".encode("latin-1") for name in "abc"] + [b"", b""]
    vocabulary = Vocabulary(tuple(texts), stops)
    shared, random = Matchers(vocabulary), np.random.default_rng(5)
    uncached_compiler = xgrammar.GrammarCompiler(vocabulary.tokenizer_info, cache_enabled=False)
    pairs = [pair for _ in range(2) for pair in permutations((256, 257, 258), 2)]
    for make_format, (first, second) in [(make_format, pair) for pair in pairs for make_format in WITH_TOKENS.values()]:
        tag = {"type": "structural_tag", "format": make_format(first, second)}
        portable = Worker(vocabulary).compile(Grammar("chat", json.dumps(tag)))
        fresh = Matchers(vocabulary)
        monkeypatch.setattr(
            fresh._compiler, "compile", lambda grammar: uncached_compiler.compile_structural_tag(grammar.source)
        )
        shared_matcher, fresh_matcher = shared.matcher(portable), fresh.matcher(portable)
        for _ in range(20):
            row = mask(shared_matcher, vocabulary)
            assert allowed_token_ids(row).tolist() == allowed_token_ids(mask(fresh_matcher, vocabulary)).tolist()
            row &= ~vocabulary.stop_bitmask
            if not row.any():
                break
            token = random_allowed_token(row, random)
            shared_matcher.accept([token])
            fresh_matcher.accept([token])


def test_large_vocabulary_mask_contains_exactly_the_acceptable_tokens() -> None:
    random = np.random.default_rng(0)
    for grammar in GRAMMARS_TO_COMPILE[:2]:
        text = large_grammars().worker.compile(grammar)
        matcher, trial_matcher = large_grammars().matchers.matcher(text), large_grammars().matchers.matcher(text)
        for _ in range(12):
            row = mask(matcher, large_grammars().vocabulary)
            allowed_ids = allowed_token_ids(row)
            assert allowed_ids.tolist() == np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            refused = np.setdiff1d(random.integers(0, SENTENCE_PIECE_SIZE, 40), allowed_ids)
            assert not any(trial_matcher._matcher.accept_token(int(token)) for token in refused)
            token = random_allowed_token(row & ~large_grammars().vocabulary.stop_bitmask, random)
            assert token in allowed_ids
            matcher.accept([token])
            trial_matcher.accept([token])


def test_random_allowed_token_is_uniform() -> None:
    vocabulary = Vocabulary(tuple(bytes((byte,)) for byte in range(200)), ())
    row, random = vocabulary._bitmask_of([0, 31, 32, 100, 199]), np.random.default_rng(1)
    counts = np.bincount([random_allowed_token(row, random) for _ in range(5000)], minlength=200)
    assert np.flatnonzero(counts).tolist() == [0, 31, 32, 100, 199] and counts.max() < 1.2 * 1000


def test_common_prefix_of_allowed_tokens_is_exact() -> None:
    vocabulary = large_grammars().vocabulary
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    pro_tokens = [token for text, token in ids.items() if text.startswith(b" pro")]
    assert len(pro_tokens) > 50
    for tokens in (
        pro_tokens,
        pro_tokens[:1],
        [*pro_tokens, ids[b" a"]],
        [*pro_tokens, ids[b"a"]],
        [*pro_tokens, STOP_TOKEN_ID],
        [],
    ):
        texts = [vocabulary.tokens[token] for token in tokens]
        longest = max(texts, key=len, default=b"")
        common_length = next(
            (length for length in range(len(longest), -1, -1) if all(_agree(text, longest[:length]) for text in texts)),
            0,
        )
        expected = b"" if STOP_TOKEN_ID in tokens else longest[:common_length]
        assert vocabulary.common_prefix(vocabulary._bitmask_of(tokens)) == expected


def _agree(text: bytes, prefix: bytes) -> bool:
    """Return whether one of the two texts is a prefix of the other."""
    return text.startswith(prefix) or prefix.startswith(text)


def _tags(triggers: list[str], *parts: tuple[str, str]) -> Grammar:
    """Return a grammar of triggered tags. Each part is the begin of a tag and the pattern of its content."""
    tags = [
        {"type": "tag", "begin": begin, "content": {"type": "regex", "pattern": pattern}, "end": ">"}
        for begin, pattern in parts
    ]
    tag_format = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag_format}))


GRAMMARS_WITH_SHARED_RULES = GRAMMARS | {
    "a tag": _tags(["<a"], ("<a ", "[0-9]{1,3}")),
    "another tag": _tags(["<b"], ("<b ", "[0-9]{1,3}")),
    "a tag of other text": _tags(["<a"], ("<a ", "[a-f]{1,3}")),
    "two tags": _tags(["<a", "<b"], ("<a ", "[0-9]{1,3}"), ("<b ", "[a-f]{1,3}")),
}


@pytest.mark.parametrize("name", GRAMMARS_WITH_SHARED_RULES)
def test_grammar_cache_with_shared_rules_gives_the_same_masks(name: str) -> None:
    """The compiler caches masks of rules. In this test it has compiled all other grammars before."""
    vocabulary = demo().vocabulary
    shared, fresh = Matchers(vocabulary), Matchers(vocabulary)
    shared.prepare()
    for grammar_name in [*GRAMMARS_WITH_SHARED_RULES, name]:
        text = demo()._compiled(GRAMMARS_WITH_SHARED_RULES[grammar_name])
        shared.load(text)
    shared_matcher, fresh_matcher = shared.matcher(text), fresh.matcher(text)
    random = np.random.default_rng(2)
    for _ in range(60):
        row = mask(shared_matcher, vocabulary)
        assert np.array_equal(row, mask(fresh_matcher, vocabulary))
        row &= ~vocabulary.stop_bitmask
        if not row.any():
            break
        token = random_allowed_token(row, random)
        shared_matcher.accept([token])
        fresh_matcher.accept([token])
