"""Keyed Gumbel noise: a pure function of (request seed, token position, token id), made where it is needed (law 1).

Argmax of logits + Gumbel noise is a draw from the softmax (the Gumbel-max trick), and the same key gives the same draw
whichever way a token is reached. Legend: B requests, n positions, V token ids.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cluster.sampling.row_blocks import blocks

KEPT = 1 << 22  # numbers of noise up to which all are made at once; where there are more, each when it is needed


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


GOLDEN_32, MIX_A, MIX_B = (_signed(v, 32) for v in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
GOLDEN_64, MIX_C, MIX_D = (_signed(v, 64) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix_(x: Tensor, between: Tensor | int = 0) -> Tensor:
    """MurmurHash3's 32-bit finaliser, in place on int32 (Appleby, public domain); shifts are made logical by masks.

    `between` is XORed in after the first of its two rounds.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(MIX_A).bitwise_xor_(between)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(MIX_B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _mix_64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (Steele, Lea, Flood 2014): every bit of x changes half of the result's."""
    x = (x ^ (x >> 30).bitwise_and_((1 << 34) - 1)).mul_(MIX_C)
    x = x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(MIX_D)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """64-bit keys `[B, n]`: the numbers at `positions` `[B, n]` of one SplitMix64 generator for each of `seeds` `[B]`.

    Seeds are mixed first, so that a seed and a position with the same sum as another pair have another key.
    """
    return _mix_64(_mix_64(seeds + GOLDEN_64)[:, None] + positions * GOLDEN_64)


def keys_along(seeds: Tensor, first: Tensor, count: int) -> Tensor:
    """The keys `[B, count]` of positions `first` `[B]` and the next ones, for each of `seeds` `[B]`."""
    return noise_keys(seeds, first[:, None] + torch.arange(count, device=first.device))


def token_hashes(ids: Tensor) -> Tensor:
    """What noise takes from token `ids` `[V]`: int32 `[V]`."""
    return _mix_(ids.to(torch.int32) * GOLDEN_32)


@cache  # for good: a captured graph reads what it gave
def vocabulary_hashes(vocab_size: int, device: torch.device, start: int = 0) -> Tensor:
    """The `token_hashes` of a whole vocabulary, or of as many ids from `start` on."""
    return token_hashes(torch.arange(start, start + vocab_size, device=device))


def noise_bits(keys: Tensor, hashes: Tensor) -> Tensor:
    """31 random bits for each of the tokens with `hashes` `[V]` under each of `keys` `[B, n]`: int32 `[B, n, V]`.

    The low half of the key enters before the first round of the hash, the high half before the second.
    """
    low, high = keys.to(torch.int32)[..., None], (keys >> 32).to(torch.int32)[..., None]
    return _mix_(low ^ hashes, high).bitwise_and_(0x7FFFFFFF)


def gumbel_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise from 31 random bits: finite for all of them, in `dtype` but at least float32.

    In half precision one token in 256 would have no chance and one in 1024 would be certain.
    """
    wide = at_least_float32(dtype)
    uniform = bits.to(wide).add_(0.5).mul_(2.0**-31).clamp_(max=1 - torch.finfo(wide).eps / 2)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@cache
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything that is compared, summed or drawn over a vocabulary."""
    return torch.promote_types(dtype, torch.float32)


def gumbel(keys: Tensor, hashes: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise `[B, n, V]` for tokens with `hashes` `[V]` under `keys` `[B, n]`, in float32 at least."""
    return gumbel_of(noise_bits(keys, hashes), dtype)


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise at m positions of B requests, for V tokens: `keys` `[B, m]` and `hashes` `[V]`, and the noise itself,
    `kept` `[B, m, V]`, where there is little of it. What is kept is not made again for whoever reads it next.
    """

    keys: Tensor
    hashes: Tensor
    dtype: torch.dtype
    kept: Tensor | None = None

    @staticmethod
    def of(keys: Tensor, hashes: Tensor, dtype: torch.dtype) -> "Noise":
        """The noise under `keys`, in `dtype` but at least float32."""
        (b, m), vocab = keys.shape, hashes.shape[0]
        if b * m * vocab > KEPT:
            return Noise(keys, hashes, dtype)
        parts = [gumbel(keys[block], hashes, dtype) for block in blocks(b, m * vocab, keys.device)]
        return Noise(keys, hashes, dtype, parts[0] if len(parts) == 1 else torch.cat(parts))

    def narrow(self, requests: slice) -> "Noise":
        """That of some requests."""
        return Noise(self.keys[requests], self.hashes, self.dtype, None if self.kept is None else self.kept[requests])

    def at(self, first: int, count: int = 1) -> "Noise":
        """That at positions `first` to `first + count - 1`."""
        kept = None if self.kept is None else self.kept[:, first : first + count]
        return Noise(self.keys[:, first : first + count], self.hashes, self.dtype, kept)

    def pick(self, which: Tensor) -> "Noise":
        """That at one position of each request, `which` `[B]`."""
        keys, kept = self.keys.gather(1, which[:, None]), self.kept
        if kept is not None:
            kept = kept.gather(1, which[:, None, None].expand(-1, -1, kept.shape[2]))
        return Noise(keys, self.hashes, self.dtype, kept)

    def over(self, ids: Tensor, hashes: Tensor) -> "Noise":
        """That of the tokens `ids` `[Vd]` alone; `hashes` `[Vd]` are theirs."""
        if self.kept is None:
            return Noise(self.keys, hashes, self.dtype)
        return Noise(self.keys, hashes, self.dtype, self.kept.gather(2, ids.expand(*self.kept.shape[:2], -1)))

    def values(self, which: Tensor | None = None) -> Tensor:
        """The noise `[B, m, V]`; with `which` `[B, n]`, that at these positions of each request, `[B, n, V]`."""
        made = gumbel(self.keys, self.hashes, self.dtype) if self.kept is None else self.kept
        if which is None:
            return made
        b, m, vocab = made.shape
        rows = torch.arange(b, device=made.device)[:, None] * m + which
        return made.reshape(b * m, vocab).index_select(0, rows.view(-1)).view(*which.shape, vocab)
