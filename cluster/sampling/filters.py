"""top_k, top_p and min_p as one threshold per row.

What a filter keeps are the likeliest tokens, so a row's filters are together one number: the least logit that stays.
Equal logits stay or go together.

Probability mass is counted in whole numbers. Their sum does not depend on the order of its terms, so a threshold is
the same however it is searched, and for every way to split a vocabulary. Legend: B rows, V token ids.
"""

from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.radix_select import search
from cluster.sampling.row_blocks import blocks

MASS = 1 << 40  # mass of the likeliest token; 2**22 tokens as likely still fit in 63 bits
AT_ONCE = 2  # numbers that a threshold needs on the way, for each logit
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def ordered(floats: Tensor) -> Tensor:
    """Integers of the same width that compare as `floats` do (NaN apart)."""
    bits = floats.view(INTEGER[floats.dtype])
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def float_of(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of `dtype` whose `ordered` integers these are; on bits, `ordered` is its own inverse."""
    return ordered(numbers.view(dtype)).view(dtype)


def mass_of(tempered: Tensor, top: Tensor, kth: Tensor) -> Tensor:
    """The mass of each of the `tempered` logits `[B, V]`, int64, where `top` `[B, 1]` has `MASS`; none below `kth`."""
    return (tempered - top).exp_().mul_(MASS).nan_to_num_(0.0).to(torch.int64).masked_fill_(tempered < kth, 0)


class LogitRows(Protocol):
    """Rows of tempered logits over `vocab` columns, of which a rank may hold some; numbers of a row are `[B, 1]`."""

    vocab: int

    def highest(self) -> Tensor:
        """The highest logit."""
        ...

    def kth(self, rank: Tensor) -> Tensor:
        """The logit that has place `rank`, from 1, in the row."""
        ...

    def weigh(self, top: Tensor, kth: Tensor) -> Tensor:
        """The mass of the row, where that of each logit is `mass_of` it."""
        ...

    def reaching(self, needed: Tensor) -> Tensor:
        """The largest number so that all logits not below it have the mass `needed`, as weighed before."""
        ...


class WholeLogits:
    """`LogitRows` with all their columns, `tempered` `[B, V]` in float32 or float64."""

    def __init__(self, tempered: Tensor) -> None:
        self.vocab = tempered.shape[1]
        self._tempered, self._numbers = tempered, search(ordered(tempered))
        self._mass: Tensor | None = None

    def highest(self) -> Tensor:
        """See `LogitRows.highest`."""
        return self._tempered.amax(1, keepdim=True)

    def kth(self, rank: Tensor) -> Tensor:
        """See `LogitRows.kth`."""
        return float_of(self._numbers.least(rank), self._tempered.dtype)

    def weigh(self, top: Tensor, kth: Tensor) -> Tensor:
        """See `LogitRows.weigh`."""
        self._mass = mass_of(self._tempered, top, kth)
        return self._mass.sum(1, keepdim=True)

    def reaching(self, needed: Tensor) -> Tensor:
        """See `LogitRows.reaching`."""
        return float_of(self._numbers.least(needed, self._mass), self._tempered.dtype)


def thresholds(rows: LogitRows, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least of its tempered logits that each row keeps, `[B, 1]` like its filters.

    top_k comes first, top_p counts the mass of what that leaves, min_p is a share of the likeliest token's; the
    likeliest always stays. A row may have no filter (top_k 0, top_p 1, min_p 0).
    """
    top, vocab = rows.highest(), rows.vocab
    rank = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    kth = rows.kth(rank).masked_fill_(rank == vocab, float("-inf"))
    needed = (rows.weigh(top, kth) * top_p.double()).ceil().to(torch.int64).clamp_(min=1)
    nucleus = rows.reaching(needed).masked_fill_(top_p >= 1, float("-inf"))
    return kth.maximum(nucleus).maximum(top + min_p.log()).minimum(top)


def least_kept(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """The least that the filters of R requests keep of each row of their `tempered` logits `[R, n, V]`, `[R, n, 1]`."""
    r, n, vocab = tempered.shape
    rows = tempered.view(r * n, vocab)
    filters = [each[:, None].expand(r, n).reshape(-1, 1) for each in (sampling.top_k, sampling.top_p, sampling.min_p)]
    cuts = blocks(r * n, AT_ONCE * vocab, tempered.device)
    parts = [thresholds(WholeLogits(rows[cut]), *(each[cut] for each in filters)) for cut in cuts]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(r, n, 1)
