"""Compact: the accepted path's KV rows move to the front of the window (upstream: SGLang #26997)."""

import torch
from torch import Tensor

from cluster.attention.plan import window_slots
from cluster.kv.pool import KVPool


def compact(pool: KVPool, table: Tensor, rows: Tensor, seq_lens: Tensor, path: Tensor) -> None:
    """Move the KV of node `path[r, j]` to index `seq_lens[r] + j` in every layer; `path` is `[R, S + 1]`.

    Fixed size, so no host sync: entries beyond the accepted path copy the root onto slots that the next step rewrites.
    """
    source = table[rows[:, None], seq_lens[:, None] + path]
    front = window_slots(table, rows, seq_lens, path.shape[1])
    root = torch.arange(path.shape[1], device=path.device) > 0
    source = torch.where((path > 0) | ~root, source, front)
    pool.move_kv_cache(front.reshape(-1), source.reshape(-1))
