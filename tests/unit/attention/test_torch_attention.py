"""Torch attention writes only the slots of its rows, and a step does not use data gathered for another step."""

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.attention import cells
from cluster.attention.ancestor_bits import chain_bits
from cluster.attention.gather import Gather, similar_length_ranges
from cluster.attention.shape import AttentionShape
from cluster.attention.torch_backend import TorchAttention
from cluster.batch import AttentionMetadata, HostBounds, TreeRows
from cluster.kv.pool import KVPool
from tests.support.page_tables import table_of
from tests.unit.attention.dense import CPU, Case


def test_attention_of_an_empty_batch_returns_zero_rows() -> None:
    table = table_of(torch.arange(8).view(2, 4))
    pool = KVPool(1, 8, Cell(2, 8, 8), torch.float64, CPU)
    attention = TorchAttention(pool, Gather(table, 3), AttentionShape(4))
    none = torch.zeros(0, dtype=torch.int64)
    attention.bind(AttentionMetadata(none, TreeRows(none, none, chain_bits(3, 3, CPU), 3)))
    out = attention(0, torch.zeros(0, 4, 8, dtype=torch.float64), torch.zeros(0, 2, 2, 8, dtype=torch.float64))
    assert out.shape == (0, 32)


def test_attention_writes_only_its_own_slots_of_its_own_layer() -> None:
    case = Case(heads=4, kv_heads=2, committed=(5, 0), parents=(-1, 0, 0), chunks=((2, 9),), page_size=4, lies="tail")
    attention = TorchAttention(case.pool, Gather(case.table, 3), AttentionShape(4))
    before = case.pool.kv.nan_to_num(7.0)
    attention.prepare(HostBounds(5, ((2, 9),)))
    attention.bind(case.attention_metadata())
    attention(1, case.q, case.kv)
    after = case.pool.kv.nan_to_num(7.0)
    assert torch.equal(after[0], before[0]), "the other layer must stay the same"
    assert torch.equal(after[1, case.write()], case.kv)
    untouched = torch.ones(after.shape[1], dtype=torch.bool).index_fill_(0, case.write(), False)
    assert torch.equal(after[1, untouched], before[1, untouched])


@pytest.mark.parametrize("host_reads", [True, False])
def test_prepare_drops_cached_gather_when_lengths_change_in_place(
    host_reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prepare` drops the data that a step's phases share, even if the next step has the same tensor objects."""
    if not host_reads:
        monkeypatch.setattr(cells, "host_values", lambda *_: None)
    torch.manual_seed(0)
    table = table_of(torch.arange(1, 21).view(2, 10))
    pools = [KVPool(1, 21, Cell(2, 8, 8), torch.float64, CPU) for _ in range(2)]
    lens, rows, bits = torch.tensor([3, 5]), torch.tensor([0, 1]), chain_bits(1, 1, CPU)
    q, kv = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 2, 2, 8, dtype=torch.float64)
    gather, outs = Gather(table, 1), []
    for pool in pools:
        pool.kv.copy_(torch.ones_like(pool.kv).cumsum(1).sin())
    for step in range(2):
        lens += 1
        for pool, step_gather in ((pools[0], gather), (pools[1], Gather(table, 1))):
            attention = TorchAttention(pool, step_gather, AttentionShape(4))
            attention.prepare(HostBounds(7))
            attention.bind(AttentionMetadata(table.slots(rows, lens), TreeRows(rows, lens, bits, 1)))
            outs.append(attention(0, q + step, kv))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3])


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [([], []), ([5], [(0, 1)]), ([1, 2, 3, 4, 9], [(0, 2), (2, 4), (4, 5)]), ([2, 4, 5], [(0, 2), (2, 3)])],
)
def test_similar_length_ranges_pad_chunks_to_at_most_twice_their_length(
    lengths: list[int], parts: list[tuple[int, int]]
) -> None:
    assert [(part.start, part.stop) for part in similar_length_ranges(lengths)] == parts
