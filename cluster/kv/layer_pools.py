"""The KV pools of one model runner. Each of its layers is in one of them: a layer with a sliding window in a window
pool, if the rank has window pools, and any other layer in a pool that keeps every token. Layers with different cells
are in different pools.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.kv.pool import KVPool


class LayerPools:
    """The pools of a runner; a draft that reads the target's has none. `move_kv_cache` moves what all of them keep.
    `slots` is the number of slots of pools that keep every token, even if this runner has none. `dtype` is that of the
    numbers that attention reads.
    """

    def __init__(self, pools: Sequence[KVPool], slots: int, dtype: torch.dtype) -> None:
        self.all, self.slots, self.dtype = tuple(pools), slots, dtype

    @property
    def window_pools(self) -> list[KVPool]:
        """Those that are window pools."""
        return [pool for pool in self.all if pool.window_map is not None]

    @property
    def other_pools(self) -> list[KVPool]:
        """Those that keep every token."""
        return [pool for pool in self.all if pool.window_map is None]

    @property
    def nbytes(self) -> int:
        """The bytes that all pools take, with their sink pages."""
        return sum(pool.kv.nbytes for pool in self.all)

    def move_kv_cache(self, destination: Tensor, source: Tensor) -> None:
        """Copy cells from slot to slot in every layer; see `SlotMemory.move_kv_cache`."""
        for pool in self.all:
            pool.move_kv_cache(destination, source)
