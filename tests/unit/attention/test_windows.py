"""Sliding windows: a tree row sees the last positions of its own path, and layers without a window see all tokens."""

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.attention.ancestor_bits import chain_bits, pack_bits
from cluster.attention.bias import Visibility
from cluster.attention.gather import Gather
from cluster.attention.shape import AttentionShape
from cluster.attention.torch_backend import TorchAttention
from cluster.batch import AttentionMetadata, HostBounds, TreeRows
from cluster.kv.pool import KVPool
from tests.support.page_tables import table_of
from tests.unit.attention.dense import CPU


def test_sliding_window_of_one_layer_leaves_full_attention_layers_unchanged() -> None:
    torch.manual_seed(1)
    pools = [KVPool(2, 30, Cell(2, 8, 8), torch.float64, CPU) for _ in range(2)]
    for pool in pools:
        pool.kv.copy_(torch.ones_like(pool.kv).cumsum(1).sin())
    table = table_of(torch.arange(1, 21)[None])
    full_attention, windowed_attention = (
        TorchAttention(pools[0], Gather(table, 4), AttentionShape(4)),
        TorchAttention(pools[1], Gather(table, 4), AttentionShape(4, (3, None))),
    )
    metadata = AttentionMetadata(
        torch.arange(10, 14), TreeRows(torch.tensor([0]), torch.tensor([9]), chain_bits(4, 4, CPU), 4)
    )
    q, kv = torch.randn(4, 4, 8, dtype=torch.float64), torch.randn(4, 2, 2, 8, dtype=torch.float64)
    for attention in (full_attention, windowed_attention):
        attention.prepare(HostBounds(9))
        attention.bind(metadata)
    assert torch.equal(full_attention(1, q, kv), windowed_attention(1, q, kv))
    assert not torch.allclose(full_attention(0, q, kv), windowed_attention(0, q, kv))


@pytest.mark.parametrize(
    ("window", "first", "expected"),
    [
        (2, 0, ["....  .#..#", "...#  #...."]),  # the row with three bits is at position 4 + 2, the other row at 4
        (4, 0, ["...#  ##..#", ".###  #...."]),
        (None, 2, ["..##  ##..#", "..##  #...."]),
        (None, 5, ["....  .#..#", "####  #...."]),  # `first` does not limit a row at a position below it
    ],
)
def test_sliding_window_counts_tree_positions_by_visible_bits(
    window: int | None, first: int, expected: list[str]
) -> None:
    """After four committed tokens come five tree slots. One row sees three of them, the other row sees one.

    In `expected`, `#` is a visible cell.
    """
    visible = torch.tensor([[[True, True, False, False, True], [True, False, False, False, False]]])
    visibility = Visibility.of(pack_bits(visible), 5, first, torch.float64)
    bias = visibility.limited_bias(torch.arange(4)[None], torch.tensor([4]), window)
    assert (bias[0] == 0).tolist() == [[mark == "#" for mark in row if mark != " "] for row in expected]
