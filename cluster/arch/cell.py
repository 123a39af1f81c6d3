"""How the entry of one token lies in a layer's KV cache in FP8: codes, and the scales that they need.

The numbers of a cell are cut into groups: the k of each KV head, and its v; of a latent cell the latent, and the
rotated key behind it. Each has a scale of its own, made of its own numbers when the cell is stored: the smallest power
of two 2^e, with e from -117 to 119, of which none of them is more than 448, the largest number of float8_e4m3fn. A code
is the number divided by the scale, rounded to the nearest e4m3, ties to even. As the scale is a power of two, dividing
and multiplying by it are exact: what is read back is the same in every dtype, whoever multiplies, in whatever order.
"""

from dataclasses import dataclass

LINE = 64  # bytes that a processor reads at once: a head's codes should not lie in one more of them than they must
ALIGNED = 16  # bytes: then a GPU may load many codes at once, whatever the slot


@dataclass(frozen=True, slots=True)
class CodedCell:
    """A cell of `shape` [parts, KV heads, d] in FP8: the codes of all its numbers in order, a byte for the scale of
    each group, in order, which is e + 127, and zeros up to whole `LINE` bytes, or where these would be more than a
    sixteenth of the cell, up to whole `ALIGNED` ones.

    A cell of one part is a latent one; the first `latent` of its numbers are the latent.
    """

    shape: tuple[int, int, int]
    latent: int | None = None

    @property
    def numbers(self) -> int:
        """How many there are."""
        parts, heads, size = self.shape
        return parts * heads * size

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Groups in order, as (how many of them, how many numbers each has)."""
        parts, heads, size = self.shape
        if self.latent is None:
            return ((parts * heads, size),)
        return ((1, self.latent), (1, size - self.latent)) if self.latent < size else ((1, size),)

    @property
    def nbytes(self) -> int:
        """Bytes of a cell."""
        taken = self.numbers + sum(count for count, _ in self.groups)
        lines = -(-taken // LINE) * LINE
        return lines if 16 * (lines - taken) <= taken else -(-taken // ALIGNED) * ALIGNED
