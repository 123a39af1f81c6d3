"""The attention primitive in plain torch: the twin of every other backend, and the CPU default."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.batch import AttentionPlan, Group
from cluster.kv.pool import KVPool


def run_of(slots: Tensor) -> slice | Tensor:
    """How the pool is read at `slots` `[R, L]`: by an index `[R * L]`, or as a slice, which copies nothing, where a
    request is alone in its group and its slots follow one another. On a GPU asking would wait for the device.
    """
    flat = slots.reshape(-1)
    if slots.shape[0] == 1 and flat.shape[0] and flat.device.type == "cpu":
        first = int(flat[0])
        if int(flat[-1]) - first == flat.shape[0] - 1 and bool((flat[1:] - flat[:-1] == 1).all()):
            return slice(first, first + flat.shape[0])
    return flat


class TorchAttention:
    """Attends over one runner's pool. Bound to the pool at construction: a batch never carries a pool."""

    def __init__(self, pool: KVPool, heads: int, kv_heads: int, head_dim: int) -> None:
        self._pool, self._heads, self._kv_heads, self._head_dim = pool, heads, kv_heads, head_dim
        self._plan: AttentionPlan | None = None
        self._biases: list[Tensor] = []
        self._reads: list[slice | Tensor] = []

    def bind(self, plan: AttentionPlan) -> None:
        """Use `plan` for the calls of the next forward; what is equal in every layer is made once, here."""
        repeat = self._heads // self._kv_heads
        self._plan = plan
        self._reads = [run_of(group.slots) for group in plan.groups]
        self._biases = [group.bias.repeat(1, repeat, 1)[:, None] for group in plan.groups]

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """q `[T, nh, d]`, kv `[T, 2, nkv, d]` -> `[T, nh * d]`; writes kv first."""
        assert self._plan is not None
        memory = self._pool.kv[layer]
        memory.index_copy_(0, self._plan.write, kv)
        parts = [
            self._group(memory[read] if isinstance(read, slice) else memory.index_select(0, read), q, group, bias)
            for group, read, bias in zip(self._plan.groups, self._reads, self._biases, strict=True)
        ]
        if not parts:
            return q.new_zeros(q.shape[0], self._heads * self._head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _group(self, read: Tensor, q: Tensor, group: Group, bias: Tensor) -> Tensor:
        """Attention of one group; the rep query heads of a kv head are rep * q rows of one matrix."""
        nkv, d, r, n = self._kv_heads, self._head_dim, group.requests, group.q_rows
        repeat = self._heads // nkv
        k, v = read.view(r, -1, 2, nkv, d).permute(2, 0, 3, 1, 4).unbind(0)
        rows = q[group.rows].view(r, n, nkv, repeat, d).permute(0, 2, 3, 1, 4).reshape(r, nkv, repeat * n, d)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias)
        out = out.view(r, nkv, repeat, n, d).permute(0, 3, 1, 2, 4).reshape(r * n, self._heads * d)
        return out if group.back is None else out.index_select(0, group.back)
