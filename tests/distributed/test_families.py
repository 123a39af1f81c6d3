"""Every kind of attention and MLP on two rank processes gives the tokens, trees and accept lengths of a single rank."""

import pytest

from tests.distributed.compare import check
from tests.distributed.gang import Case
from tests.distributed.test_parity import RanksFactory, config
from tests.distributed.workload import workload
from tests.support.families import VOCAB, family_checkpoint
from tests.support.slow_cases import diagonals_fast
from tests.support.tiny_checkpoints import draft_folder

REQUESTS = 8
KINDS = {
    "mistral": "window of 9",
    "qwen3_moe": "renormalised",
    "gpt_oss": "yarn",
    "gemma3": "three local, one global",
    "deepseek_v3": "low-rank queries",
    "gemma4": "layers that borrow, with inputs of their own",
    "llama4": "chunks of 8, every fourth layer without rope",
}
"""By family, the config. They have, in this order: sliding windows; experts; attention sinks and biases; norms on both
sides of a block; latent attention; layers that read the keys and values of others; chunks. The other families consist
of the same parts.
"""
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "tp": (1, {}),
    "dp": (2, {"dp_padding": "exact", "vocab_parallel": "world"}),
}


@pytest.mark.parametrize(("family", "mesh"), diagonals_fast(2, list(KINDS), list(MESHES)))
def test_two_ranks_match_one_rank_for_each_attention_kind(ranks: RanksFactory, family: str, mesh: str) -> None:
    dp, settings = MESHES[mesh]
    target = family_checkpoint(family, KINDS[family]).folder
    actions = workload(dp, dp, REQUESTS, vocab=VOCAB, horizon=6, max_prompt_tokens=30, max_new_tokens=10)
    config_dict = config(target, draft_folder(target), tp_size=2, attn_dp_size=dp, chunked_prefill_size=16, **settings)
    tally = check(ranks(2), Case(config_dict, actions))
    assert not tally.mismatches
    assert tally.compared_requests == tally.compared_trees == REQUESTS
