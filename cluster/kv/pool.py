"""KV memory of one model runner."""

import torch
from torch import Tensor


class KVPool:
    """`kv[layer, slot]` is a cell `[2, nkv, d]`: k and v side by side, so that one row moves or is gathered at a time.

    Of latent attention a cell is `[1, 1, d]`.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: int = 2,
    ) -> None:
        """`slots` counts the sink page too. Zeros are no requirement: nothing is read that was not written."""
        self.kv = torch.zeros(layers, slots, parts, kv_heads, head_dim, dtype=dtype, device=device)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy slot `source[i]` onto `destination[i]` in every layer; all sources are read before any is written."""
        self.kv.index_copy_(1, destination, self.kv.index_select(1, source))


def slot_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, parts: int = 2) -> int:
    """Bytes that one token costs in a pool."""
    return layers * parts * kv_heads * head_dim * dtype.itemsize
