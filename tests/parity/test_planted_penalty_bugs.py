"""Planted bugs in what changes a distribution: the checks of penalties and grammars over trees catch each."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cluster.spec.step
from cluster.sampling.grammars import GrammarTable
from cluster.sampling.logits_processor import LogitsProcessor
from cluster.sampling.penalties import PenaltyTable
from tests.parity import test_constrained as constrained
from tests.parity.test_constrained import plain

Patch = pytest.MonkeyPatch
SAMPLING = "0.8"


def changed(patch: Patch, owner: object, name: str, make: Callable[[Callable[..., object]], object]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def paths_are_ignored(patch: Patch) -> None:
    patch.setattr(LogitsProcessor, "after", lambda self, path: self)


def grammars_stand_still(patch: Patch) -> None:
    patch.setattr(GrammarTable, "commit", lambda *_: None)


def penalties_count_nothing(patch: Patch) -> None:
    patch.setattr(PenaltyTable, "commit", lambda *_: None)


def another_request_is_asked(patch: Patch) -> None:
    def make(true: Callable[..., LogitsProcessor]) -> object:
        def wrong(self: LogitsProcessor, which: slice) -> LogitsProcessor:
            own = true(self, which)
            return replace(own, rows=own.rows.flip(0))

        return wrong

    changed(patch, LogitsProcessor, "narrow", make)


def a_token_is_accepted_twice(patch: Patch) -> None:
    def make(true: Callable[..., object]) -> object:
        return lambda self, rows, tokens, lens: true(self, rows, tokens, (lens + 1).clamp(max=tokens.shape[1]))

    changed(patch, GrammarTable, "commit", make)


def forced_nodes_see_themselves_alone(patch: Patch) -> None:
    def make(true: Callable[..., object]) -> object:
        def wrong(tree: object, shape: object, adjust: object) -> object:
            grown = true(tree, shape, adjust)
            alone = torch.eye(grown.ancestors.shape[1], dtype=torch.bool).expand_as(grown.ancestors)  # type: ignore[attr-defined]
            return replace(grown, ancestors=alone)  # type: ignore[type-var]

        return wrong

    changed(patch, cluster.spec.step, "add_forced_nodes", make)


BUGS = (
    paths_are_ignored,
    grammars_stand_still,
    penalties_count_nothing,
    another_request_is_asked,
    a_token_is_accepted_twice,
    forced_nodes_see_themselves_alone,
)


def check() -> None:
    constrained.test_constrained_tree_decoding_matches_plain_decoding((3, 3), SAMPLING, "corrected")


def test_constrained_check_passes_without_a_planted_bug() -> None:
    check()


@pytest.mark.parametrize("bug", BUGS)
def test_planted_penalty_or_grammar_bug_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plain(SAMPLING)  # before anything is wrong
    bug(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # too many tokens are accepted where the grammar is of another
        check()
