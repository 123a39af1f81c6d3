"""A matcher's masks are its grammar's, wherever it is asked, and asking changes nothing."""

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
from tests.grammar.walks import STOPS, allowed, bytewise, demo, grammars_of, mask

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
END = STOPS[0]


def tokens_of(text: str) -> list[int]:
    """Bytes one by one."""
    return list(text.encode())


def paths(matcher: TextMatcher, random: np.random.Generator, most: int) -> list[int]:
    """A path that the grammar allows."""
    path: list[int] = []
    for _ in range(most):
        found = [token for token in allowed(mask(matcher, demo().vocabulary, tuple(path))) if token not in STOPS]
        if not found:
            break
        path.append(int(random.choice(found)))
    return path


@pytest.mark.parametrize("name", GRAMMARS)
def test_mask_after_a_path_equals_the_mask_after_accepting_the_path(name: str) -> None:
    grammars = demo()
    for seed in range(6):
        random = np.random.default_rng(seed)
        matcher = grammars.matcher(GRAMMARS[name])
        committed: list[int] = []
        for _ in range(4):
            tree = [paths(matcher, random, int(random.integers(0, 6))) for _ in range(3)]
            asked = [path[: int(random.integers(0, len(path) + 1))] for path in tree * 2]
            for path in asked:
                fresh = grammars.matcher(GRAMMARS[name])
                fresh.accept([*committed, *path])
                assert np.array_equal(mask(matcher, grammars.vocabulary, tuple(path)), mask(fresh, grammars.vocabulary))
            step = tree[0][: int(random.integers(0, len(tree[0]) + 1))]
            matcher.accept(step)
            committed += step
        fresh = grammars.matcher(GRAMMARS[name])
        fresh.accept(committed)
        assert np.array_equal(mask(matcher, grammars.vocabulary), mask(fresh, grammars.vocabulary))
        assert matcher.finished == fresh.finished


def test_mask_is_computed_once_per_path_until_tokens_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks: masks of a step, and the search for forced text."""
    made, make = list[tuple[int, ...]](), TextMatcher._compute_bitmask

    def counted(matcher: TextMatcher, path: Sequence[int], out: Bitmask) -> None:
        made.append(tuple(path))
        make(matcher, path, out)

    monkeypatch.setattr(TextMatcher, "_compute_bitmask", counted)
    grammars = demo()
    matcher = grammars.matcher(GRAMMARS["person"])
    forced = matcher.forced((), 4)
    before = mask(matcher, grammars.vocabulary)
    assert made and len(made) == len(set(made))
    first = len(made)
    assert matcher.forced((), 4) == forced and np.array_equal(mask(matcher, grammars.vocabulary), before)
    assert len(made) == first, "asked again, nothing is made"
    before[:] = 0
    assert mask(matcher, grammars.vocabulary).any(), "what is kept is nobody else's"
    matcher.accept(forced[:1])
    mask(matcher, grammars.vocabulary)
    assert len(made) == first + 1


@pytest.mark.parametrize("name", GRAMMARS)
def test_mask_contains_exactly_the_acceptable_tokens(name: str) -> None:
    grammars = demo()
    start = grammars.matcher(GRAMMARS[name])
    path = paths(start, np.random.default_rng(1), 5)
    found = set(allowed(mask(start, grammars.vocabulary, tuple(path))).tolist())
    for token in range(0, len(grammars.vocabulary.tokens), 7):
        matcher = grammars.matcher(GRAMMARS[name])
        matcher.accept(path)
        if token in found:
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
    matcher.accept([256])  # as where an output goes on after its end because ignore_eos is set
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
    padded = Vocabulary((*demo().vocabulary.tokens, *[b""] * 45), STOPS)
    grammars = grammars_of(padded)
    matcher = grammars.matcher(Grammar("ebnf", "root ::= [^]*"))
    found = set(allowed(mask(matcher, padded)).tolist())
    assert found >= set(STOPS) and max(found) < 2048 and 1 not in found
    assert all(padded.tokens[token] for token in found - set(STOPS))


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
def little_memory(more: int) -> Iterator[None]:
    """What takes more raises, in place of taking the machine down."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


ENDLESS = {
    "without end": 'root ::= "a" root',
    "without end, later": 'root ::= "c" | "b" x\nx ::= "aa" x',
    "of 2 ** 60 letters": "root ::= r0\n"
    + "".join(f"r{at} ::= r{at + 1} r{at + 1}\n" for at in range(60))
    + 'r60 ::= "a"',
}


@pytest.mark.parametrize("name", ENDLESS)
def test_forced_search_stops_at_the_requested_length(name: str) -> None:
    """xgrammar's own search for what is forced goes on until the memory of the machine is full."""
    matcher = bytewise().matcher(Grammar("ebnf", ENDLESS[name]))
    matcher.accept(tokens_of("b" if "later" in name else "a"))
    with little_memory(1 << 30):
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
    prepared = demo().worker.compile(Grammar("json_object"))
    head, _, rules = prepared.partition("\n")
    for wrong in ("", "{}", "{}\n" + rules, "[]\n" + rules, rules, head):
        with pytest.raises(GrammarError, match="cannot be read"):
            demo().matchers.matcher(wrong)
    with pytest.raises(GrammarError):
        demo().matchers.matcher(head + "\n" + rules[: len(rules) // 2])


def test_forced_tokens_may_begin_and_end_within_a_character() -> None:
    grammars = bytewise()
    matcher = grammars.matcher(Grammar("choice", '["größe", "größt", "大きい"]'))
    first = "大".encode()[:1]
    assert matcher.forced(list(first), 20) == [*list("大きい".encode()[1:]), 256]
    assert matcher.forced(list(b"gr\xc3"), 20) == list("größ".encode()[3:])
    assert matcher.forced([], 20) == []


def test_loaded_grammars_are_cached_within_a_byte_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "CACHED_BYTES", 1)
    one, other = (demo().worker.compile(Grammar("regex", text)) for text in ("a+", "b+"))
    matchers = matching.Matchers(demo().vocabulary)
    first = matchers.load(one)
    assert matchers.load(one) is first
    matchers.load(other)
    assert matchers.load(one) is not first
