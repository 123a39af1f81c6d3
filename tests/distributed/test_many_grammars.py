"""Two hundred JSON schemas and fifty regular expressions and grammars on two ranks give the tokens of plain decoding on
a single rank.
"""

from dataclasses import asdict

import pytest

from tests.distributed.gang import Action, Case
from tests.distributed.test_parity import RanksFactory
from tests.parity.test_many_grammars import TEMPERATURES, config, grammar_requests, plain
from tests.support.pairwise import covering


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "tree", "temperature"), covering([(1, 2), ((1, 3), (4, 4)), TEMPERATURES]))
def test_constrained_streams_on_two_ranks_match_plain_decoding(
    ranks: RanksFactory, groups: int, tree: tuple[int, int], temperature: float
) -> None:
    plain_output = plain(temperature)
    settings = config(*tree, tp_size=2, attn_dp_size=groups).model_dump(exclude_defaults=True)
    actions = []
    for number, request in enumerate(grammar_requests(temperature)):
        fields = {
            "request_id": request.request_id,
            "prompt_token_ids": request.prompt_token_ids,
            "params": asdict(request.params),
        }
        actions.append(Action(number // 4, number % groups, "submit", fields))
    reports = ranks(2).run_without_failure(Case(settings, actions), timeout_s=900)
    tokens = {name: token_ids for report in reports for name, token_ids in report.tokens.items()}
    ended = {name: end_fields for report in reports for name, end_fields in report.ended.items()}
    assert len(tokens) == len(plain_output.tokens)
    assert not {
        name: (ended[name], tokens[name])
        for name, token_ids in plain_output.tokens.items()
        if tokens[name] != token_ids
    }
