"""A pool and its attention for the layers of one runner."""

from collections.abc import Sequence

import torch

from cluster.arch import LayerGeometry
from cluster.attention.torch_backend import TorchAttention
from cluster.kv.pool import KVPool, slot_bytes


def pool_bytes(layers: Sequence[LayerGeometry], dtype: torch.dtype) -> int:
    """Bytes that one token costs in the pool of `layers`."""
    parts, kv_heads, head_dim = layers[0].cell
    return slot_bytes(len(layers), kv_heads, head_dim, dtype, parts)


def bind_attention(
    layers: Sequence[LayerGeometry], slots: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVPool, TorchAttention]:
    """A pool of `slots` for `layers` (of one rank, all with the same cell), and the attention bound to it."""
    g = layers[0]
    parts, kv_heads, head_dim = g.cell
    pool = KVPool(len(layers), slots, kv_heads, head_dim, dtype, device, parts)
    windows = tuple(layer.sliding_window for layer in layers)
    return pool, TorchAttention(pool, g.heads, kv_heads, head_dim, windows, g.scale, g.value_dim)
