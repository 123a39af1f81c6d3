"""Creation of the KV pool of one runner, and of the attention backend bound to it."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cluster.arch import LayerGeometry
from cluster.attention.c_backend import CAttention
from cluster.attention.gather import Gather
from cluster.attention.torch_backend import TorchAttention
from cluster.kernels.interface import Kernels
from cluster.kv.pool import KVPool, slot_bytes

if TYPE_CHECKING:
    from cluster.attention.flashinfer.backend import FlashInferAttention
    from cluster.attention.triton_backend import TritonAttention


def pool_bytes(layers: Sequence[LayerGeometry], dtype: torch.dtype, fp8: bool) -> int:
    """Return the bytes of one token in the pool of `layers`, in FP8 or in `dtype`."""
    return slot_bytes(len(layers), layers[0].cell, dtype, layers[0].coded_cell if fp8 else None)


def bind_attention(
    layers: Sequence[LayerGeometry], slots: int, dtype: torch.dtype, gather: Gather, kernels: Kernels, fp8: bool = False
) -> tuple[KVPool, "TorchAttention | CAttention | TritonAttention | FlashInferAttention"]:
    """Return a pool of `slots` slots for `layers`, and the attention bound to it, of the same backend as `kernels`.

    `layers` are those of one rank, all with the same cell shape. `dtype` is the dtype of queries, and of cells unless
    `fp8`.
    """
    g = layers[0]
    room = len(layers), slots, g.cell, dtype, gather.device, g.coded_cell if fp8 else None
    how = g.heads, tuple(layer.sliding_window for layer in layers), g.scale, g.value_dim
    if kernels.name in ("triton", "flashinfer"):  # imported here, as Triton takes a second to load
        made: KVPool = importlib.import_module("cluster.kv.triton_pool").TritonPool(*room)
        if kernels.flashinfer is not None:
            attention = importlib.import_module("cluster.attention.flashinfer.backend").FlashInferAttention
            shares = [kernels.flashinfer.share(layer) for layer in layers]
            return made, attention(made, gather.table, *how, kernels.flashinfer, shares)
        attention = importlib.import_module("cluster.attention.triton_backend").TritonAttention
        return made, attention(made, gather.table, *how)
    pool = KVPool(*room)
    if kernels.library is not None:
        return pool, CAttention(pool, gather.table, *how, kernels.library)
    return pool, TorchAttention(pool, gather, *how)
