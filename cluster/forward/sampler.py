"""Seeded sampling as an argmax (law 1): a token maximises filtered, tempered logits plus Gumbel noise that is a pure
function of (request seed, token position, token id). Argmax of logits + Gumbel noise is a draw from the softmax
(the Gumbel-max trick), and the same key gives the same draw whichever way a token is reached.
"""

from functools import lru_cache

import torch
from torch import Tensor

from cluster.batch import Sampling, SamplingBatch
from cluster.request import GREEDY_BELOW


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


@lru_cache(maxsize=8)
def _token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    return _mix_(torch.arange(vocab_size, dtype=torch.int32, device=device) * GOLDEN_32)


def noise_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """31 random bits for every token under each of `keys` `[B, n]`: int32 `[B, n, V]`.

    The low half of the key enters before the first round of the hash, the high half before the second.
    """
    low, high = keys.to(torch.int32)[..., None], (keys >> 32).to(torch.int32)[..., None]
    return _mix_(low ^ _token_hashes(vocab_size, keys.device), high).bitwise_and_(0x7FFFFFFF)


def gumbel_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise from 31 random bits: finite for all of them, in `dtype` but at least float32.

    In half precision one token in 256 would have no chance and one in 1024 would be certain.
    """
    wide = at_least_float32(dtype)
    uniform = bits.to(wide).add_(0.5).mul_(2.0**-31).clamp_(max=1 - torch.finfo(wide).eps / 2)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything that is compared, summed or drawn over a vocabulary."""
    return torch.promote_types(dtype, torch.float32)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise `[B, n, V]` for requests with `seeds` `[B]` at token `positions` `[B, n]`, both int64.

    In `dtype`, float32 at least.
    """
    return gumbel_of(noise_bits(noise_keys(seeds, positions), vocab_size), dtype)


def scores(logits: Tensor, sampling: SamplingBatch, noise: Tensor | None) -> Tensor:
    """What the chosen token maximises, `[B, n, V]` like logits and noise; `noise` is None when no request samples."""
    if noise is None:
        return logits
    tempered = logits.to(noise.dtype) * sampling.inverse_temperature[:, None, None]
    if sampling.filtered:
        tempered = filtered(tempered, sampling)
    return tempered.addcmul_(noise, sampling.noise_scale[:, None, None])


def filtered(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """`[B, n, V]` with -inf where top_k, then top_p of what is left, then min_p rule a token out.

    top_p keeps the smallest set of likeliest tokens whose mass reaches it; equal logits stay or go together.
    """
    vocab = tempered.shape[-1]
    ordered = tempered.sort(-1, descending=True).values
    keep = torch.where(sampling.top_k > 0, sampling.top_k, vocab).clamp_(max=vocab)[:, None, None]
    rank = torch.arange(vocab, device=tempered.device)
    ordered = ordered.masked_fill(rank >= keep, float("-inf"))
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass
    kept = (before < sampling.top_p[:, None, None]) & (mass >= sampling.min_p[:, None, None] * mass[..., :1])
    kept &= rank < keep
    kept[..., 0] = True
    last = kept.sum(-1, keepdim=True) - 1
    return tempered.masked_fill(tempered < ordered.gather(-1, last), float("-inf"))


class SamplingTable:
    """Sampling parameters by request row, on the device, so that a step gathers instead of building."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        dtype = at_least_float32(dtype)
        self._floats = torch.zeros(rows, 4, dtype=dtype, device=device)
        self._floats[:, 0] = 1.0
        self._floats[:, 2] = 1.0
        self._ints = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self._device, self._dtype = device, dtype

    def put(self, s: Sampling) -> None:
        """Write one admitted request's parameters."""
        greedy = s.temperature < GREEDY_BELOW
        scale = 1.0 if greedy else 1.0 / s.temperature
        filters = (1.0, 0.0) if greedy else (s.top_p, s.min_p)
        floats = [scale, 0.0 if greedy else 1.0, *filters]
        self._floats[s.row] = torch.tensor(floats, dtype=self._dtype, device=self._device)
        self._ints[s.row] = torch.tensor([0 if greedy else s.top_k, s.seed], device=self._device)

    def take(self, rows: Tensor, noisy: bool, filtered: bool) -> SamplingBatch:
        """The parameters of `rows` `[B]`."""
        inverse, scale, top_p, min_p = self._floats.index_select(0, rows).unbind(1)
        top_k, seeds = self._ints.index_select(0, rows).unbind(1)
        return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, noisy, filtered)
