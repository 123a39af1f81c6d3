"""top_k, top_p and min_p as one threshold per row.

Every filter keeps the likeliest tokens. So one number describes all filters of a row: the lowest logit that is kept.
Equal logits are kept or removed together.

Probability mass is counted in integers. A sum of integers does not depend on the order of its terms. So a threshold is
the same for every search algorithm and for every sharding of the vocabulary. Legend: B rows, V token ids.
"""

from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.radix_select import search
from cluster.sampling.row_blocks import blocks, concat

MAX_MASS = 1 << 40  # mass of the likeliest token; the sum over 2**22 equally likely tokens still fits in 63 bits
TEMPORARIES_PER_LOGIT = 2  # temporary numbers per logit while a threshold is computed
INTEGER_DTYPE = {torch.float32: torch.int32, torch.float64: torch.int64}


def ordered_bits(floats: Tensor) -> Tensor:
    """Return integers of the same width as `floats`, which compare as the floats do (except NaN)."""
    bits = floats.view(INTEGER_DTYPE[floats.dtype])
    # Negative floats ascend as their bits descend, so flip all their bits but the sign (the shift gives all ones).
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def float_of_ordered_bits(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floats of `dtype` for which `ordered_bits` gives the integers `numbers`. `ordered_bits` is its own
    inverse: applied twice, it gives the original bits.
    """
    return ordered_bits(numbers.view(dtype)).view(dtype)


def logit_mass(tempered: Tensor, max_logits: Tensor, top_k_threshold: Tensor) -> Tensor:
    """Return the mass of each tempered logit `[B, V]`, int64: exp(logit - max logit) * MAX_MASS, rounded down. It is 0
    for NaN and for logits below `top_k_threshold`.

    `max_logits` and `top_k_threshold` are `[B, 1]`.
    """
    return (
        (tempered - max_logits)
        .exp_()
        .mul_(MAX_MASS)
        .nan_to_num_(0.0)
        .to(torch.int64)
        .masked_fill_(tempered < top_k_threshold, 0)
    )


class LogitRows(Protocol):
    """B rows of tempered logits over `vocab` columns, of which this rank may hold a shard. Results are `[B, 1]`."""

    vocab: int

    def max_logits(self) -> Tensor:
        """Return the highest logit of each row."""

    def kth_logits(self, rank: Tensor) -> Tensor:
        """Return the logit at place `rank` of each row; place 1 is the highest logit."""

    def total_mass(self, max_logits: Tensor, top_k_threshold: Tensor) -> Tensor:
        """Compute the mass of each logit (`logit_mass`), and return the sum of each row. `mass_threshold` uses the same
        masses afterwards.
        """

    def mass_threshold(self, needed_mass: Tensor) -> Tensor:
        """Return the largest threshold for which the logits at or above it have, together, a mass of at least
        `needed_mass`.
        """


class UnshardedLogits:
    """`LogitRows` of a rank that holds all columns: `tempered` `[B, V]` in float32 or float64."""

    def __init__(self, tempered: Tensor) -> None:
        self.vocab = tempered.shape[1]
        self._tempered, self._search = tempered, search(ordered_bits(tempered))
        self._masses: Tensor | None = None

    def max_logits(self) -> Tensor:
        """Return the maximum of each row."""
        return self._tempered.amax(1, keepdim=True)

    def kth_logits(self, rank: Tensor) -> Tensor:
        """Search by count; see `LogitRows.kth_logits`."""
        return float_of_ordered_bits(self._search.threshold(rank), self._tempered.dtype)

    def total_mass(self, max_logits: Tensor, top_k_threshold: Tensor) -> Tensor:
        """Store the masses of all logits, and return their sums; see `LogitRows.total_mass`."""
        self._masses = logit_mass(self._tempered, max_logits, top_k_threshold)
        return self._masses.sum(1, keepdim=True)

    def mass_threshold(self, needed_mass: Tensor) -> Tensor:
        """Return the threshold that `LogitRows.mass_threshold` defines."""
        return float_of_ordered_bits(self._search.threshold(needed_mass, self._masses), self._tempered.dtype)


def thresholds(rows: LogitRows, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the lowest tempered logit that each row keeps, `[B, 1]`; `top_k`, `top_p` and `min_p` are `[B, 1]`.

    top_k is applied first. top_p is a share of the mass that top_k leaves, min_p a share of the highest probability.
    The likeliest token is always kept. A row without filters has top_k 0, top_p 1, min_p 0.
    """
    max_logits, vocab = rows.max_logits(), rows.vocab
    # Each filter is a threshold, -inf if it is off; the highest one decides:
    # threshold = min(max logit, max(top_k threshold, top_p threshold, max logit + log(min_p)))
    rank = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    top_k_threshold = rows.kth_logits(rank).masked_fill_(rank == vocab, float("-inf"))
    needed_mass = (rows.total_mass(max_logits, top_k_threshold) * top_p.double()).ceil().to(torch.int64).clamp_(min=1)
    top_p_threshold = rows.mass_threshold(needed_mass).masked_fill_(top_p >= 1, float("-inf"))
    return top_k_threshold.maximum(top_p_threshold).maximum(max_logits + min_p.log()).minimum(max_logits)


def filter_thresholds(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """Return the filters' thresholds `[R, n, 1]` for the `tempered` logits `[R, n, V]` of R requests."""
    r, n, vocab = tempered.shape
    rows = tempered.view(r * n, vocab)
    filters = [
        values[:, None].expand(r, n).reshape(-1, 1) for values in (sampling.top_k, sampling.top_p, sampling.min_p)
    ]
    row_blocks = blocks(r * n, TEMPORARIES_PER_LOGIT * vocab, tempered.device)
    block_thresholds = [
        thresholds(UnshardedLogits(rows[row_block]), *(values[row_block] for values in filters))
        for row_block in row_blocks
    ]
    return concat(block_thresholds).view(r, n, 1)
