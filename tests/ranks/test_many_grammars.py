"""Two hundred schemas and fifty expressions and grammars on two ranks, against plain decoding on one."""

from dataclasses import asdict

import pytest

from tests.pairwise import covering
from tests.parity.test_many_grammars import TEMPERATURES, asked, config, plain
from tests.ranks.gang import Action, Case
from tests.ranks.test_parity import Gangs


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "tree", "temperature"), covering([(1, 2), ((1, 3), (4, 4)), TEMPERATURES]))
def test_constrained_streams_on_two_ranks_match_plain_decoding(
    ranks: Gangs, groups: int, tree: tuple[int, int], temperature: float
) -> None:
    said = plain(temperature)
    settings = config(*tree, tp_size=2, attn_dp_size=groups).model_dump(exclude_defaults=True)
    actions = []
    for at, one in enumerate(asked(temperature)):
        fields = {"request_id": one.request_id, "prompt_token_ids": one.prompt_token_ids, "params": asdict(one.params)}
        actions.append(Action(at // 4, at % groups, "submit", fields))
    lives = ranks(2).lives(Case(settings, actions), timeout_s=900)
    tokens = {name: run for life in lives for name, run in life.tokens.items()}
    ended = {name: end for life in lives for name, end in life.ended.items()}
    assert len(tokens) == len(said.tokens)
    assert not {name: (ended[name], tokens[name]) for name, run in said.tokens.items() if tokens[name] != run}
