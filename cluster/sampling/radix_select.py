"""The least number that has to stay, for every row: digit by digit, without a sort, and its twin by sorting.

Both answer the same question: which is the largest number so that all numbers not below it together have the weight
that is needed? Legend: B rows, V numbers of each.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FEW = 1 << 14  # numbers up to which sorting them is faster: it takes fewer operators
DIGIT = 11  # bits of one histogram at most; fewer for short rows, which fewer bins serve better


class ThresholdSearch(Protocol):
    """Searches integers `[B, V]`."""

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """The largest number of each row so that the `weights` of all not below it sum to `needed`, `[B, 1]` both.

        `weights` `[B, V]` are int64, none negative, or None where each is 1; `needed` lies between 1 and their sum.
        """
        ...


def search(numbers: Tensor) -> ThresholdSearch:
    """The faster way for as many integers `[B, V]` as these."""
    return SortedSelect(numbers) if numbers.numel() <= FEW else RadixSelect(numbers)


class SortedSelect:
    """Walks down the sorted row. The twin of `RadixSelect`."""

    def __init__(self, numbers: Tensor) -> None:
        self._sorted, self._order = numbers.sort(1, descending=True)

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `ThresholdSearch.least`."""
        if weights is None:
            return self._sorted.gather(1, needed - 1)
        reached = weights.gather(1, self._order).cumsum(1)
        at = torch.searchsorted(reached, needed).clamp_(max=self._order.shape[1] - 1)
        return self._sorted.gather(1, at)


class Digit(NamedTuple):
    """Which digit of `width` bits is looked at: bits `low` to `high - 1`, of numbers whose bits above are `found`."""

    width: int
    high: int
    low: int
    found: Tensor

    @property
    def bins(self) -> int:
        """How many values the digit has."""
        return 1 << (self.high - self.low)


def histogram_(bins: Tensor, numbers: Tensor, place: Digit, weights: Tensor | None = None) -> Tensor:
    """The weight of all `numbers` `[B, V]` by their digit at `place`, in `bins` `[B, at least as many as it has]`."""
    digits, kind = numbers >> place.low, bins.dtype
    if place.high == place.width:
        digits.add_(place.bins >> 1)  # negative numbers are below all others
        inside = torch.ones((), dtype=kind, device=bins.device) if weights is None else weights
    else:
        digits.bitwise_and_(place.bins - 1)
        same = numbers >> place.high == place.found
        inside = same.to(kind) if weights is None else weights.masked_fill(~same, 0)
    return bins.zero_().scatter_add_(1, digits.to(torch.int64), inside.expand(numbers.shape))


def descend(filled: Callable[[Digit], Tensor], spare: Tensor, digit: int, dtype: torch.dtype) -> Tensor:
    """The number of `dtype` in each row, `[B, 1]`, below which as much weight lies as fits into `spare` `[B, 1]`, found
    `digit` bits at a time. `filled` gives the histogram at a place.
    """
    width = 8 * dtype.itemsize
    found = torch.zeros_like(spare, dtype=dtype)
    for high in range(width, 0, -digit):
        place = Digit(width, high, max(0, high - digit), found)
        weights = filled(place)
        upto = weights.cumsum(1)
        at = torch.searchsorted(upto, spare, right=True).clamp_(max=place.bins - 1)
        spare = spare - upto.gather(1, at) + weights.gather(1, at)
        at = at.to(dtype)
        found = at - (place.bins >> 1) if high == width else (found << (high - place.low)) | at
    return found


class RadixSelect:
    """Finds the number's bits from the top: a histogram of one digit says in which bin it lies, and the next one looks
    inside that bin (radix selection, as in Alabi et al., "Fast k-selection algorithms for graphics processing units",
    2012). Three histograms do for 32 bits.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._digit = max(4, min(DIGIT, numbers.shape[1].bit_length()))

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `ThresholdSearch.least`."""
        rows, vocab = self._numbers.shape
        kind = torch.int32 if weights is None else torch.int64
        bins = torch.zeros(rows, 1 << self._digit, dtype=kind, device=needed.device)
        total = vocab if weights is None else weights.sum(1, keepdim=True)
        spare = total - needed.to(torch.int64)  # weight that may lie below
        return descend(
            lambda place: histogram_(bins, self._numbers, place, weights), spare, self._digit, self._numbers.dtype
        )
