"""The layout of a cell: what a KV pool keeps of one token in one layer.

An ordinary cell has the keys of all KV heads, then the values of all KV heads. Values may be narrower or wider than
keys. A latent cell (MLA) has one latent with the rotated key after it: all of it is the key of all heads, and the
latent is also their value.

In an FP8 KV cache, a cell holds codes and their scales. The numbers of a cell are divided into groups. In an ordinary
cell, each KV head has two groups: its k and its v. A latent cell has two groups: the latent, and the rotated key.

Each group has its own scale, computed when the cell is stored. The scale is the smallest power of two 2^e, with e from
-117 to 119, for which no number of the group, divided by the scale, exceeds 448, the largest float8_e4m3fn. A code is
the number divided by the scale, rounded to the nearest e4m3, ties to even. Dividing and multiplying by a power of two
is exact, so every kernel reads the same values back, in every dtype and every order of operations.
"""

from dataclasses import dataclass

CACHE_LINE_BYTES = 64  # a head's codes should not span more lines than necessary
ALIGNMENT_BYTES = 16  # a GPU can then load many codes at once from any slot


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of `kv_heads` keys of `key_dim` numbers and as many values of `value_dim` numbers. If `is_latent`, it is
    a single key of `key_dim` numbers, whose first `value_dim` numbers are the value.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a cell's numbers. A latent has the shape `[1, 1, d]`. Keys and values of the same width have
        `[2, nkv, d]`: the first index is 0 for keys and 1 for values. Keys and values of different widths have
        `[1, 1, numbers]`, with all keys before all values.
        """
        if not self.is_latent and self.key_dim == self.value_dim:
            return 2, self.kv_heads, self.key_dim
        return 1, 1, self.numbers

    @property
    def numbers(self) -> int:
        """How many numbers a cell holds."""
        return self.key_dim if self.is_latent else self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def values_offset(self) -> int:
        """How many numbers come before the value of the first head."""
        return 0 if self.is_latent else self.kv_heads * self.key_dim

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The groups in order, as pairs (number of groups of one size, numbers in each of them)."""
        if self.is_latent:
            rotated = self.key_dim - self.value_dim
            return ((1, self.value_dim), (1, rotated)) if rotated else ((1, self.key_dim),)
        if self.key_dim == self.value_dim:
            return ((2 * self.kv_heads, self.key_dim),)
        return (self.kv_heads, self.key_dim), (self.kv_heads, self.value_dim)

    @property
    def fp8_bytes(self) -> int:
        """Size of an FP8 cell in bytes. It has all codes in order, then one scale byte per group (e + 127), then zero
        padding to a multiple of `CACHE_LINE_BYTES` or, if that would add more than a sixteenth to the cell, of
        `ALIGNMENT_BYTES`.
        """
        unpadded_bytes = self.numbers + sum(count for count, _ in self.groups)
        line_padded_bytes = -(-unpadded_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return (
            line_padded_bytes
            if 16 * (line_padded_bytes - unpadded_bytes) <= unpadded_bytes
            else -(-unpadded_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        )
