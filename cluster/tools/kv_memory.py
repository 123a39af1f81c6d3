"""The KV memory of a rank, from the layers of its models. Does not import torch."""

from collections.abc import Sequence

from cluster.arch.dtypes import COMPUTE_DTYPE_BYTES
from cluster.arch.layer import LayerGeometry
from cluster.arch.windows import window_layout
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings


def cell_bytes(layer: LayerGeometry, kv_dtype: str) -> int:
    """Return the bytes of a token in one layer. `kv_dtype` is a compute dtype, or an FP8 format."""
    if kv_dtype in COMPUTE_DTYPE_BYTES:
        return layer.cell.numbers * COMPUTE_DTYPE_BYTES[kv_dtype]
    return layer.cell.fp8_bytes


def kv_memory(
    runners: Sequence[Sequence[LayerGeometry]], kv_dtype: str, max_position: int, device: str
) -> dict[str, int]:
    """Return the KV memory of models with these layers of each runner, the target's first, on one rank.

    `kv_bytes_per_token` counts the layers that keep every token, `kv_window_bytes_per_token` those in window pools. A
    request of the full context has at most `kv_window_request_tokens` tokens there. The page size and the shape of the
    trees, of which this number depends a little, are the defaults.
    """
    layers, drafts = [layer for layers in runners for layer in layers], len(runners) - 1
    settings = EngineConfig.from_kwargs({"model_path": "", "speculative_algorithm": "NGRAM" if drafts else None})
    resolved, steps_ahead = ResolvedSettings.from_settings(settings), int(device == "cuda")
    layout = window_layout(layers, resolved, max_position, drafts, steps_ahead)
    in_window = [layer for layer in layers if layout is not None and layout.holds(layer)]
    window_bytes = sum(cell_bytes(layer, kv_dtype) for layer in in_window)
    return {
        "kv_bytes_per_token": sum(cell_bytes(layer, kv_dtype) for layer in layers) - window_bytes,
        "kv_window_bytes_per_token": window_bytes,
        "kv_window_request_tokens": 0 if layout is None else layout.request_pages * settings.page_size,
    }
