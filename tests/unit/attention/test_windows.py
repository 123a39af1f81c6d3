"""Sliding windows: a row of a tree sees the last positions of its own path; other layers keep the whole text."""

import pytest
import torch

from cluster.attention.ancestor_bits import chain_bits, pack_bits
from cluster.attention.bias import Visibility
from cluster.attention.gather import Gather
from cluster.attention.shape import AttentionShape
from cluster.attention.torch_backend import TorchAttention
from cluster.batch import AttentionMetadata, HostBounds, TreeRows
from cluster.kv.pool import KVPool
from tests.tables import table_of
from tests.unit.attention.dense import CPU


def test_sliding_window_of_one_layer_leaves_full_attention_layers_unchanged() -> None:
    torch.manual_seed(1)
    pools = [KVPool(2, 30, (2, 2, 8), torch.float64, CPU) for _ in range(2)]
    for pool in pools:
        pool.kv.copy_(torch.ones_like(pool.kv).cumsum(1).sin())
    table = table_of(torch.arange(1, 21)[None])
    plain, mixed = (
        TorchAttention(pools[0], Gather(table, 4), AttentionShape(4)),
        TorchAttention(pools[1], Gather(table, 4), AttentionShape(4, (3, None))),
    )
    seen = AttentionMetadata(
        torch.arange(10, 14), TreeRows(torch.tensor([0]), torch.tensor([9]), chain_bits(4, 4, CPU), 4)
    )
    q, kv = torch.randn(4, 4, 8, dtype=torch.float64), torch.randn(4, 2, 2, 8, dtype=torch.float64)
    for attention in (plain, mixed):
        attention.prepare(HostBounds(9))
        attention.bind(seen)
    assert torch.equal(plain(1, q, kv), mixed(1, q, kv))
    assert not torch.allclose(plain(0, q, kv), mixed(0, q, kv))


@pytest.mark.parametrize(
    ("window", "first", "seen"),
    [
        (2, 0, ["....  .#..#", "...#  #...."]),  # the row of three bits is at position 4 + 2, the other at 4
        (4, 0, ["...#  ##..#", ".###  #...."]),
        (None, 2, ["..##  ##..#", "..##  #...."]),
        (None, 5, ["....  .#..#", "####  #...."]),  # below the first label a row sees what it saw
    ],
)
def test_sliding_window_counts_tree_positions_by_visible_bits(window: int | None, first: int, seen: list[str]) -> None:
    """Four tokens, then a window of five slots of which one row sees three and another one."""
    visible = torch.tensor([[[True, True, False, False, True], [True, False, False, False, False]]])
    sight = Visibility.of(pack_bits(visible), 5, first, torch.float64)
    bias = sight.limited_bias(torch.arange(4)[None], torch.tensor([4]), window)
    assert (bias[0] == 0).tolist() == [[sign == "#" for sign in row if sign != " "] for row in seen]
