"""The shape of the attention of one model, which the constructors of all backends take."""

from collections.abc import Sequence
from typing import NamedTuple

from cluster.kv.pool import KVPool


class AttentionShape(NamedTuple):
    """Attention with `heads` query heads. `sliding_windows` has for each layer the number of tokens that a row sees,
    itself included; None means all. If it is empty, no layer has a sliding window.

    Scores are multiplied by `scale` (None: d ** -0.5, where d is the width of a key). The cells of a pool have two
    parts, key and value, or one part, which is a latent (MLA). The first `value_dim` numbers of a latent are its value.
    If `value_dim` is None, values are as wide as keys.
    """

    heads: int
    sliding_windows: Sequence[int | None] = ()
    scale: float | None = None
    value_dim: int | None = None

    def with_defaults(self, pool: KVPool) -> tuple[int, tuple[int | None, ...], float, int]:
        """Return heads, sliding windows, scale and value width for `pool`, with the defaults filled in."""
        key_dim = pool.cell[2]
        windows = tuple(self.sliding_windows) or (None,) * pool.layers
        scale = key_dim**-0.5 if self.scale is None else self.scale
        return self.heads, windows, scale, key_dim if self.value_dim is None else self.value_dim
