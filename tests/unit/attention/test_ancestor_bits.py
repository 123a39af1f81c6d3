"""Ancestor masks packed as bits and unpacked again, in one word and in several words."""

import pytest
import torch

from cluster.attention.ancestor_bits import chain_bits, pack_bits, self_bits, unpack_bits, word_count

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 63, 64, 65, 100])
def test_pack_bits_and_unpack_bits_round_trip_any_width(width: int) -> None:
    torch.manual_seed(width)
    visible = torch.rand(3, 5, width) < 0.5
    bits = pack_bits(visible)
    assert (bits.shape, bits.dtype) == ((3, 5, -(-width // 32)), torch.int32)
    assert torch.equal(unpack_bits(bits, width), visible)
    for j in range(width):
        assert torch.equal((bits[..., j // 32] >> (j % 32) & 1).bool(), visible[..., j]), "word j // 32, bit j % 32"


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 7), (4, 4), (3, 40), (40, 40)])
def test_chain_bits_show_each_row_its_prefix_and_are_cached(rows: int, width: int) -> None:
    expected = [[j <= width - rows + i for j in range(width)] for i in range(rows)]
    assert unpack_bits(chain_bits(rows, width, CPU), width).tolist() == [expected]
    assert chain_bits(rows, width, CPU) is chain_bits(rows, width, CPU), "the second call must return the cached tensor"


@pytest.mark.parametrize(("start", "rows", "width"), [(0, 1, 1), (0, 4, 4), (4, 4, 12), (30, 5, 40)])
def test_self_bits_show_each_row_only_its_own_slot(start: int, rows: int, width: int) -> None:
    visible = unpack_bits(self_bits(start, rows, width, CPU), width)
    assert visible.tolist() == [[[j == start + i for j in range(width)] for i in range(rows)]]
    assert word_count(width) == self_bits(start, rows, width, CPU).shape[2]
