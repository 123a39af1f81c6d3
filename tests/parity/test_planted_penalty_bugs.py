"""Planted bugs in penalties and grammars: the test of constrained tree decoding must detect each of them."""

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


def wrap(patch: Patch, owner: object, name: str, make: Callable[[Callable[..., object]], object]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def paths_are_ignored(patch: Patch) -> None:
    patch.setattr(LogitsProcessor, "after", lambda self, path: self)


def grammars_are_not_advanced(patch: Patch) -> None:
    patch.setattr(GrammarTable, "commit", lambda *_: None)


def penalties_count_no_tokens(patch: Patch) -> None:
    patch.setattr(PenaltyTable, "commit", lambda *_: None)


def adjustments_of_another_request_are_used(patch: Patch) -> None:
    def make(original: Callable[..., LogitsProcessor]) -> object:
        def wrong(self: LogitsProcessor, which: slice) -> LogitsProcessor:
            narrowed = original(self, which)
            return replace(narrowed, rows=narrowed.rows.flip(0))

        return wrong

    wrap(patch, LogitsProcessor, "narrow", make)


def a_token_is_accepted_twice(patch: Patch) -> None:
    def make(original: Callable[..., object]) -> object:
        return lambda self, rows, tokens, lens: original(self, rows, tokens, (lens + 1).clamp(max=tokens.shape[1]))

    wrap(patch, GrammarTable, "commit", make)


def forced_nodes_see_only_themselves(patch: Patch) -> None:
    def make(original: Callable[..., object]) -> object:
        def wrong(tree: object, shape: object, adjust: object) -> object:
            grown = original(tree, shape, adjust)
            self_only_mask = torch.eye(grown.ancestors.shape[1], dtype=torch.bool).expand_as(grown.ancestors)  # type: ignore[attr-defined]
            return replace(grown, ancestors=self_only_mask)  # type: ignore[type-var]

        return wrong

    wrap(patch, cluster.spec.step, "add_forced_nodes", make)


BUGS = (
    paths_are_ignored,
    grammars_are_not_advanced,
    penalties_count_no_tokens,
    adjustments_of_another_request_are_used,
    a_token_is_accepted_twice,
    forced_nodes_see_only_themselves,
)


def check() -> None:
    constrained.test_constrained_tree_decoding_matches_plain_decoding((3, 3), SAMPLING, "corrected")


def test_constrained_check_passes_without_a_planted_bug() -> None:
    check()


@pytest.mark.parametrize("bug", BUGS)
def test_planted_penalty_or_grammar_bug_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plain(SAMPLING)  # compute the oracle before the bug is planted
    bug(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # IndexError: another request's grammar accepts too many tokens
        check()
