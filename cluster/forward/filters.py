"""top_k, top_p and min_p as one threshold per row, found without a sort.

What a filter keeps are the likeliest tokens, so a row's filters are together one number: the least logit that stays.
Equal logits stay or go together. The threshold is found digit by digit, from the top, in the bits of the logits: a
histogram of one digit says in which bin the answer lies, and the next one looks inside that bin (radix selection, as
in Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012). Three histograms do for float32.

Probability mass is counted in whole numbers. Their sum does not depend on the order of its terms, so a threshold is
the same on every machine and for every way to split a vocabulary. Legend: B rows, V token ids.
"""

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.blocks import blocks

DIGIT = 11  # bits of one histogram at most; fewer for a small vocabulary, which fewer bins serve better
MASS = 1 << 40  # mass of the likeliest token; 2**22 tokens as likely still fit in 63 bits
WORDS = 4  # numbers that a threshold needs on the way, for each logit
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def ordered(floats: Tensor) -> Tensor:
    """Integers of the same width that compare as `floats` do (NaN apart); its own inverse on the bits."""
    bits = floats.view(INTEGER[floats.dtype])
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def least(floats: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """The largest value `[B, 1]` so that the `weights` of all `floats` `[B, V]` not below it sum to `needed` `[B, 1]`.

    `weights` are int64, none negative, and `needed` lies between 1 and their sum.
    """
    width = 8 * floats.itemsize
    numbers = ordered(floats).to(torch.int64)
    digit_bits = max(4, min(DIGIT, floats.shape[1].bit_length()))
    bins = torch.zeros(floats.shape[0], (1 << digit_bits) + 1, dtype=torch.int64, device=floats.device)
    found, above = torch.zeros_like(needed), torch.zeros_like(needed)
    for high in range(width, 0, -digit_bits):
        low = max(0, high - digit_bits)
        last = (1 << (high - low)) - 1
        digits = (numbers >> low) & last
        if high == width:
            digits ^= (last + 1) >> 1  # the sign bit: negative numbers are below all others
        else:
            digits = digits.masked_fill_(numbers >> high != found, 1 << digit_bits)
        filled = bins.zero_().scatter_add_(1, digits, weights)[:, : last + 1]
        beyond = above + filled.flip(1).cumsum(1).flip(1)
        digit = ((beyond >= needed).sum(1, keepdim=True) - 1).clamp_(min=0)
        above = beyond.gather(1, digit) - filled.gather(1, digit)
        if high == width:
            digit = digit - ((last + 1) >> 1)
        found = (found << (high - low)) | digit if high < width else digit
    bits = found.to(INTEGER[floats.dtype])
    return ordered(bits.view(floats.dtype)).view(floats.dtype)


def thresholds(tempered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least of the `tempered` logits `[B, V]`, float32 or float64, that each row keeps, `[B, 1]` like its filters.

    top_k comes first, top_p counts the mass of what that leaves, min_p is a share of the likeliest token's; the
    likeliest always stays. A row may have no filter (top_k 0, top_p 1, min_p 0).
    """
    vocab = tempered.shape[1]
    top = tempered.amax(1, keepdim=True)
    lowest = torch.full_like(top, float("-inf"))
    rank = torch.where(top_k > 0, top_k, vocab).clamp_(max=vocab)
    kth = torch.where(rank < vocab, least(tempered, torch.ones_like(tempered, dtype=torch.int64), rank), lowest)
    mass = (tempered - top).exp_().mul_(MASS).nan_to_num_(0.0).to(torch.int64).masked_fill_(tempered < kth, 0)
    needed = (mass.sum(1, keepdim=True) * top_p.double()).ceil().to(torch.int64).clamp_(min=1)
    nucleus = torch.where(top_p < 1, least(tempered, mass, needed), lowest)
    return kth.maximum(nucleus).maximum(top + min_p.log()).minimum(top)


def filter_(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """Put -inf, in place, where the filters of R requests rule out a token of their `tempered` logits `[R, n, V]`."""
    r, n, vocab = tempered.shape
    rows = tempered.view(r * n, vocab)
    filters = [each.repeat_interleave(n)[:, None] for each in (sampling.top_k, sampling.top_p, sampling.min_p)]
    for block in blocks(r * n, WORDS * vocab):
        part = rows[block]
        part.masked_fill_(part < thresholds(part, *(each[block] for each in filters)), float("-inf"))
    return tempered
