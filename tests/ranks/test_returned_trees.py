"""Requests on several ranks that ask for their trees: shown those that one rank shows."""

import pytest

from tests.parity.automata import automaton
from tests.parity.harness import VOCAB, tiny_pair
from tests.ranks.compare import check
from tests.ranks.gang import Case
from tests.ranks.test_parity import Gangs, config
from tests.ranks.workload import workload

BESIDES = ({"return_tree": True}, {}, {"return_tree": True, "grammar": automaton(0)})


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_returned_trees_on_several_ranks_match_one_rank(ranks: Gangs, mesh: tuple[int, int]) -> None:
    """With followers (2, 1), which copy none, and with other groups (2, 2), which may have asked for none."""
    tp, dp = mesh
    actions = workload(7, dp, 16, vocab=VOCAB, horizon=10, aborts=0.1, besides=BESIDES)
    settings = {"tp_size": tp, "attn_dp_size": dp, "topk": 3, "debug_lockstep": True}
    tally = check(ranks(tp), Case(config(*tiny_pair(), **settings), actions))
    assert not tally.mismatches, tally.mismatches
    assert tally.compared > 10 and tally.shown > 10, tally
