"""top_k, top_p and min_p as one threshold per row.

Every filter keeps the likeliest tokens, so all filters of a row together are one number: the lowest logit that is kept.
Equal logits are kept or removed together.

Probability mass is counted in integers. Their sum does not depend on the order of its terms, so a threshold is the same
for every search algorithm and for every sharding of the vocabulary. Legend: B rows, V token ids.
"""

from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.radix_select import search
from cluster.sampling.row_blocks import blocks, concat

MASS = 1 << 40  # mass of the likeliest token; the sum over 2**22 equally likely tokens still fits in 63 bits
AT_ONCE = 2  # temporary numbers per logit while a threshold is computed
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def ordered(floats: Tensor) -> Tensor:
    """Return integers of the same width in the same order as `floats` (except NaN)."""
    bits = floats.view(INTEGER[floats.dtype])
    # Negative floats ascend as their bits descend, so flip all their bits but the sign (the shift gives all ones).
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def float_of(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floats of `dtype` whose `ordered` integers are `numbers`; on bits, `ordered` is its own inverse."""
    return ordered(numbers.view(dtype)).view(dtype)


def mass_of(tempered: Tensor, top: Tensor, kth: Tensor) -> Tensor:
    """Return the mass of each tempered logit `[B, V]`, int64: exp(logit - top) * MASS, and 0 for logits below `kth`.

    `top` and `kth` are `[B, 1]`.
    """
    return (tempered - top).exp_().mul_(MASS).nan_to_num_(0.0).to(torch.int64).masked_fill_(tempered < kth, 0)


class LogitRows(Protocol):
    """B rows of tempered logits over `vocab` columns, of which this rank may hold a shard. Results are `[B, 1]`."""

    vocab: int

    def highest(self) -> Tensor:
        """Return the highest logit of each row."""

    def kth(self, rank: Tensor) -> Tensor:
        """Return the logit at place `rank` of each row; place 1 is the highest logit."""

    def weigh(self, top: Tensor, kth: Tensor) -> Tensor:
        """Compute the mass of each logit (`mass_of`), keep it for `reaching`, and return the sum of each row."""

    def reaching(self, needed: Tensor) -> Tensor:
        """Return the largest threshold so that the logits not below it have at least the mass `needed`."""


class WholeLogits:
    """`LogitRows` of a rank that holds all columns: `tempered` `[B, V]` in float32 or float64."""

    def __init__(self, tempered: Tensor) -> None:
        self.vocab = tempered.shape[1]
        self._tempered, self._numbers = tempered, search(ordered(tempered))
        self._mass: Tensor | None = None

    def highest(self) -> Tensor:
        """Return the maximum of each row."""
        return self._tempered.amax(1, keepdim=True)

    def kth(self, rank: Tensor) -> Tensor:
        """Search by count; see `LogitRows.kth`."""
        return float_of(self._numbers.least(rank), self._tempered.dtype)

    def weigh(self, top: Tensor, kth: Tensor) -> Tensor:
        """Keep the masses of all logits; see `LogitRows.weigh`."""
        self._mass = mass_of(self._tempered, top, kth)
        return self._mass.sum(1, keepdim=True)

    def reaching(self, needed: Tensor) -> Tensor:
        """Search by mass; see `LogitRows.reaching`."""
        return float_of(self._numbers.least(needed, self._mass), self._tempered.dtype)


def thresholds(rows: LogitRows, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the lowest tempered logit that each row keeps, `[B, 1]`; the filters are `[B, 1]` too.

    top_k is applied first. top_p is a share of the mass that top_k leaves, min_p a share of the highest probability.
    The likeliest token is always kept. A row without filters has top_k 0, top_p 1, min_p 0.
    """
    top, vocab = rows.highest(), rows.vocab
    # Each filter is a threshold, -inf if it is off; the highest one decides:
    # threshold = min(top, max(kth, nucleus, top + log(min_p)))
    rank = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    kth = rows.kth(rank).masked_fill_(rank == vocab, float("-inf"))
    needed = (rows.weigh(top, kth) * top_p.double()).ceil().to(torch.int64).clamp_(min=1)
    nucleus = rows.reaching(needed).masked_fill_(top_p >= 1, float("-inf"))
    return kth.maximum(nucleus).maximum(top + min_p.log()).minimum(top)


def least_kept(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """Return the thresholds `[R, n, 1]` of R requests' filters for their `tempered` logits `[R, n, V]`."""
    r, n, vocab = tempered.shape
    rows = tempered.view(r * n, vocab)
    filters = [each[:, None].expand(r, n).reshape(-1, 1) for each in (sampling.top_k, sampling.top_p, sampling.min_p)]
    cuts = blocks(r * n, AT_ONCE * vocab, tempered.device)
    parts = [thresholds(WholeLogits(rows[cut]), *(each[cut] for each in filters)) for cut in cuts]
    return concat(parts).view(r, n, 1)
