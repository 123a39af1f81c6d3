"""In which KV pool each layer of a model is: which layers share a pool, and which are in window pools, which keep only
the last tokens of each request.

A layer is in a window pool if a request of the full context needs fewer pages there than in the other pools. All window
pools of a rank have the same pages, those that the widest of these windows needs.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.arch.layer import LayerGeometry
from cluster.config.resolved import ResolvedSettings
from cluster.config.speculation import MISSED_TOKENS


class WindowLayout(NamedTuple):
    """Layers with a sliding window of at most `window` tokens are in window pools. Rows that may still be computed see
    at most the last `reach` committed tokens of a request, which needs at most `request_pages` pages there, apart from
    the prompt rows of a step. The next steps write at most `written` tokens behind the committed ones.
    """

    window: int
    reach: int
    request_pages: int
    written: int

    def holds(self, layer: LayerGeometry) -> bool:
        """Return whether `layer` is in a window pool."""
        return layer.sliding_window is not None and layer.sliding_window <= self.window


def window_layout(
    layers: Iterable[LayerGeometry], settings: ResolvedSettings, context_length: int, drafts: int, steps_ahead: int
) -> WindowLayout | None:
    """Return which of the `layers` of a rank, those of all its models, are in window pools, or None if none is. There
    are `drafts` draft runners. The host runs `steps_ahead` steps ahead of the device.
    """
    page_size, shape = settings.settings.page_size, settings.forced_shape
    for window in sorted({layer.sliding_window for layer in layers if layer.sliding_window}, reverse=True):
        # Rows that were read before may be read again: by a draft that wakes, or by the later runners of a multi-layer
        # draft, in which the KV of a token depends on the tokens after it.
        reach = window - 1 + max(MISSED_TOKENS, drafts)
        written = (1 + steps_ahead) * (shape.num_steps + 1) + shape.window
        # A request has one page at each end that other tokens share.
        request_pages = -(-(reach + written) // page_size) + 2
        if request_pages * page_size < context_length:
            return WindowLayout(window, reach, request_pages, written)
    return None


class PoolLayers(NamedTuple):
    """The `layers` of a model that are in one KV pool, in ascending order. `windowed`: it is a window pool."""

    windowed: bool
    layers: list[int]


def pool_layers(layers: Sequence[LayerGeometry], is_windowed: Sequence[bool]) -> list[PoolLayers]:
    """Return the pools of a model, in order of their first layers. Layer i is in a window pool if `is_windowed[i]`.
    Layers of one pool also have the same cells, heads and scale. Layers that borrow are in no pool.
    """
    pools = dict[tuple[object, ...], PoolLayers]()
    for index, (layer, windowed) in enumerate(zip(layers, is_windowed, strict=True)):
        if layer.borrows is not None:
            continue
        key = windowed, layer.cell, layer.heads, layer.scale
        pools.setdefault(key, PoolLayers(windowed, [])).layers.append(index)
    return list(pools.values())
