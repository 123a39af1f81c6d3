"""Grammars travel once, under a name; what is named is whole again on the rank."""

import pytest

from cluster.actors import grammar_transfer
from cluster.actors.grammar_transfer import GrammarCache, grammar_name, with_grammar
from cluster.actors.messages import Commands
from cluster.request import Request, RequestParams


def asked(grammar: str | None) -> Request:
    return Request("one", (1, 2), RequestParams(grammar=grammar))


def test_grammar_cache_resolves_each_grammar_name_to_its_own_text() -> None:
    kept = GrammarCache()
    for text in ("first", "second"):
        kept.add(grammar_name(text), text)
    free = asked(None)
    sent = Commands(
        (
            with_grammar(asked("second"), grammar_name("second")),
            free,
            with_grammar(asked("third"), grammar_name("third")),
        ),
        ("two",),
    )
    whole = kept.resolve_names(sent)
    assert [request.params.grammar for request in whole.submits] == ["second", None, grammar_name("third")]
    assert whole.submits[1] is free and whole.aborts == ("two",)
    assert grammar_name("first") != grammar_name("second")


def test_grammar_cache_evicts_old_grammars_but_keeps_recent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(grammar_transfer.time, "monotonic", lambda: now)
    monkeypatch.setattr(grammar_transfer, "MAX_CACHED_CHARACTERS", 10)
    kept = GrammarCache()
    for text in ("a" * 6, "b" * 6):
        kept.add(grammar_name(text), text)
    assert len(kept._entries) == 2, "both were read a moment ago"
    now += grammar_transfer.MIN_CACHED_S + 1
    kept.add(grammar_name("b" * 6), "b" * 6)
    assert list(kept._entries) == [grammar_name("b" * 6)]
