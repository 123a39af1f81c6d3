"""Keyed Gumbel noise: a pure function of (request seed, token position, token id), computed where it is needed.

argmax(logits + Gumbel noise) is a sample from softmax(logits) (the Gumbel-max trick). The same key gives the same
sample, whether a token is reached by drafting, verifying or plain decoding (law 1 in docs/architecture.md).
Legend: B requests, n positions, V token ids.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cluster.sampling.row_blocks import blocks, concat

MAX_CACHED_VALUES = 1 << 22  # if there are more noise values, they are not cached: each use computes them


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


GOLDEN_32, MIX_A, MIX_B = (_signed(v, 32) for v in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
GOLDEN_64, MIX_C, MIX_D = (_signed(v, 64) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix_(x: Tensor, xor_between: Tensor | int = 0) -> Tensor:
    """Apply MurmurHash3's 32-bit finaliser in place on int32 (Appleby, public domain); masks make the shifts logical.

    `xor_between` is XORed in after the first of the two rounds.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(MIX_A).bitwise_xor_(xor_between)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(MIX_B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _mix_64(x: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of int64 (Steele, Lea, Flood 2014): each input bit flips about half of the result's
    bits.
    """
    x = (x ^ (x >> 30).bitwise_and_((1 << 34) - 1)).mul_(MIX_C)
    x = x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(MIX_D)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return 64-bit keys `[B, n]`: for each of `seeds` `[B]`, the numbers at `positions` `[B, n]` of the sequence that
    a SplitMix64 generator yields.

    key = mix(mix(seed + golden) + position * golden). Seeds are mixed first; otherwise two (seed, position) pairs with
    the same sum would share a key.
    """
    return _mix_64(_mix_64(seeds + GOLDEN_64)[:, None] + positions * GOLDEN_64)


def keys_along(seeds: Tensor, first_positions: Tensor, count: int) -> Tensor:
    """Return the keys `[B, count]` of `count` positions from `first_positions` `[B]` on, for each of `seeds` `[B]`."""
    return noise_keys(seeds, first_positions[:, None] + torch.arange(count, device=first_positions.device))


def token_hashes(ids: Tensor) -> Tensor:
    """Return the hash of each token id, int32 `[V]`. Noise depends on token ids only through these hashes."""
    return _mix_(ids.to(torch.int32) * GOLDEN_32)


@cache  # never freed: captured CUDA graphs read these tensors
def vocabulary_hashes(vocab_size: int, device: torch.device, start: int = 0) -> Tensor:
    """Return the `token_hashes` of ids `start` to `start + vocab_size - 1`."""
    return token_hashes(torch.arange(start, start + vocab_size, device=device))


def noise_bits(keys: Tensor, hashes: Tensor) -> Tensor:
    """Return 31 random bits for each token hash in `hashes` `[V]` and each key in `keys` `[B, n]`: int32 `[B, n, V]`.

    The low half of the key enters before the first round of the hash, the high half before the second.
    """
    low, high = keys.to(torch.int32)[..., None], (keys >> 32).to(torch.int32)[..., None]
    return _mix_(low ^ hashes, high).bitwise_and_(0x7FFFFFFF)


def gumbel_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard Gumbel noise from 31 random bits, in `dtype` or float32, whichever is wider. It is finite for all
    bit patterns.

    In half precision, rounding would distort the smallest and the greatest noise values.
    """
    float_dtype = at_least_float32(dtype)
    # u = (bits + 0.5) / 2^31, below 1; noise = -log(-log(1 - u))
    uniform = bits.to(float_dtype).add_(0.5).mul_(2.0**-31).clamp_(max=1 - torch.finfo(float_dtype).eps / 2)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@cache
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the wider of `dtype` and float32: the dtype in which values over a vocabulary are compared and summed."""
    return torch.promote_types(dtype, torch.float32)


def gumbel(keys: Tensor, hashes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard Gumbel noise `[B, n, V]` for `hashes` `[V]` under `keys` `[B, n]`, in float32 at least."""
    return gumbel_of(noise_bits(keys, hashes), dtype)


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise at m positions of B requests for V tokens, as `keys` `[B, m]` and `hashes` `[V]`.

    `cached_values` `[B, m, V]` are the values, computed once and read several times. It is None if there are more than
    `MAX_CACHED_VALUES`, or if whoever made the noise wanted no cache. Then each use computes the values from the keys.
    """

    keys: Tensor
    hashes: Tensor
    dtype: torch.dtype
    cached_values: Tensor | None = None

    @staticmethod
    def of(keys: Tensor, hashes: Tensor, dtype: torch.dtype) -> "Noise":
        """Return the noise for `keys` and `hashes`, in `dtype` or float32, whichever is wider. Its values are computed
        and cached if there are at most `MAX_CACHED_VALUES`.
        """
        (b, m), vocab = keys.shape, hashes.shape[0]
        if b * m * vocab > MAX_CACHED_VALUES:
            return Noise(keys, hashes, dtype)
        block_values = [gumbel(keys[block], hashes, dtype) for block in blocks(b, m * vocab, keys.device)]
        return Noise(keys, hashes, dtype, concat(block_values))

    def narrow(self, requests: slice) -> "Noise":
        """Return the noise of the requests in the slice `requests`."""
        return Noise(
            self.keys[requests],
            self.hashes,
            self.dtype,
            None if self.cached_values is None else self.cached_values[requests],
        )

    def at(self, first: int, count: int = 1) -> "Noise":
        """Return the noise at the positions `first` to `first + count - 1` of the m positions, counted from 0."""
        cached_values = None if self.cached_values is None else self.cached_values[:, first : first + count]
        return Noise(self.keys[:, first : first + count], self.hashes, self.dtype, cached_values)

    def pick(self, position_index: Tensor) -> "Noise":
        """Return the noise at one position per request: `position_index` `[B]` are indices into the m positions."""
        keys, cached_values = self.keys.gather(1, position_index[:, None]), self.cached_values
        if cached_values is not None:
            cached_values = cached_values.gather(
                1, position_index[:, None, None].expand(-1, -1, cached_values.shape[2])
            )
        return Noise(keys, self.hashes, self.dtype, cached_values)

    def pick_rows(self, requests: Tensor, position_index: Tensor) -> "Noise":
        """Return the noise of M rows, as M requests with one position each: row i belongs to request `requests[i]`, and
        `position_index[i]` is its index into the m positions.
        """
        cached_values = None if self.cached_values is None else self.cached_values[requests, position_index][:, None]
        return Noise(self.keys[requests, position_index][:, None], self.hashes, self.dtype, cached_values)

    def over(self, ids: Tensor, hashes: Tensor) -> "Noise":
        """Return the noise of tokens `ids` `[Vd]` only; `hashes` `[Vd]` are their hashes."""
        if self.cached_values is None:
            return Noise(self.keys, hashes, self.dtype)
        return Noise(
            self.keys, hashes, self.dtype, self.cached_values.gather(2, ids.expand(*self.cached_values.shape[:2], -1))
        )

    def values(self, position_index: Tensor | None = None) -> Tensor:
        """Return the values `[B, m, V]`. If `position_index` `[B, n]` is given, return the values `[B, n, V]` at these
        indices into the m positions.
        """
        values = gumbel(self.keys, self.hashes, self.dtype) if self.cached_values is None else self.cached_values
        if position_index is None:
            return values
        b, m, vocab = values.shape
        rows = torch.arange(b, device=values.device)[:, None] * m + position_index
        return values.reshape(b * m, vocab).index_select(0, rows.view(-1)).view(*position_index.shape, vocab)
