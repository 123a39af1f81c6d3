"""Rotary embeddings: tables of cos and sin, and the permutation that turns rope over neighbouring pairs into rope over
the two halves of a head.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.arch import LayerGeometry, Rope
from cluster.config import ConfigError
from cluster.kernels.interface import Angles
from cluster.kv.pool import zeros
from cluster.models.arithmetic import concat

INITIAL_ROWS = 16384  # rows of a table that are computed at the start
ROWS_PER_EXTENSION = 1024  # rows computed at a time when a request needs more; a step waits for them


def frequencies(rope: Rope, dim: int) -> Tensor:
    """Return the radians per position of the `dim / 2` pairs, float64 `[dim / 2]`, scaled as `rope` says.

    llama3, as in the Llama 3.1 release, divides frequencies of long wavelengths by `factor`, and blends those in the
    band between its two frequency factors. In YaRN (arXiv 2309.00071) the band lies between the dimensions that turn
    `beta_fast` and `beta_slow` times over the original length. Dynamic scaling has no effect here: callers use
    `dynamic_frequencies` for positions beyond its original length.
    """
    inverse = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    inverse[int(rope.proportional * dim // 2) :] = 0
    if rope.llama3 is not None:
        factor, low, high, length = rope.llama3
        wavelength = 2 * math.pi / inverse
        blend = ((length / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * inverse / factor + blend * inverse
    if rope.yarn is not None:
        yarn = rope.yarn
        first, last = (
            dim * math.log(yarn.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
            for rotations in (yarn.beta_fast, yarn.beta_slow)
        )
        if yarn.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 * (first == last)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
        return ramp * inverse / yarn.factor + (1 - ramp) * inverse
    return inverse / rope.linear


def dynamic_frequencies(rope: Rope, dim: int, positions: Tensor) -> Tensor:
    """Return the radians per position of the `dim / 2` pairs at each of `positions` `[T]`, float64 `[T, dim / 2]`.

    This is the dynamic NTK scaling of `transformers`, in which the base grows with the length of the text. Here the
    length that counts for a position is that of the text up to this position, so that cached keys stay valid when more
    tokens follow.
    """
    assert rope.dynamic is not None
    factor, length = rope.dynamic
    text_lengths = (positions + 1).clamp(min=length).double()
    base = rope.theta * (factor * text_lengths / length - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / base[:, None] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


class RotaryTable:
    """Tables of cos and signed sin for P positions, `[P, 1, d]` each; see `Angles`. d dimensions of a head are rotated.

    The table is allocated for all P positions that may ever be served, so that its address never changes and captured
    programs can read it. Rows after the first `INITIAL_ROWS` are computed when `prepare_positions` asks for them. On a
    CPU, rows that were never written take no physical memory.
    """

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate a table of `positions` rows for `head_dim` rotated dimensions, and compute the first `INITIAL_ROWS`
        rows.

        Raises:
            ConfigError: the system does not grant the address space.
        """
        self._rope, self._dim, self._positions, self._computed_rows = rope, head_dim, positions, 0
        try:
            self._cos, self._sin = (zeros((positions, 1, head_dim), dtype, device) for _ in range(2))
        except MemoryError:
            raise ConfigError(
                f"this machine has no room for rotary tables of {positions} positions; lower context_length"
            ) from None
        if device.type != "meta":
            self.prepare_positions(INITIAL_ROWS)

    def prepare_positions(self, positions: int) -> None:
        """Compute the table's rows for positions below `positions`, if missing. The host calls this before a step."""
        while self._computed_rows < min(positions, self._positions):
            start, stop = self._computed_rows, min(self._computed_rows + ROWS_PER_EXTENSION, self._positions)
            cos, sin = self._rows(start, stop)
            self._cos[start:stop, 0].copy_(torch.cat([cos, cos], -1))
            self._sin[start:stop, 0].copy_(torch.cat([-sin, sin], -1))
            self._computed_rows = stop

    def angles_at(self, positions: Tensor) -> Angles:
        """Return cos and sin for rows at `positions` `[T]`."""
        return Angles(self._cos.index_select(0, positions), self._sin.index_select(0, positions))

    def _rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions `start` to `stop - 1`, `[stop - start, d / 2]` each, in at least float32."""
        rope, positions = self._rope, torch.arange(start, stop)
        is_dynamic = rope.dynamic is not None and stop > rope.dynamic[1]
        inverse = dynamic_frequencies(rope, self._dim, positions) if is_dynamic else frequencies(rope, self._dim)
        if self._cos.dtype != torch.float64:
            inverse = inverse.float()
        angle = positions[:, None].to(inverse.dtype) * inverse
        magnitude = 1.0 if rope.yarn is None else rope.yarn.attention_factor
        return angle.cos() * magnitude, angle.sin() * magnitude


class RotaryTables:
    """The rotary tables of a model's layers: one for each rope and width that its layers have."""

    def __init__(
        self, layers: Sequence[LayerGeometry], positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate tables of `positions` rows; see `RotaryTable`."""
        ropes = list(dict.fromkeys((layer.rope, layer.rope_dim) for layer in layers))
        self._tables = [RotaryTable(*rope, positions, dtype, device) for rope in ropes]
        self._table_of = [ropes.index((layer.rope, layer.rope_dim)) for layer in layers]

    def prepare_positions(self, positions: int) -> None:
        """Prepare all tables for positions below `positions`. The host calls this before a step."""
        for table in self._tables:
            table.prepare_positions(positions)

    def angles_at(self, positions: Tensor) -> list[Angles]:
        """Return for each layer cos and sin for rows at `positions` `[T]`."""
        angles = [table.angles_at(positions) for table in self._tables]
        return [angles[index] for index in self._table_of]


def half_split(weight: Tensor, heads: int, num_rotated: int | None = None) -> Tensor:
    """Permute the weight rows `[n * d, ..]` of n = `heads` heads from rope over neighbouring pairs to rope over the two
    halves of a head (the half-split layout).

    Only the last `num_rotated` rows of each head are permuted (None: all). Attention scores do not change, because
    callers permute q and k in the same way.
    """
    # Of the rotated rows: (0, 1, 2, 3, ..) -> (0, 2, 4, .., 1, 3, 5, ..).
    per_head = weight.view(heads, -1, *weight.shape[1:])
    num_unrotated = 0 if num_rotated is None else per_head.shape[1] - num_rotated
    rotated_rows = per_head[:, num_unrotated:]
    return concat([per_head[:, :num_unrotated], rotated_rows[:, 0::2], rotated_rows[:, 1::2]], 1).reshape(weight.shape)
