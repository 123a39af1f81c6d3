"""KV memory of one model runner."""

import torch
from torch import Tensor


class KVPool:
    """`kv[layer, slot]` is `[2, nkv, d]`: k and v side by side, so that one row moves or is gathered at a time."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`slots` counts the sink page too. Zeroed, so that a masked read is always finite."""
        self.kv = torch.zeros(layers, slots, 2, kv_heads, head_dim, dtype=dtype, device=device)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy slot `source[i]` onto `destination[i]` in every layer; all sources are read before any is written."""
        self.kv.index_copy_(1, destination, self.kv.index_select(1, source))


def slot_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token costs in a pool."""
    return layers * 2 * kv_heads * head_dim * dtype.itemsize
