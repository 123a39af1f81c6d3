"""A pool and its attention for the layers of one runner."""

from collections.abc import Sequence

import torch

from cluster.arch import LayerGeometry
from cluster.attention.c_backend import CAttention
from cluster.attention.gather import Gather
from cluster.attention.torch_backend import TorchAttention
from cluster.kernels.library import Library
from cluster.kv.pool import KVPool, slot_bytes


def pool_bytes(layers: Sequence[LayerGeometry], dtype: torch.dtype) -> int:
    """Bytes that one token takes in the pool of `layers`."""
    return slot_bytes(len(layers), layers[0].cell, dtype)


def bind_attention(
    layers: Sequence[LayerGeometry], slots: int, dtype: torch.dtype, gather: Gather, library: Library | None = None
) -> tuple[KVPool, TorchAttention | CAttention]:
    """A pool of `slots` for `layers` (of one rank, all with the same cell), and the attention bound to it: by the
    `library` of C kernels, or by torch.
    """
    g = layers[0]
    pool = KVPool(len(layers), slots, g.cell, dtype, gather.device)
    windows = tuple(layer.sliding_window for layer in layers)
    if library is not None:
        return pool, CAttention(pool, gather.table, g.heads, windows, g.scale, g.value_dim, library)
    return pool, TorchAttention(pool, gather, g.heads, windows, g.scale, g.value_dim)
