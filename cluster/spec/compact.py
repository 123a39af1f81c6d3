"""Compact: move the KV of the accepted path to the front of the window (upstream: SGLang #26997).

A request's window is its KV slots from position seq_len on. The target's forward writes the KV of tree node i to window
slot i. After compact, slot j holds the KV of the accepted token at position seq_len + j.
"""

import torch
from torch import Tensor

from cluster.kv.pool import SlotMemory


def compact(pools: SlotMemory, window: Tensor, path: Tensor) -> None:
    """Copy the KV of node `path[r, j]` from slot `window[r, path[r, j]]` to slot `window[r, j]`, in every layer.

    `window` `[R, W]` are pool slots; `path` `[R, S + 1]` are node numbers from the root on, 0 beyond the accepted path.
    """
    width = path.shape[1]
    window_positions = torch.arange(width, device=path.device)
    # Parents come before their children, so path[r, j] >= j on the path. Beyond it, the maximum is j: source =
    # destination. So S + 1 rows are always copied, and the host need not know accept_len.
    # Sources and destinations overlap; `move_kv_cache` reads all sources before it writes.
    source_slots = window.gather(1, torch.maximum(path, window_positions))
    pools.move_kv_cache(window[:, :width], source_slots)
