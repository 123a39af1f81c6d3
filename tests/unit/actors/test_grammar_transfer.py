"""Grammars travel once, under a name; what is named is whole again on the rank."""

import pytest

from cluster.actors import grammar_transfer
from cluster.actors.grammar_transfer import GrammarCache, name_of, named
from cluster.actors.messages import Commands
from cluster.request import Request, RequestParams


def asked(grammar: str | None) -> Request:
    return Request("one", (1, 2), RequestParams(grammar=grammar))


def test_a_request_gets_the_grammar_of_its_name_and_of_no_other() -> None:
    kept = GrammarCache()
    for text in ("first", "second"):
        kept.keep(name_of(text), text)
    free = asked(None)
    sent = Commands(
        (named(asked("second"), name_of("second")), free, named(asked("third"), name_of("third"))), ("two",)
    )
    whole = kept.whole(sent)
    assert [request.params.grammar for request in whole.submits] == ["second", None, name_of("third")]
    assert whole.submits[1] is free and whole.aborts == ("two",)
    assert name_of("first") != name_of("second")


def test_old_grammars_make_room_but_not_those_whose_request_may_be_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(grammar_transfer.time, "monotonic", lambda: now)
    monkeypatch.setattr(grammar_transfer, "KEPT_CHARACTERS", 10)
    kept = GrammarCache()
    for text in ("a" * 6, "b" * 6):
        kept.keep(name_of(text), text)
    assert len(kept._kept) == 2, "both were read a moment ago"
    now += grammar_transfer.KEPT_S + 1
    kept.keep(name_of("b" * 6), "b" * 6)
    assert list(kept._kept) == [name_of("b" * 6)]
