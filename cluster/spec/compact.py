"""Compact: the accepted path's KV rows move to the front of the window (upstream: SGLang #26997)."""

import torch
from torch import Tensor

from cluster.kv.pool import KVPool


def compact(pool: KVPool, window: Tensor, path: Tensor) -> None:
    """Move the KV of node `path[r, j]` from `window[r, path[r, j]]` to `window[r, j]` in every layer.

    `window` `[R, W]` are pool slots, `path` `[R, S + 1]` node numbers from the root, 0 beyond the accepted path. Fixed
    size, so no host sync: what lies beyond the path stays in place.
    """
    width = path.shape[1]
    own = torch.arange(width, device=path.device)
    source = window.gather(1, torch.where(path > 0, path, own))
    pool.move_kv_cache(window[:, :width], source)
