"""On any mesh a request whose numbers are not finite ends without affecting other requests, and its ranks
stay in step.
"""

from collections.abc import Callable

import pytest

from tests.distributed.compare import check
from tests.distributed.gang import Case, RankProcesses
from tests.distributed.test_parity import config
from tests.distributed.workload import workload
from tests.parity.harness import VOCAB
from tests.parity.test_nonfinite import BAD_TOKEN, EMBEDDING, corrupted_copy
from tests.support.tiny_checkpoints import draft_folder, target_folder


@pytest.mark.parametrize(
    ("tp", "dp"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (4, 2)))]
)
@pytest.mark.parametrize("padding", ["padded", "exact"])
def test_non_finite_request_ends_alone_on_any_mesh(
    ranks: Callable[[int], RankProcesses], tp: int, dp: int, padding: str
) -> None:
    """The gang is compared with a single rank, which `tests/parity` compares with plain decoding. Token 0 has a spoiled
    embedding too, because idle rows use it.
    """
    target = target_folder(vocab_size=VOCAB)
    draft = draft_folder(target)
    spoiled_target = corrupted_copy(corrupted_copy(target, EMBEDDING), EMBEDDING, row=0)
    mesh = {"tp_size": tp, "attn_dp_size": dp, "dp_padding": padding, "chunked_prefill_size": 9}
    actions = workload(7, dp, 24, vocab=VOCAB, horizon=12)
    for action in actions[:14]:  # the prompts of these requests have no spoiled token
        ids = action.request["prompt_token_ids"]
        action.request["prompt_token_ids"] = [1 if token in (0, BAD_TOKEN) else token for token in ids]
    case = Case(config(spoiled_target, draft, topk=3, num_steps=3, **mesh), actions)
    tally = check(ranks(tp), case)
    assert not tally.mismatches and tally.compared_requests == 24, tally
    reports = ranks(tp).run_without_failure(case)
    reasons = [reason for report in reports for reason, _ in report.ended.values()]
    assert 5 < reasons.count("error") < 20
