"""The transfer of grammars: a rank gets each grammar once; requests name it, and the rank's cache restores its text."""

import pytest

from cluster.actors import grammar_transfer
from cluster.actors.grammar_transfer import GrammarCache, grammar_name, with_grammar
from cluster.actors.messages import Commands
from cluster.request import Request, RequestParams


def request_with_grammar(grammar: str | None) -> Request:
    return Request("one", (1, 2), RequestParams(grammar=grammar))


def test_grammar_cache_resolves_each_grammar_name_to_its_own_text() -> None:
    cache = GrammarCache()
    for text in ("first", "second"):
        cache.add(grammar_name(text), text)
    request_without_grammar = request_with_grammar(None)
    commands = Commands(
        (
            with_grammar(request_with_grammar("second"), grammar_name("second")),
            request_without_grammar,
            with_grammar(request_with_grammar("third"), grammar_name("third")),
        ),
        ("two",),
    )
    resolved = cache.resolve_names(commands)
    assert [request.params.grammar for request in resolved.submits] == ["second", None, grammar_name("third")]
    assert resolved.submits[1] is request_without_grammar and resolved.aborts == ("two",)
    assert grammar_name("first") != grammar_name("second")


def test_grammar_cache_evicts_old_grammars_but_keeps_recent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(grammar_transfer.time, "monotonic", lambda: now)
    monkeypatch.setattr(grammar_transfer, "MAX_CACHED_CHARACTERS", 10)
    cache = GrammarCache()
    for text in ("a" * 6, "b" * 6):
        cache.add(grammar_name(text), text)
    assert len(cache._entries) == 2, "both grammars were added a moment ago"
    now += grammar_transfer.MIN_CACHED_S + 1
    cache.add(grammar_name("b" * 6), "b" * 6)
    assert list(cache._entries) == [grammar_name("b" * 6)]
