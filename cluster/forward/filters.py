"""top_k, top_p and min_p as one threshold per row.

What a filter keeps are the likeliest tokens, so a row's filters are together one number: the least logit that stays.
Equal logits stay or go together.

Probability mass is counted in whole numbers. Their sum does not depend on the order of its terms, so a threshold is
the same however it is searched, and for every way to split a vocabulary. Legend: B rows, V token ids.
"""

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.blocks import blocks
from cluster.forward.least import search

MASS = 1 << 40  # mass of the likeliest token; 2**22 tokens as likely still fit in 63 bits
WORDS = 2  # numbers that a threshold needs on the way, for each logit
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def ordered(floats: Tensor) -> Tensor:
    """Integers of the same width that compare as `floats` do (NaN apart)."""
    bits = floats.view(INTEGER[floats.dtype])
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def float_of(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of `dtype` whose `ordered` integers these are; on bits, `ordered` is its own inverse."""
    return ordered(numbers.view(dtype)).view(dtype)


def thresholds(tempered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least of the `tempered` logits `[B, V]`, float32 or float64, that each row keeps, `[B, 1]` like its filters.

    top_k comes first, top_p counts the mass of what that leaves, min_p is a share of the likeliest token's; the
    likeliest always stays. A row may have no filter (top_k 0, top_p 1, min_p 0).
    """
    vocab, dtype = tempered.shape[1], tempered.dtype
    top, numbers = tempered.amax(1, keepdim=True), search(ordered(tempered))
    rank = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    kth = float_of(numbers.least(rank), dtype).masked_fill_(rank == vocab, float("-inf"))
    mass = (tempered - top).exp_().mul_(MASS).nan_to_num_(0.0).to(torch.int64).masked_fill_(tempered < kth, 0)
    needed = (mass.sum(1, keepdim=True) * top_p.double()).ceil().to(torch.int64).clamp_(min=1)
    nucleus = float_of(numbers.least(needed, mass), dtype).masked_fill_(top_p >= 1, float("-inf"))
    return kth.maximum(nucleus).maximum(top + min_p.log()).minimum(top)


def filter_(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """Put -inf, in place, where the filters of R requests rule out a token of their `tempered` logits `[R, n, V]`."""
    r, n, vocab = tempered.shape
    rows = tempered.view(r * n, vocab)
    filters = [each[:, None].expand(r, n).reshape(-1, 1) for each in (sampling.top_k, sampling.top_p, sampling.min_p)]
    for block in blocks(r * n, WORDS * vocab, tempered.device):
        part = rows[block]
        part.masked_fill_(part < thresholds(part, *(each[block] for each in filters)), float("-inf"))
    return tempered
