"""The KV memory of a rank, from the layers of its models. Does not import torch."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from cluster.arch.dtypes import COMPUTE_DTYPE_BYTES
from cluster.arch.layer import LayerGeometry
from cluster.arch.windows import pool_layers, window_layout
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings

REQUEST_TOKENS = 1024, 8192, 32768, 131072
"""Lengths of requests whose memory is told, besides the longest."""


def cell_bytes(layer: LayerGeometry, kv_dtype: str) -> int:
    """Return how many bytes the KV cache uses for one token in `layer`: 0 if the layer reads the keys and values of
    another layer. `kv_dtype` is a compute dtype, or an FP8 format.
    """
    if layer.borrows is not None:
        return 0
    if kv_dtype in COMPUTE_DTYPE_BYTES:
        return layer.cell.numbers * COMPUTE_DTYPE_BYTES[kv_dtype]
    return layer.cell.fp8_bytes


def kv_memory(
    runners: Sequence[Sequence[LayerGeometry]], kv_dtype: str, max_position: int, device: str, buffer_bytes: int = 0
) -> dict[str, Any]:
    """Return the KV memory of models with these layers of each runner, the target's first, on one rank.

    `kv_bytes_per_token` counts the layers that keep every token, and `buffer_bytes` for the hidden states that a draft
    of several layers keeps of each token; `kv_window_bytes_per_token` counts the layers in window pools. A
    request of the full context has at most `kv_window_request_tokens` tokens there. `kv_pools` describes each pool.
    `kv_request_bytes` has the bytes that a request takes in all pools, by its number of tokens. The page size and the
    shape of the trees are the defaults; the figures of window pools depend on them a little.
    """
    layers, drafts = [layer for layers in runners for layer in layers], len(runners) - 1
    settings = EngineConfig.from_kwargs({"model_path": "", "speculative_algorithm": "NGRAM" if drafts else None})
    resolved, steps_ahead = ResolvedSettings.from_settings(settings), int(device == "cuda")
    layout, pools = window_layout(layers, resolved, max_position, drafts, steps_ahead), list[str]()
    bytes_per_token = {False: buffer_bytes, True: 0}
    for number, own_layers in enumerate(runners):
        name, lending = (f"draft {number - 1}", "the target's layer") if number else ("target", "layer")
        for windowed, indices in pool_layers(own_layers, [layout is not None and layout.holds(g) for g in own_layers]):
            first, token_bytes = own_layers[indices[0]], sum(cell_bytes(own_layers[i], kv_dtype) for i in indices)
            bytes_per_token[windowed] += token_bytes
            kept = "keeps only the last tokens" if windowed else "keeps all tokens"
            pools.append(
                f"{name}, layers {_ranges(indices)}: {_cell_text(first)}; {kept}; {token_bytes:,} bytes per token"
            )
        pools += [
            f"{name}, layers {_ranges(own)}: none, because they read the keys and values of {lending} {lender}"
            for lender, own in _borrowers(own_layers).items()
        ]
    page_size, window_tokens = settings.page_size, 0 if layout is None else layout.request_pages * settings.page_size
    request_bytes = {}
    for tokens in [*(count for count in REQUEST_TOKENS if count < max_position), max_position]:
        paged_tokens = -(-tokens // page_size) * page_size
        request_bytes[str(tokens)] = (
            paged_tokens * bytes_per_token[False] + min(paged_tokens, window_tokens) * bytes_per_token[True]
        )
    return {
        "kv_bytes_per_token": bytes_per_token[False],
        "kv_window_bytes_per_token": bytes_per_token[True],
        "kv_window_request_tokens": window_tokens,
        "kv_pools": pools,
        "kv_request_bytes": request_bytes,
    }


def _borrowers(layers: Sequence[LayerGeometry]) -> dict[int, list[int]]:
    """Return a dict from the number of a layer to the numbers of the layers that read its keys and values."""
    borrowers = dict[int, list[int]]()
    for index, layer in enumerate(layers):
        if layer.borrows is not None:
            borrowers.setdefault(layer.borrows, []).append(index)
    return borrowers


def _cell_text(layer: LayerGeometry) -> str:
    """Return what a cell of the layer holds, as text."""
    cell = layer.cell
    if cell.is_latent:
        return f"latents of {cell.key_dim} numbers"
    if cell.key_dim == cell.value_dim:
        return f"{cell.kv_heads} KV heads, K and V of {cell.key_dim} numbers"
    return f"{cell.kv_heads} KV heads, K of {cell.key_dim} and V of {cell.value_dim} numbers"


def _ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, such as "0, 5-11"."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in groups)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
