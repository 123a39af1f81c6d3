"""The shape of the attention of the layers in one KV pool, which the constructors of all backends take."""

from collections.abc import Sequence
from typing import NamedTuple

from cluster.kv.pool import KVPool


class AttentionShape(NamedTuple):
    """Attention with `heads` query heads. `sliding_windows` has for each layer the number of tokens that a row sees,
    itself included; None means all. A negative number -c cuts the text into chunks of c tokens, and a row sees the
    tokens of its own chunk. If it is empty, all rows see all tokens. Scores are multiplied by `scale` (None: d ** -0.5,
    where d is the width of a key). The widths of keys and values are those of the pool's `Cell`.
    """

    heads: int
    sliding_windows: Sequence[int | None] = ()
    scale: float | None = None

    def with_defaults(self, pool: KVPool) -> tuple[int, tuple[int | None, ...], float]:
        """Return heads, sliding windows and scale for `pool`, with the defaults filled in."""
        windows = tuple(self.sliding_windows) or (None,) * pool.layers
        return self.heads, windows, pool.cell.key_dim**-0.5 if self.scale is None else self.scale
