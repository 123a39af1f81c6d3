"""The attention primitive in plain torch: the reference for every other backend, and the CPU default.

No value that a row may not see affects it, not even NaN. Memory of other requests is not read (`reach_of`), and k and v
of its own request that are not finite never enter the pool (`kept_out`).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.attention.plan import slid
from cluster.batch import AttentionPlan, Group
from cluster.kv.pool import KVPool


def run_of(slots: Tensor) -> slice | Tensor:
    """How the pool is read at `slots` `[R, L]`: by an index `[R * L]`, or by a slice, which copies nothing.

    A slice takes one request with consecutive slots. A GPU always uses the index: testing would force a sync.
    """
    flat = slots.reshape(-1)
    if slots.shape[0] == 1 and flat.shape[0] and flat.device.type == "cpu":
        first = int(flat[0])
        if int(flat[-1]) - first == flat.shape[0] - 1 and bool((flat[1:] - flat[:-1] == 1).all()):
            return slice(first, first + flat.shape[0])
    return flat


def kept_out(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """`q` and `kv` with zeros in place of every cell that is not finite, and NaN in place of its row's query.

    The row that overflowed has NaN as its own output, but its cell is harmless to rows that mask it, for which
    attention multiplies it by 0: a tree node cannot spoil its siblings, nor a draft its own later steps.
    """
    if kv.is_cpu and math.isfinite(kv.sum().item()):  # on a GPU this test would force a sync
        return q, kv
    bad = ~kv.isfinite().flatten(1).all(1)
    return q.masked_fill(bad[:, None, None], math.nan), kv.masked_fill(bad[:, None, None, None], 0)


class TorchAttention:
    """Attends over one runner's pool. Bound to the pool at construction: a batch never carries a pool."""

    def __init__(
        self,
        pool: KVPool,
        heads: int,
        sliding_windows: Sequence[int | None] = (),
        scale: float | None = None,
        value_dim: int | None = None,
    ) -> None:
        """`sliding_windows` say per layer how many tokens a row sees (None, or no entry: all).

        `scale` None is d ** -0.5. A pool whose cells have one part holds latents; the first `value_dim` numbers of each
        are its values.
        """
        self._pool, self._heads = pool, heads
        self._kv_heads, self._head_dim = pool.kv.shape[-2:]
        self._sliding_windows = {layer: width for layer, width in enumerate(sliding_windows) if width is not None}
        self._scale, self._value_dim = scale, self._head_dim if value_dim is None else value_dim
        self._plan: AttentionPlan | None = None
        self._biases: dict[int | None, list[Tensor]] = {}
        self._reads: list[slice | Tensor] = []

    def bind(self, plan: AttentionPlan) -> None:
        """Use `plan` for the calls of the next forward; what all layers share is computed once, here."""
        repeat = self._heads // self._kv_heads
        self._plan = plan
        self._reads = [run_of(group.slots) for group in plan.groups]
        self._biases = {None: [group.bias.repeat(1, repeat, 1)[:, None] for group in plan.groups]}
        for width in set(self._sliding_windows.values()):
            narrow = [slid(group.bias, width) for group in plan.groups]
            self._biases[width] = [bias.repeat(1, repeat, 1)[:, None] for bias in narrow]

    def __call__(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q `[T, nh, d]`, kv `[T, 2, nkv, d]` or `[T, 1, 1, d]` -> `[T, nh * dv]`; writes kv first."""
        assert self._plan is not None
        memory = self._pool.kv[layer]
        q, kv = kept_out(q, kv)
        memory.index_copy_(0, self._plan.write, kv)
        biases = self._biases[self._sliding_windows.get(layer)]
        parts = [
            self._group(
                memory[read] if isinstance(read, slice) else memory.index_select(0, read), q, group, bias, sinks
            )
            for group, read, bias in zip(self._plan.groups, self._reads, biases, strict=True)
        ]
        if not parts:
            return q.new_zeros(q.shape[0], self._heads * self._value_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _group(self, read: Tensor, q: Tensor, group: Group, bias: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of one group; the rep query heads of a kv head are rep * q rows of one matrix."""
        nkv, d, r, n = self._kv_heads, self._head_dim, group.requests, group.q_rows
        repeat = self._heads // nkv
        cells = read.view(r, -1, read.shape[1], nkv, d).permute(2, 0, 3, 1, 4)
        k, v = cells[0], cells[-1][..., : self._value_dim]
        rows = q[group.rows].view(r, n, nkv, repeat, d).permute(0, 2, 3, 1, 4).reshape(r, nkv, repeat * n, d)
        if sinks is None:
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=self._scale)
        else:
            out = with_sinks(rows, k, v, bias, sinks.view(1, nkv, repeat), self._scale or d**-0.5)
        out = out.view(r, nkv, repeat, n, -1).permute(0, 3, 1, 2, 4).reshape(r * n, self._heads * self._value_dim)
        return out if group.back is None else out.index_select(0, group.back)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attention whose softmax has one more logit per head, without a value (gpt-oss; arXiv 2309.17453).

    q `[R, nkv, rep * n, d]`, k `[R, nkv, L, d]`, v `[R, nkv, L, dv]`, bias `[R, 1, rep * n, L]`, sinks `[1, nkv, rep]`.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale).add_(bias)
    column = sinks.repeat_interleave(q.shape[2] // sinks.shape[2], 2)[..., None].expand(q.shape[0], -1, -1, 1)
    weights = torch.cat([scores, column.to(scores.dtype)], -1).softmax(-1)
    return torch.matmul(weights[..., :-1], v)
