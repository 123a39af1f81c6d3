"""Weighted selection in rows of integers: radix select, and a reference implementation by sorting.

Both find, for each row, the largest number x so that the weights of all numbers >= x sum to at least `needed`.
Legend: B rows, V numbers of each.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FEW = 1 << 14  # up to this many numbers, sorting is faster, as it takes fewer operators
DIGIT = 11  # most bits of one histogram; short rows use fewer, because their histograms would be mostly empty


class ThresholdSearch(Protocol):
    """Searches the rows of integers `[B, V]`."""

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return `[B, 1]`: the largest x of each row so that the `weights` of numbers >= x sum to at least `needed`.

        `weights` `[B, V]` are int64, not negative. If `weights` is None, each number weighs 1. `needed` `[B, 1]` is
        between 1 and the sum of the weights.
        """


def search(numbers: Tensor) -> ThresholdSearch:
    """Return the faster search for integers `[B, V]` of this size."""
    return SortedSelect(numbers) if numbers.numel() <= FEW else RadixSelect(numbers)


class SortedSelect:
    """Sorts the rows. The reference implementation of `RadixSelect`."""

    def __init__(self, numbers: Tensor) -> None:
        self._sorted, self._order = numbers.sort(1, descending=True)

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """Find the number where the running sum of weights, from the highest down, reaches `needed`."""
        if weights is None:
            return self._sorted.gather(1, needed - 1)
        reached = weights.gather(1, self._order).cumsum(1)
        at = torch.searchsorted(reached, needed).clamp_(max=self._order.shape[1] - 1)
        return self._sorted.gather(1, at)


class Digit(NamedTuple):
    """One round: bits `low` to `high - 1` of `width`-bit numbers whose higher bits are `found` `[B, 1]`."""

    width: int
    high: int
    low: int
    found: Tensor

    @property
    def bins(self) -> int:
        """Return the number of values of the digit."""
        return 1 << (self.high - self.low)


def histogram_(bins: Tensor, numbers: Tensor, place: Digit, weights: Tensor | None = None) -> Tensor:
    """Return `bins` `[B, >= place.bins]`, filled with the sum of weights of `numbers` `[B, V]` per digit at `place`."""
    digits, kind = numbers >> place.low, bins.dtype
    if place.high == place.width:
        digits.add_(place.bins >> 1)  # the top digit is signed: shift it to 0 and above
        inside = torch.ones((), dtype=kind, device=bins.device) if weights is None else weights
    else:
        digits.bitwise_and_(place.bins - 1)
        same = numbers >> place.high == place.found
        inside = same.to(kind) if weights is None else weights.masked_fill(~same, 0)
    return bins.zero_().scatter_add_(1, digits.to(torch.int64), inside.expand(numbers.shape))


def descend(filled: Callable[[Digit], Tensor], spare: Tensor, digit: int, dtype: torch.dtype) -> Tensor:
    """Return `[B, 1]`: the largest number of `dtype` in each row so that the weight of all lower numbers is at most
    `spare` `[B, 1]`. It is found `digit` bits at a time; `filled` returns the histogram of a round.
    """
    width = 8 * dtype.itemsize
    found = torch.zeros_like(spare, dtype=dtype)
    for high in range(width, 0, -digit):
        place = Digit(width, high, max(0, high - digit), found)
        weights = filled(place)
        upto = weights.cumsum(1)
        # The digit is the first bin with upto > spare. For the next round, subtract the weight of all lower bins.
        at = torch.searchsorted(upto, spare, right=True).clamp_(max=place.bins - 1)
        spare = spare - upto.gather(1, at) + weights.gather(1, at)
        at = at.to(dtype)
        found = at - (place.bins >> 1) if high == width else (found << (high - place.low)) | at
    return found


class RadixSelect:
    """Finds the number digit by digit from the top, without a sort: the histogram of a digit gives the bin, and the
    next round looks inside that bin (radix select, as in Alabi et al., "Fast k-selection algorithms for graphics
    processing units", 2012). Three histograms are enough for 32 bits in long rows.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._digit = max(4, min(DIGIT, numbers.shape[1].bit_length()))

    def least(self, needed: Tensor, weights: Tensor | None = None) -> Tensor:
        """Search with up to `DIGIT` bits per histogram; see `ThresholdSearch.least`."""
        rows, vocab = self._numbers.shape
        kind = torch.int32 if weights is None else torch.int64
        bins = torch.zeros(rows, 1 << self._digit, dtype=kind, device=needed.device)
        total = vocab if weights is None else weights.sum(1, keepdim=True)
        spare = total - needed.to(torch.int64)  # sum(weights >= x) >= needed  <=>  sum(weights < x) <= spare
        return descend(
            lambda place: histogram_(bins, self._numbers, place, weights), spare, self._digit, self._numbers.dtype
        )
