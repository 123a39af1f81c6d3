"""Every attention and MLP kind on ranks that are processes: the tokens and accept lengths of one rank."""

import pytest

from tests.families import FAMILIES, VOCAB, made
from tests.ranks.compare import check
from tests.ranks.gang import Case
from tests.ranks.test_parity import Gangs, config
from tests.ranks.workload import workload
from tests.tiny import draft_folder

REQUESTS = 8
KINDS = ("mistral", "qwen3_moe", "gpt_oss", "gemma3", "deepseek_v3")
"""Windows; experts; sinks and biases; norms on both sides; latents. The others are made of the same parts."""


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    ("dp", "settings"), [(1, {}), (2, {"dp_padding": "exact", "vocab_parallel": "world"})], ids=["tp", "dp"]
)
def test_two_ranks_match_one_rank_for_each_attention_kind(
    ranks: Gangs, family: str, dp: int, settings: dict[str, object]
) -> None:
    target = made(family, next(iter(FAMILIES[family].cases))).folder
    actions = workload(dp, dp, REQUESTS, vocab=VOCAB, horizon=6, longest=30, most_tokens=10)
    given = config(target, draft_folder(target), tp_size=2, attn_dp_size=dp, chunked_prefill_size=16, **settings)
    tally = check(ranks(2), Case(given, actions))
    assert not tally.mismatches
    assert tally.compared == tally.counted == REQUESTS
