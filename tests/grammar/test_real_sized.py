"""Grammars over a vocabulary of a real model's size: what is made once, what travels, and that masks are the same."""

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
ASKED = (
    Grammar("json_object"),
    Grammar("json_schema", json.dumps(TWENTY)),
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("chat", json.dumps({"type": "structural_tag", "format": TAG})),
)


@cache
def large() -> Grammars:
    vocabulary = Vocabulary(tuple(random_tokens(SENTENCE_PIECE_SIZE)), (STOP_TOKEN_ID,))
    worker = Worker(vocabulary)
    worker.prepare()
    return Grammars(vocabulary, worker, Matchers(vocabulary))


def test_vocabulary_tables_are_built_once_and_compiled_text_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, worker, matchers = large().vocabulary, large().worker, large().matchers
    made: list[str] = []
    for name in ("TokenizerInfo", "GrammarCompiler"):
        whole = getattr(xgrammar, name)
        monkeypatch.setattr(xgrammar, name, lambda *a, whole=whole, name=name, **b: made.append(name) or whole(*a, **b))
    table_of = Vocabulary._bitmask_of
    monkeypatch.setattr(Vocabulary, "_bitmask_of", lambda self, bits: made.append("row") or table_of(self, bits))
    texts = [worker.compile(grammar) for grammar in ASKED]
    assert made == [], "what compiling needs of the vocabulary was made before"
    assert max(map(len, texts)) < 20_000
    sizes = [matchers.load(text).num_bytes for text in texts]
    assert made == ["GrammarCompiler"], "one for all grammars of a rank"
    assert min(sizes) > 1 << 20, "masks would be megabytes"
    assert len(vocabulary.tokens) == SENTENCE_PIECE_SIZE


def test_grammar_of_three_tools_with_twenty_fields_fits_the_size_limit() -> None:
    """Two tools of twenty fields were refused with 262,144 ids, and accepted with the demo's 2,048."""
    given = {name: object_schema(20, name) for name in ("one", "two", "three")}
    form = FORMATS["hermes"].calls_form(given, True)
    text = large().worker.compile(Grammar("chat", json.dumps({"type": "structural_tag", "format": form})))
    assert 64 << 20 < large().matchers.load(text).num_bytes < max_compiled_bytes(SENTENCE_PIECE_SIZE)


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


@pytest.mark.parametrize("stops", [(260,), (259, 260), ()], ids=["a stop token", "two", "none"])
def test_grammar_cache_distinguishes_special_tokens(stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that differ in nothing but a special token: xgrammar's cache of rules would take one for the other."""
    texts = [bytes((byte,)) for byte in range(256)] + [f"\xff{name}".encode("latin-1") for name in "abc"] + [b"", b""]
    vocabulary = Vocabulary(tuple(texts), stops)
    shared, random = Matchers(vocabulary), np.random.default_rng(5)
    plain = xgrammar.GrammarCompiler(vocabulary.tokenizer_info, cache_enabled=False)
    pairs = [pair for _ in range(2) for pair in permutations((256, 257, 258), 2)]
    for form, (one, two) in [(form, pair) for pair in pairs for form in WITH_TOKENS.values()]:
        tag = {"type": "structural_tag", "format": form(one, two)}
        portable = Worker(vocabulary).compile(Grammar("chat", json.dumps(tag)))
        alone = Matchers(vocabulary)
        monkeypatch.setattr(alone._compiler, "compile", lambda given: plain.compile_structural_tag(given.source))
        found, wanted = shared.matcher(portable), alone.matcher(portable)
        for _ in range(20):
            row = mask(found, vocabulary)
            assert allowed_token_ids(row).tolist() == allowed_token_ids(mask(wanted, vocabulary)).tolist()
            row &= ~vocabulary.stop_bitmask
            if not row.any():
                break
            token = random_allowed_token(row, random)
            found.accept([token])
            wanted.accept([token])


def test_large_vocabulary_mask_contains_exactly_the_acceptable_tokens() -> None:
    random = np.random.default_rng(0)
    for grammar in ASKED[:2]:
        text = large().worker.compile(grammar)
        matcher, other = large().matchers.matcher(text), large().matchers.matcher(text)
        for _ in range(12):
            row = mask(matcher, large().vocabulary)
            found = allowed_token_ids(row)
            assert found.tolist() == np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            refused = np.setdiff1d(random.integers(0, SENTENCE_PIECE_SIZE, 40), found)
            assert not any(other._matcher.accept_token(int(token)) for token in refused)
            token = random_allowed_token(row & ~large().vocabulary.stop_bitmask, random)
            assert token in found
            matcher.accept([token])
            other.accept([token])


def test_random_allowed_token_is_uniform() -> None:
    vocabulary = Vocabulary(tuple(bytes((at,)) for at in range(200)), ())
    row, random = vocabulary._bitmask_of([0, 31, 32, 100, 199]), np.random.default_rng(1)
    found = np.bincount([random_allowed_token(row, random) for _ in range(5000)], minlength=200)
    assert np.flatnonzero(found).tolist() == [0, 31, 32, 100, 199] and found.max() < 1.2 * 1000


def test_common_prefix_of_allowed_tokens_is_exact() -> None:
    vocabulary = large().vocabulary
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    same = [token for text, token in ids.items() if text.startswith(b" pro")]
    assert len(same) > 50
    for tokens in (same, same[:1], [*same, ids[b" a"]], [*same, ids[b"a"]], [*same, STOP_TOKEN_ID], []):
        texts = [vocabulary.tokens[token] for token in tokens]
        longest = max(texts, key=len, default=b"")
        sure = next((at for at in range(len(longest), -1, -1) if all(_agree(text, longest[:at]) for text in texts)), 0)
        wanted = b"" if STOP_TOKEN_ID in tokens else longest[:sure]
        assert vocabulary.common_prefix(vocabulary._bitmask_of(tokens)) == wanted


def _agree(text: bytes, begin: bytes) -> bool:
    return text.startswith(begin) or begin.startswith(text)


def _tags(triggers: list[str], *parts: tuple[str, str]) -> Grammar:
    tags = [
        {"type": "tag", "begin": begin, "content": {"type": "regex", "pattern": pattern}, "end": ">"}
        for begin, pattern in parts
    ]
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


SHARING = GRAMMARS | {
    "a tag": _tags(["<a"], ("<a ", "[0-9]{1,3}")),
    "another tag": _tags(["<b"], ("<b ", "[0-9]{1,3}")),
    "a tag of other text": _tags(["<a"], ("<a ", "[a-f]{1,3}")),
    "two tags": _tags(["<a", "<b"], ("<a ", "[0-9]{1,3}"), ("<b ", "[a-f]{1,3}")),
}


@pytest.mark.parametrize("name", SHARING)
def test_grammar_cache_with_shared_rules_gives_the_same_masks(name: str) -> None:
    """The compiler keeps masks of rules; here it has met all other grammars before."""
    vocabulary = demo().vocabulary
    shared, alone = Matchers(vocabulary), Matchers(vocabulary)
    shared.prepare()
    for other in [*SHARING, name]:
        text = demo()._compiled(SHARING[other])
        shared.load(text)
    one, two = shared.matcher(text), alone.matcher(text)
    random = np.random.default_rng(2)
    for _ in range(60):
        row = mask(one, vocabulary)
        assert np.array_equal(row, mask(two, vocabulary))
        row &= ~vocabulary.stop_bitmask
        if not row.any():
            break
        token = random_allowed_token(row, random)
        one.accept([token])
        two.accept([token])
