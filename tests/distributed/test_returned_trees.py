"""Requests that ask for their trees get from several ranks the trees that a single rank returns."""

import pytest

from tests.distributed.compare import check
from tests.distributed.gang import Case
from tests.distributed.test_parity import RanksFactory, config
from tests.distributed.workload import workload
from tests.parity.automata import automaton
from tests.parity.harness import VOCAB, tiny_pair

EXTRA_PARAMS = ({"return_tree": True}, {}, {"return_tree": True, "grammar": automaton(0)})


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_returned_trees_on_several_ranks_match_one_rank(ranks: RanksFactory, mesh: tuple[int, int]) -> None:
    """Mesh (2, 1) has a follower, which copies no trees to the host. Mesh (2, 2) has two attention groups; the requests
    of one of them may ask for no trees.
    """
    tp, dp = mesh
    actions = workload(7, dp, 16, vocab=VOCAB, horizon=10, abort_share=0.1, extra_params=EXTRA_PARAMS)
    settings = {"tp_size": tp, "attn_dp_size": dp, "topk": 3, "debug_lockstep": True}
    tally = check(ranks(tp), Case(config(*tiny_pair(), **settings), actions))
    assert not tally.mismatches, tally.mismatches
    assert tally.compared_requests > 10 and tally.returned_trees > 10, tally
