"""MTP layers with experts: two ranks compute the same as one rank, and invalid layers are refused.

`test_drafts.py` compares their logits with a reference.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cluster.arch import read_target
from cluster.config import ConfigError
from cluster.distributed.mesh import Shard
from cluster.models.load import local_heads
from tests.support.loading import check_draft, context, load_draft, load_target
from tests.support.tiny_checkpoints import target_folder
from tests.unit.models.draft_cases import CASES
from tests.unit.models.draft_folders import mtp, rewrite_draft
from tests.unit.models.mtp_layers import qwen_next, step_layers
from tests.unit.models.sharded import SummingExchange, run_on_shards
from tests.unit.models.test_drafts import TEXT, CausalAttention

STEP_TYPES = ["sliding_attention", "full_attention"]


def run_on_ranks(name: str, size: int) -> list[tuple[Tensor, Tensor]]:
    """Run the draft `name` over a text; return (logits, recurrent hidden states) of each of `size` ranks."""
    case, tokens = CASES[name], torch.tensor(TEXT)
    folder, target = case.folder(), case.target()
    hidden = torch.randn(len(TEXT), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def rank(shard: Shard, exchange: SummingExchange) -> tuple[Tensor, Tensor]:
        load_context = context(exchange=exchange, shard=shard)
        draft = load_draft(folder, load_target(target, load_context), load_context)
        local_layers = tuple(replace(layer, geometry=local_heads(layer.geometry, shard)) for layer in draft.spec.layers)
        normed, recurrent = draft.forward(tokens, torch.arange(len(TEXT)), hidden, CausalAttention(local_layers))
        logits = exchange.logits(draft.logits(normed))
        assert exchange.ops == [*draft.exchange_calls[0], *draft.exchange_calls[1]]
        return logits, recurrent

    return run_on_shards(size, rank)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-next-dense", "nextn-experts", "glm"])
def test_mtp_layers_on_two_ranks_equal_one_rank(name: str) -> None:
    single_rank_output = run_on_ranks(name, 1)[0]
    for shard in run_on_ranks(name, 2):
        for ours, theirs in zip(shard, single_rank_output, strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("write_draft", "message"),
    [
        (lambda: qwen_next(layers=2), r"'mtp.layers' are \[0, 1\]"),
        (lambda: qwen_next(partial_rotary_factor=1.5), "partial_rotary_factor must be at most 1, got 1.5"),
        (lambda: qwen_next(partial_rotary_factor=0.4), "partial_rotary_factor 0.4 of head_dim 8 is 3 dimensions"),
        (lambda: qwen_next(num_experts=0), "num_experts must be a positive integer"),
        (lambda: qwen_next(num_experts_per_tok=7), "num_experts_per_tok 7 exceeds the 6 experts"),
        (
            lambda: rewrite_draft(mtp("mimo"), {r"\.mlp\.": ".mlp.experts.0."}, dict),
            "mimo layers with experts are not served",
        ),
        (
            lambda: rewrite_draft(
                step_layers(2), {}, lambda config: config | {"layer_types": ["full_attention"] * 4 + STEP_TYPES}
            ),
            "MTP layers 4 and 5 differ, which is not served",
        ),
    ],
)
def test_invalid_mtp_drafts_are_refused_by_name(write_draft: Callable[[], str], message: str) -> None:
    draft_path = write_draft()
    with pytest.raises(ConfigError, match=message) as caught:
        check_draft(draft_path, read_target(target_folder()))
    assert draft_path in str(caught.value)


def test_step_layers_with_deepseek_names_of_the_head_stay_step_layers() -> None:
    """Some tools rename the head and its norm. The gate of the attention's output tells the format."""
    names = {r"transformer\.shared_head\.output": "shared_head.head", r"transformer\.shared_head": "shared_head"}
    target = read_target(target_folder())
    published, renamed = (check_draft(f, target) for f in (step_layers(), rewrite_draft(step_layers(), names, dict)))
    assert (published.dialect, published.layers) == (renamed.dialect, renamed.layers)
