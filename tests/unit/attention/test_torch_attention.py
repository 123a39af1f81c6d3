"""The attention primitive against one softmax per row, over pages that lie anywhere in the pool."""

import pytest
import torch
from torch import Tensor

from cluster.attention import torch_backend
from cluster.attention.plan import bias_of, causal_bias, partly_written, reach_of, window_group
from cluster.attention.torch_backend import TorchAttention, run_of
from cluster.batch import AttentionPlan
from cluster.kv.pool import KVPool
from tests.tables import table_of

CPU = torch.device("cpu")
D = 8


def row_attention(q: Tensor, cells: Tensor, repeat: int) -> Tensor:
    """q `[nh, d]` over cells `[L, 2, nkv, d]` -> `[nh * d]`."""
    out = []
    for head in range(q.shape[0]):
        k, v = cells[:, 0, head // repeat], cells[:, 1, head // repeat]
        out.append(((k @ q[head]) / D**0.5).softmax(0) @ v)
    return torch.cat(out)


def scattered(rows: int, length: int, slots: int) -> Tensor:
    """A slot table without order: distinct slots, none of them in the sink."""
    generator = torch.Generator().manual_seed(length)
    return (torch.randperm(slots - 1, generator=generator)[: rows * length] + 1).view(rows, length)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("seen", ["tree", "causal"])
def test_rows_see_their_committed_tokens_and_their_own_ancestors(heads: int, kv_heads: int, seen: str) -> None:
    torch.manual_seed(heads * kv_heads)
    committed = torch.tensor([5, 0, 9, 1])
    rows, q, window = torch.tensor([2, 0, 4, 3]), 3, 6
    table = scattered(6, 20, 200)
    pool = KVPool(2, 200, (2, kv_heads, D), torch.float64, CPU)
    pool.kv.normal_()
    before = pool.kv.clone()
    visible = torch.ones(4, q, q).tril().bool() if seen == "causal" else torch.rand(4, q, q) < 0.5
    visible |= torch.eye(q, dtype=torch.bool)
    reach = reach_of(table_of(table), rows, committed, int(committed.max()), window, torch.float64)
    bias = causal_bias(q, torch.float64, CPU) if seen == "causal" else bias_of(visible, torch.float64)
    write = reach.window[:, :q].reshape(-1)
    attention = TorchAttention(pool, heads)
    attention.bind(AttentionPlan.of(write, window_group(reach, bias, slice(0, 4 * q))))
    queries = torch.randn(4 * q, heads, D, dtype=torch.float64)
    new = torch.randn(4 * q, 2, kv_heads, D, dtype=torch.float64)
    out = attention(1, queries, new)
    assert torch.equal(pool.kv[0], before[0]), "the other layer is not touched"
    untouched = torch.ones(200, dtype=torch.bool).index_fill_(0, write, False)
    assert torch.equal(pool.kv[1, untouched], before[1, untouched])
    for i in range(4):
        past = before[1, table[rows[i], : committed[i]]]
        own = new[i * q : (i + 1) * q]
        assert torch.equal(pool.kv[1, table[rows[i], committed[i] : committed[i] + q]], own)
        for j in range(q):
            expected = row_attention(queries[i * q + j], torch.cat([past, own[visible[i, j]]]), heads // kv_heads)
            assert torch.allclose(out[i * q + j], expected, atol=1e-12)


def test_groups_of_unequal_length_are_padded_and_unpadded() -> None:
    """Two requests of 2 and 4 rows in one group, after a group of one row."""
    torch.manual_seed(0)
    table = scattered(3, 12, 60)
    pool = KVPool(1, 60, (2, 2, D), torch.float64, CPU)
    pool.kv.normal_()
    before = pool.kv.clone()
    starts, lengths = torch.tensor([3, 0]), [2, 4]
    first = reach_of(table_of(table), torch.tensor([2]), torch.tensor([6]), 6, 1, torch.float64)
    padded = reach_of(table_of(table), torch.tensor([0, 1]), starts, 3, 4, torch.float64)
    rows = torch.tensor([1, 2, 1, 1, 3, 4, 5, 6])  # rows beyond a request's own repeat its first
    back = torch.tensor([0, 1, 4, 5, 6, 7])
    write = torch.cat([first.window.view(-1), table[0, 3:5], table[1, :4]])
    plan = AttentionPlan.of(
        write,
        window_group(first, causal_bias(1, torch.float64, CPU), slice(0, 1)),
        window_group(padded, causal_bias(4, torch.float64, CPU), rows, back),
    )
    attention = TorchAttention(pool, 4)
    attention.bind(plan)
    queries, new = torch.randn(7, 4, D, dtype=torch.float64), torch.randn(7, 2, 2, D, dtype=torch.float64)
    out = attention(0, queries, new)
    texts = [(2, 6, [0]), (0, 3, [1, 2]), (1, 0, [3, 4, 5, 6])]
    for row, start, own in texts:
        past = before[0, table[row, :start]]
        for j, at in enumerate(own):
            cells = torch.cat([past, new[own[0] : at + 1]])
            assert torch.allclose(out[at], row_attention(queries[at], cells, 2), atol=1e-12), (row, j)
    assert lengths == [len(own) for _, _, own in texts[1:]]


def test_a_batch_without_rows_attends_to_nothing() -> None:
    pool = KVPool(1, 8, (2, 2, D), torch.float64, CPU)
    attention = TorchAttention(pool, 4)
    none = torch.zeros(0, dtype=torch.int64)
    reach = reach_of(table_of(scattered(2, 4, 9)), none, none, 0, 3, torch.float64)
    attention.bind(AttentionPlan.of(none, window_group(reach, causal_bias(3, torch.float64, CPU), slice(0, 0))))
    out = attention(0, torch.zeros(0, 4, D, dtype=torch.float64), torch.zeros(0, 2, 2, D, dtype=torch.float64))
    assert out.shape == (0, 4 * D)


def test_a_window_at_the_end_of_the_table_stays_inside() -> None:
    """Padded rows of a short chunk may reach beyond the longest sequence; they read the chunk's own first slot."""
    table = scattered(2, 10, 40)
    written = torch.tensor([1, 6])
    reach = reach_of(table_of(table), torch.tensor([0, 1]), torch.tensor([9, 0]), 9, 6, torch.float64)
    reach = partly_written(reach, written)
    assert reach.window.shape == (2, 6)
    assert reach.window[0].tolist() == [int(table[0, 9])] * 6
    assert torch.equal(reach.window[1], table[1, :6])
    assert reach.bias[1].isinf().all() and not reach.bias[0].any()
    assert (reach.prefix[1] == table[1, 0]).all(), "beyond its own count a request reads what it writes itself"


@pytest.mark.parametrize("q", [1, 5])
def test_slots_that_follow_one_another_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch, q: int) -> None:
    """The slice equals its twin, the gather; the chunk's own rows are read after they are written."""
    torch.manual_seed(q)
    table = (torch.arange(40) + 7).view(1, 40)
    reach = reach_of(table_of(table), torch.tensor([0]), torch.tensor([23]), 23, q, torch.float32)
    group = window_group(reach, causal_bias(q, torch.float32, CPU), slice(0, q))
    plan = AttentionPlan.of(reach.window.view(-1), group)
    queries, new = torch.randn(q, 4, D), torch.randn(q, 2, 2, D)
    start = torch.randn(1, 60, 2, 2, D)

    def attend() -> Tensor:
        pool = KVPool(1, 60, (2, 2, D), torch.float32, CPU)
        pool.kv.copy_(start)
        attention = TorchAttention(pool, 4)
        attention.bind(plan)
        return attention(0, queries, new)

    assert run_of(group.slots) == slice(7, 7 + 23 + q)
    fast = attend()
    monkeypatch.setattr(torch_backend, "run_of", lambda slots: slots.reshape(-1))
    assert torch.allclose(fast, attend(), atol=1e-6)


@pytest.mark.parametrize("slots", [[[4, 5, 7, 8]], [[4, 6, 5, 7]], [[5, 4, 3]], [[1, 2], [3, 4]], [[0, 0]], [[]]])
def test_other_slots_are_gathered(slots: list[list[int]]) -> None:
    index = run_of(torch.tensor(slots, dtype=torch.int64))
    assert isinstance(index, Tensor) and index.tolist() == [slot for row in slots for slot in row]
