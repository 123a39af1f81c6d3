"""Seeded sampling as an argmax (law 1): a token maximises filtered, tempered logits plus Gumbel noise that is a pure
function of (request seed, token position, token id). Argmax of logits + Gumbel noise is a draw from the softmax
(the Gumbel-max trick), and the same key gives the same draw whichever way a token is reached.
"""

import torch
from torch import Tensor

from cluster.batch import Sampling, SamplingBatch


def _int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


GOLDEN, MIX_A, MIX_B, MIX_C = (_int32(v) for v in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F))


def _mix_(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, in place on int32 (Appleby, public domain); shifts are made logical by masks."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(MIX_A)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(MIX_B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything that is compared, summed or drawn over a vocabulary."""
    return torch.promote_types(dtype, torch.float32)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise `[B, n, V]` for requests with `seeds` `[B]` at token `positions` `[B, n]`, both int64.

    In `dtype`, float32 at least: half precision would give every 256th token no chance and every 1024th a sure one.
    """
    low = (seeds & 0xFFFFFFFF).to(torch.int32)[:, None]
    high = (seeds >> 32).to(torch.int32)[:, None]
    key = _mix_(_mix_(low + positions.to(torch.int32) * MIX_C) + high)
    whiten = _mix_(key + GOLDEN)
    token = _mix_(torch.arange(vocab_size, dtype=torch.int32, device=seeds.device) * GOLDEN)
    hashed = _mix_(key[..., None] ^ token).bitwise_xor_(whiten[..., None]).bitwise_and_(0x7FFFFFFF)
    wide = at_least_float32(dtype)
    uniform = hashed.to(wide).add_(0.5).mul_(2.0**-31).clamp_(max=1 - torch.finfo(wide).eps / 2)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def scores(logits: Tensor, sampling: SamplingBatch, noise: Tensor | None) -> Tensor:
    """What the chosen token maximises: logits `[B, n, V]`, noise alike or None when no request samples."""
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
        greedy = s.temperature == 0.0
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
