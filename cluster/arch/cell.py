"""The layout of a cell (the K and V of one token in one layer) in an FP8 KV cache: codes, and their scales.

The numbers of a cell are divided into groups. In an ordinary cell, each KV head has two groups: its k and its v. A
latent cell has two groups: the latent, and the rotated key after it.

Each group has its own scale, computed when the cell is stored. The scale is the smallest power of two 2^e, with e from
-117 to 119, for which no number of the group, divided by the scale, exceeds 448, the largest float8_e4m3fn. A code is
the number divided by the scale, rounded to the nearest e4m3, ties to even. Dividing and multiplying by a power of two
is exact, so every kernel reads the same values back, in every dtype and every order of operations.
"""

from dataclasses import dataclass

CACHE_LINE_BYTES = 64  # a head's codes should not span more lines than necessary
ALIGNMENT_BYTES = 16  # a GPU can then load many codes at once from any slot


@dataclass(frozen=True, slots=True)
class CodedCell:
    """A cell of `shape` [2 (k and v), KV heads, d] or, if it is a latent cell, [1, 1, d]. In FP8 it has all codes in
    order, then one scale byte per group (e + 127), then zero padding.

    A cell is padded to a multiple of `CACHE_LINE_BYTES` or, if that would add more than a sixteenth to the cell, of
    `ALIGNMENT_BYTES`. The first `latent` numbers of a latent cell are the latent; `latent` is None for other cells.
    """

    shape: tuple[int, int, int]
    latent: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers a cell holds."""
        parts, heads, size = self.shape
        return parts * heads * size

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The groups in order, as pairs (number of groups of one size, numbers in each of them)."""
        parts, heads, size = self.shape
        if self.latent is None:
            return ((parts * heads, size),)
        return ((1, self.latent), (1, size - self.latent)) if self.latent < size else ((1, size),)

    @property
    def nbytes(self) -> int:
        """Size of a cell in bytes."""
        unpadded_bytes = self.numbers + sum(count for count, _ in self.groups)
        line_padded_bytes = -(-unpadded_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return (
            line_padded_bytes
            if 16 * (line_padded_bytes - unpadded_bytes) <= unpadded_bytes
            else -(-unpadded_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        )
