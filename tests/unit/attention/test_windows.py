"""Windows, sinks and latents: the primitive against one softmax per row, and full attention unchanged by them."""

import pytest
import torch
from torch import Tensor

from cluster.attention.plan import bias_of, causal_bias, reach_of, slid, window_group
from cluster.attention.torch_backend import TorchAttention
from cluster.batch import AttentionPlan
from cluster.kv.pool import KVPool
from tests.tables import table_of

CPU = torch.device("cpu")
D = 8
# A tree whose nodes come in order of depth: 0 -> 1, 2; 1 -> 3; 3 -> 4; 2 -> 5.
PARENTS = [-1, 0, 0, 1, 3, 2]


def ancestors() -> Tensor:
    seen = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def softmax_row(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """q `[nh, d]`, k `[L, nkv, d]`, v `[L, nkv, dv]` -> `[nh * dv]`, in plain exponentials."""
    out, repeat = [], q.shape[0] // k.shape[1]
    for head in range(q.shape[0]):
        weights = (scale * (k[:, head // repeat] @ q[head])).exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        out.append((weights[:, None] * v[:, head // repeat]).sum(0) / total)
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_a_row_of_a_tree_sees_the_last_tokens_of_its_own_path(window: int | None, sunk: bool, latent: bool) -> None:
    torch.manual_seed(window or 0)
    heads, kv_heads, parts, values = (4, 1, 1, 5) if latent else (4, 2, 2, D)
    committed, nodes = torch.tensor([6, 0, 2]), len(PARENTS)
    pool = KVPool(2, 90, (parts, kv_heads, D), torch.float64, CPU)
    pool.kv.normal_()
    before = pool.kv.clone()
    table = (torch.randperm(89) + 1)[:60].view(3, 20)
    reach = reach_of(table_of(table), torch.tensor([2, 0, 1]), committed, 6, nodes, torch.float64)
    seen = ancestors().expand(3, -1, -1)
    own = window_group(reach, bias_of(seen, torch.float64), slice(0, 3 * nodes))
    write = reach.window.reshape(-1)
    attention = TorchAttention(pool, heads, (None, window), 0.3, values)
    attention.bind(AttentionPlan.of(write, own))
    q = torch.randn(3 * nodes, heads, D, dtype=torch.float64)
    new = torch.randn(3 * nodes, parts, kv_heads, D, dtype=torch.float64)
    sinks = torch.randn(heads, dtype=torch.float64) if sunk else None
    out = attention(1, q, new, sinks)
    for i, row in enumerate((2, 0, 1)):
        past = before[1, table[row, : committed[i]]]
        for node in range(nodes):
            cells = torch.cat([past, new[i * nodes : (i + 1) * nodes][seen[i, node]]])[-(window or 1000) :]
            expected = softmax_row(q[i * nodes + node], cells[:, 0], cells[:, -1, :, :values], 0.3, sinks)
            assert torch.allclose(out[i * nodes + node], expected, atol=1e-12), (i, node)


def test_other_layers_keep_the_whole_text() -> None:
    torch.manual_seed(1)
    pools = [KVPool(2, 30, (2, 2, D), torch.float64, CPU) for _ in range(2)]
    for pool in pools:
        pool.kv.copy_(torch.ones_like(pool.kv).cumsum(1).sin())
    plain, mixed = TorchAttention(pools[0], 4), TorchAttention(pools[1], 4, (3, None))
    reach = reach_of(table_of(torch.arange(1, 21)[None]), torch.tensor([0]), torch.tensor([9]), 9, 4, torch.float64)
    plan = AttentionPlan.of(reach.window.view(-1), window_group(reach, causal_bias(4, torch.float64, CPU), slice(0, 4)))
    q, kv = torch.randn(4, 4, D, dtype=torch.float64), torch.randn(4, 2, 2, D, dtype=torch.float64)
    for attention in (plain, mixed):
        attention.bind(plan)
    assert torch.equal(plain(1, q, kv), mixed(1, q, kv))
    assert not torch.allclose(plain(0, q, kv), mixed(0, q, kv))


def test_a_window_counts_what_is_visible_from_the_end() -> None:
    hidden = float("-inf")
    bias = torch.tensor([[[0, 0, 0, hidden, 0, hidden, 0], [0, hidden, hidden, hidden, 0, 0, hidden]]])
    narrow = slid(bias, 2)
    assert (narrow == 0).tolist() == [
        [[False, False, False, False, True, False, True], [False, False, False, False, True, True, False]]
    ]
    assert torch.equal(slid(bias, 7), bias)
