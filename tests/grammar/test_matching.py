"""Tests of `TextMatcher`: its masks are correct after every path, and computing a mask does not change its state."""

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from cluster.grammar import matching
from cluster.grammar.asked import Grammar, GrammarError
from cluster.grammar.limits import address_space_bytes
from cluster.grammar.matching import TextMatcher
from cluster.grammar.vocabulary import Bitmask, Vocabulary
from tests.grammar.schema.samples import CALL, PERSON, TREE
from tests.grammar.walks import STOP_TOKEN_IDS, allowed, bytewise, demo, grammars_of, mask

GRAMMARS = {
    "person": Grammar("json_schema", json.dumps(PERSON)),
    "tree": Grammar("json_schema", json.dumps(TREE)),
    "call": Grammar("json_schema", json.dumps(CALL)),
    "long strings": Grammar("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 300}}'),
    "object": Grammar("json_object"),
    "words": Grammar("regex", "([a-z]{2,5} ?){1,4}"),
    "rules": Grammar("ebnf", 'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"'),
    "choice": Grammar("choice", '["yes", "no", "maybe"]'),
}


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text in the vocabulary of `bytewise`: its bytes."""
    return list(text.encode())


def random_path(matcher: TextMatcher, random: np.random.Generator, max_length: int) -> list[int]:
    """Return a random path of at most `max_length` tokens that the grammar allows, without stop tokens."""
    path: list[int] = []
    for _ in range(max_length):
        next_tokens = [
            token for token in allowed(mask(matcher, demo().vocabulary, tuple(path))) if token not in STOP_TOKEN_IDS
        ]
        if not next_tokens:
            break
        path.append(int(random.choice(next_tokens)))
    return path


@pytest.mark.parametrize("name", GRAMMARS)
def test_mask_after_a_path_equals_the_mask_after_accepting_the_path(name: str) -> None:
    grammars = demo()
    for seed in range(6):
        random = np.random.default_rng(seed)
        matcher = grammars.matcher(GRAMMARS[name])
        committed: list[int] = []
        for _ in range(4):
            tree = [random_path(matcher, random, int(random.integers(0, 6))) for _ in range(3)]
            queried_paths = [path[: int(random.integers(0, len(path) + 1))] for path in tree * 2]
            for path in queried_paths:
                fresh = grammars.matcher(GRAMMARS[name])
                fresh.accept([*committed, *path])
                assert np.array_equal(mask(matcher, grammars.vocabulary, tuple(path)), mask(fresh, grammars.vocabulary))
            accepted_tokens = tree[0][: int(random.integers(0, len(tree[0]) + 1))]
            matcher.accept(accepted_tokens)
            committed += accepted_tokens
        fresh = grammars.matcher(GRAMMARS[name])
        fresh.accept(committed)
        assert np.array_equal(mask(matcher, grammars.vocabulary), mask(fresh, grammars.vocabulary))
        assert matcher.finished == fresh.finished


def test_mask_is_computed_once_per_path_until_tokens_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of a step and the search for forced tokens share the computed masks."""
    computed_paths, original_compute = list[tuple[int, ...]](), TextMatcher._compute_bitmask

    def record_and_compute(matcher: TextMatcher, path: Sequence[int], out: Bitmask) -> None:
        computed_paths.append(tuple(path))
        original_compute(matcher, path, out)

    monkeypatch.setattr(TextMatcher, "_compute_bitmask", record_and_compute)
    grammars = demo()
    matcher = grammars.matcher(GRAMMARS["person"])
    forced = matcher.forced((), 4)
    first_mask = mask(matcher, grammars.vocabulary)
    assert computed_paths and len(computed_paths) == len(set(computed_paths))
    computed_count = len(computed_paths)
    assert matcher.forced((), 4) == forced and np.array_equal(mask(matcher, grammars.vocabulary), first_mask)
    assert len(computed_paths) == computed_count, "a repeated query must compute no mask"
    first_mask[:] = 0
    assert mask(matcher, grammars.vocabulary).any(), "the caller must not be able to change the cached mask"
    matcher.accept(forced[:1])
    mask(matcher, grammars.vocabulary)
    assert len(computed_paths) == computed_count + 1


@pytest.mark.parametrize("name", GRAMMARS)
def test_mask_contains_exactly_the_acceptable_tokens(name: str) -> None:
    grammars = demo()
    path_matcher = grammars.matcher(GRAMMARS[name])
    path = random_path(path_matcher, np.random.default_rng(1), 5)
    allowed_ids = set(allowed(mask(path_matcher, grammars.vocabulary, tuple(path))).tolist())
    for token in range(0, len(grammars.vocabulary.tokens), 7):
        matcher = grammars.matcher(GRAMMARS[name])
        matcher.accept(path)
        if token in allowed_ids:
            matcher.accept([token])
        else:
            with pytest.raises(GrammarError, match=f"token {token} is not allowed"):
                matcher.accept([token])


def test_stop_tokens_are_allowed_exactly_where_the_output_may_end() -> None:
    grammars = bytewise()
    matcher = grammars.matcher(Grammar("regex", "ab?"))
    assert not matcher.finished and allowed(mask(matcher, grammars.vocabulary)).tolist() == tokens_of("a")
    with pytest.raises(GrammarError, match="may not end here"):
        matcher.accept([256])
    assert allowed(mask(matcher, grammars.vocabulary, tuple(tokens_of("a")))).tolist() == [*tokens_of("b"), 256]
    matcher.accept(tokens_of("a"))
    assert matcher.finished and not matcher.ended
    matcher.accept(tokens_of("b"))
    assert matcher.finished and allowed(mask(matcher, grammars.vocabulary)).tolist() == [256]
    matcher.accept([256])
    assert matcher.ended and matcher.finished
    matcher.accept([256])  # with ignore_eos an output continues after its end
    assert allowed(mask(matcher, grammars.vocabulary, (5, 6))).tolist() == [256]
    with pytest.raises(GrammarError, match="has ended"):
        matcher.accept(tokens_of("a"))


def test_ended_or_disallowed_paths_allow_only_stop_tokens() -> None:
    grammars = bytewise()
    matcher = grammars.matcher(Grammar("regex", "ab?"))
    for path in ([*tokens_of("a"), 256], [*tokens_of("a"), 256, 256], tokens_of("x"), tokens_of("abb"), [9999]):
        assert allowed(mask(matcher, grammars.vocabulary, tuple(path))).tolist() == [256]
    assert allowed(mask(matcher, grammars.vocabulary)).tolist() == tokens_of("a")


def test_special_and_padding_tokens_are_never_allowed() -> None:
    padded = Vocabulary((*demo().vocabulary.tokens, *[b""] * 45), STOP_TOKEN_IDS)
    grammars = grammars_of(padded)
    matcher = grammars.matcher(Grammar("ebnf", "root ::= [^]*"))
    allowed_ids = set(allowed(mask(matcher, padded)).tolist())
    assert allowed_ids >= set(STOP_TOKEN_IDS) and max(allowed_ids) < 2048 and 1 not in allowed_ids
    assert all(padded.tokens[token] for token in allowed_ids - set(STOP_TOKEN_IDS))


def test_forced_returns_the_only_possible_tokens() -> None:
    grammars = bytewise()
    matcher = grammars.matcher(Grammar("regex", "(abcd|x)ef"))
    assert matcher.forced((), 8) == []
    assert matcher.forced(tokens_of("a"), 2) == tokens_of("bc")
    assert matcher.forced(tokens_of("a"), 20) == [*tokens_of("bcdef"), 256]
    assert matcher.forced(tokens_of("y"), 5) == [] and matcher.forced([*tokens_of("xef"), 256], 5) == []
    matcher.accept(tokens_of("x"))
    assert matcher.forced((), 9) == [*tokens_of("ef"), 256]
    matcher.accept([*tokens_of("ef"), 256])
    assert matcher.forced((), 9) == []


@contextmanager
def limited_memory(extra_bytes: int) -> Iterator[None]:
    """Limit the address space of this process to its current size and `extra_bytes`.

    A larger allocation raises an error and cannot exhaust the memory of the machine.
    """
    old_limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + extra_bytes, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old_limits)


ENDLESS = {
    "without end": 'root ::= "a" root',
    "without end, later": 'root ::= "c" | "b" x\nx ::= "aa" x',
    "of 2 ** 60 letters": "root ::= r0\n"
    + "".join(f"r{at} ::= r{at + 1} r{at + 1}\n" for at in range(60))
    + 'r60 ::= "a"',
}


@pytest.mark.parametrize("name", ENDLESS)
def test_forced_search_stops_at_the_requested_length(name: str) -> None:
    """xgrammar's own search for forced text does not stop until the memory of the machine is full."""
    matcher = bytewise().matcher(Grammar("ebnf", ENDLESS[name]))
    matcher.accept(tokens_of("b" if "later" in name else "a"))
    with limited_memory(1 << 30):
        assert matcher.forced((), 5) == tokens_of("aaaaa")


def test_all_tokens_are_allowed_until_the_reasoning_ends() -> None:
    grammars = bytewise()
    after = tuple(tokens_of("</t>"))
    matcher = grammars.matcher(Grammar("regex", "ab"), after)
    for path in ("", "<", "</t", "</</t"):
        assert (mask(matcher, grammars.vocabulary, tuple(tokens_of(path))) == -1).all()
        assert matcher.forced(tokens_of(path), 3) == []
    assert not matcher.finished
    first = tokens_of("a")
    for path in ("</t>", "x</t>", "<</t>"):
        assert allowed(mask(matcher, grammars.vocabulary, tuple(tokens_of(path)))).tolist() == first
    assert matcher.forced(tokens_of("</t>"), 9) == [*tokens_of("ab"), 256]
    matcher.accept(tokens_of("b </"))
    assert allowed(mask(matcher, grammars.vocabulary, tuple(tokens_of("t>")))).tolist() == first
    matcher.accept(tokens_of("t>a"))
    assert allowed(mask(matcher, grammars.vocabulary)).tolist() == tokens_of("b")
    with pytest.raises(GrammarError):
        matcher.accept(tokens_of("<"))


def test_stop_token_within_reasoning_ends_the_output() -> None:
    grammars = bytewise()
    matcher = grammars.matcher(Grammar("regex", "ab"), (7,))
    matcher.accept([1, 256])
    assert matcher.ended and allowed(mask(matcher, grammars.vocabulary, (3,))).tolist() == [256]


def test_malformed_compiled_grammar_is_refused() -> None:
    compiled = demo().worker.compile(Grammar("json_object"))
    header, _, rules = compiled.partition("\n")
    for wrong in ("", "{}", "{}\n" + rules, "[]\n" + rules, rules, header):
        with pytest.raises(GrammarError, match="cannot be read"):
            demo().matchers.matcher(wrong)
    with pytest.raises(GrammarError):
        demo().matchers.matcher(header + "\n" + rules[: len(rules) // 2])


def test_forced_tokens_may_begin_and_end_within_a_character() -> None:
    grammars = bytewise()
    matcher = grammars.matcher(Grammar("choice", '["größe", "größt", "大きい"]'))
    first = "大".encode()[:1]
    assert matcher.forced(list(first), 20) == [*list("大きい".encode()[1:]), 256]
    assert matcher.forced(list(b"gr\xc3"), 20) == list("größ".encode()[3:])
    assert matcher.forced([], 20) == []


def test_loaded_grammars_are_cached_within_a_byte_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "CACHED_BYTES", 1)
    compiled_a, compiled_b = (demo().worker.compile(Grammar("regex", text)) for text in ("a+", "b+"))
    matchers = matching.Matchers(demo().vocabulary)
    loaded_a = matchers.load(compiled_a)
    assert matchers.load(compiled_a) is loaded_a
    matchers.load(compiled_b)
    assert matchers.load(compiled_a) is not loaded_a
