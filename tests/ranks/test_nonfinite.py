"""A request whose numbers are not finite ends alone on any mesh, and its ranks stay in step."""

from collections.abc import Callable

import pytest

from tests.parity.harness import VOCAB
from tests.parity.test_nonfinite import BAD, EMBEDDING, spoiled
from tests.ranks.compare import check
from tests.ranks.gang import Case, Ranks
from tests.ranks.test_parity import config
from tests.ranks.workload import workload
from tests.tiny import draft_folder, target_folder


@pytest.mark.parametrize(
    ("tp", "dp"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (4, 2)))]
)
@pytest.mark.parametrize("padding", ["padded", "exact"])
def test_non_finite_request_ends_alone_on_any_mesh(
    ranks: Callable[[int], Ranks], tp: int, dp: int, padding: str
) -> None:
    """Against one rank, where `tests/parity` holds it to plain decoding. Token 0, which idle rows take, is bad too."""
    target = target_folder(vocab_size=VOCAB)
    draft = draft_folder(target)
    bad = spoiled(spoiled(target, EMBEDDING), EMBEDDING, row=0)
    mesh = {"tp_size": tp, "attn_dp_size": dp, "dp_padding": padding, "chunked_prefill_size": 9}
    actions = workload(7, dp, 24, vocab=VOCAB, horizon=12)
    for action in actions[:14]:  # these do not begin with what is bad
        ids = action.request["prompt_token_ids"]
        action.request["prompt_token_ids"] = [1 if token in (0, BAD) else token for token in ids]
    case = Case(config(bad, draft, topk=3, num_steps=3, **mesh), actions)
    tally = check(ranks(tp), case)
    assert not tally.mismatches and tally.compared == 24, tally
    lives = ranks(tp).lives(case)
    reasons = [reason for life in lives for reason, _ in life.ended.values()]
    assert 5 < reasons.count("error") < 20
