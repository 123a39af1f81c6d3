"""The least number that has to stay, for every row: digit by digit, without a sort, and its twin by sorting.

Both answer the same question: which is the largest number so that all numbers not below it together have the weight
that is needed? Legend: B rows, V numbers of each.
"""

from typing import Protocol

import torch
from torch import Tensor

FEW = 1 << 14  # numbers up to which sorting them is faster: it takes fewer operators
DIGIT = 11  # bits of one histogram at most; fewer for short rows, which fewer bins serve better


class Search(Protocol):
    """Searches integers `[B, V]`."""

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """The largest number of each row so that the `weights` of all not below it sum to `needed`, `[B, 1]` both.

        `weights` `[B, V]` are int64, none negative, or None where each is 1; `needed` lies between 1 and their sum.
        """
        ...


def search(numbers: Tensor) -> Search:
    """The faster way for as many integers `[B, V]` as these."""
    return Sorted(numbers) if numbers.numel() <= FEW else Digits(numbers)


class Sorted:
    """Walks down the sorted row. The twin of `Digits`."""

    def __init__(self, numbers: Tensor) -> None:
        self._sorted, self._order = numbers.sort(1, descending=True)

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `Search.least`."""
        if weights is None:
            return self._sorted.gather(1, needed - 1)
        reached = weights.gather(1, self._order).cumsum(1)
        at = torch.searchsorted(reached, needed).clamp_(max=self._order.shape[1] - 1)
        return self._sorted.gather(1, at)


class Digits:
    """Finds the number's bits from the top: a histogram of one digit says in which bin it lies, and the next one looks
    inside that bin (radix selection, as in Alabi et al., "Fast k-selection algorithms for graphics processing units",
    2012). Three histograms do for 32 bits.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._width = numbers, 8 * numbers.itemsize
        self._digit = max(4, min(DIGIT, numbers.shape[1].bit_length()))

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `Search.least`."""
        rows, vocab = self._numbers.shape
        kind = torch.int32 if weights is None else torch.int64
        bins = torch.zeros(rows, 1 << self._digit, dtype=kind, device=needed.device)
        above = needed.to(torch.int64)
        spare = (vocab if weights is None else weights.sum(1, keepdim=True)) - above  # weight that may lie below
        found = torch.zeros_like(needed, dtype=self._numbers.dtype)
        for high in range(self._width, 0, -self._digit):
            low = max(0, high - self._digit)
            last = (1 << (high - low)) - 1
            digits = self._numbers >> low
            if high == self._width:
                digits.add_((last + 1) >> 1)  # negative numbers are below all others
                inside = torch.ones((), dtype=kind, device=needed.device) if weights is None else weights
            else:
                digits.bitwise_and_(last)
                same = self._numbers >> high == found
                inside = same.to(kind) if weights is None else weights.masked_fill(~same, 0)
            filled = bins.zero_().scatter_add_(1, digits.to(torch.int64), inside.expand(rows, vocab))
            upto = filled.cumsum(1)
            digit = torch.searchsorted(upto, spare, right=True).clamp_(max=last)
            spare = spare - upto.gather(1, digit) + filled.gather(1, digit)
            digit = digit.to(found.dtype)
            found = digit - ((last + 1) >> 1) if high == self._width else (found << (high - low)) | digit
        return found
