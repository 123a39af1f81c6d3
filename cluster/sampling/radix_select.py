"""Weighted selection in rows of integers: radix select, and a reference implementation by sorting.

Both find, for each row, the largest number x for which the weights of all numbers >= x sum to at least `needed_weight`.
Legend: B rows, V numbers of each.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

SORT_LIMIT = 1 << 14  # up to this many numbers, sorting is faster, as it takes fewer operators
MAX_DIGIT_BITS = 11  # most bits of one histogram; short rows use fewer, because their histograms would be mostly empty


class ThresholdSearch(Protocol):
    """Searches the rows of integers `[B, V]`."""

    def threshold(self, needed_weight: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return `[B, 1]`: the largest x of each row for which the `weights` of all numbers >= x sum to at least
        `needed_weight`.

        `weights` `[B, V]` are int64, not negative. If `weights` is None, each number weighs 1. `needed_weight` `[B, 1]`
        is between 1 and the sum of the weights.
        """


def search(numbers: Tensor) -> ThresholdSearch:
    """Return the faster search for integers `[B, V]` of this size."""
    return SortedSelect(numbers) if numbers.numel() <= SORT_LIMIT else RadixSelect(numbers)


class SortedSelect:
    """Sorts the rows. The reference implementation of `RadixSelect`."""

    def __init__(self, numbers: Tensor) -> None:
        self._sorted, self._order = numbers.sort(1, descending=True)

    def threshold(self, needed_weight: Tensor, weights: Tensor | None = None) -> Tensor:
        """Find the number where the running sum of weights, from the highest down, reaches `needed_weight`."""
        if weights is None:
            return self._sorted.gather(1, needed_weight - 1)
        cumulative = weights.gather(1, self._order).cumsum(1)
        index = torch.searchsorted(cumulative, needed_weight).clamp_(max=self._order.shape[1] - 1)
        return self._sorted.gather(1, index)


class Digit(NamedTuple):
    """A digit, which one step of the search finds: bits `low` to `high - 1` of numbers of `width` bits. `prefix`
    `[B, 1]` are the bits above the digit, which are known already.
    """

    width: int
    high: int
    low: int
    prefix: Tensor

    @property
    def bins(self) -> int:
        """Return the number of values of the digit."""
        return 1 << (self.high - self.low)


def histogram_(bins: Tensor, numbers: Tensor, digit: Digit, weights: Tensor | None = None) -> Tensor:
    """Fill `bins` `[B, >= digit.bins]` and return it: for each value of `digit`, the sum of the `weights` of the
    `numbers` `[B, V]` whose digit has this value. Only numbers with the prefix `digit.prefix` count. If `weights` is
    None, each number weighs 1.
    """
    digit_values, dtype = numbers >> digit.low, bins.dtype
    if digit.high == digit.width:
        digit_values.add_(digit.bins >> 1)  # the top digit is signed: shift it to 0 and above
        counted_weights = torch.ones((), dtype=dtype, device=bins.device) if weights is None else weights
    else:
        digit_values.bitwise_and_(digit.bins - 1)
        prefix_matches = numbers >> digit.high == digit.prefix
        counted_weights = prefix_matches.to(dtype) if weights is None else weights.masked_fill(~prefix_matches, 0)
    return bins.zero_().scatter_add_(1, digit_values.to(torch.int64), counted_weights.expand(numbers.shape))


def radix_descend(
    histogram: Callable[[Digit], Tensor], remaining_weight: Tensor, digit_bits: int, dtype: torch.dtype
) -> Tensor:
    """Return `[B, 1]`: the largest number of `dtype` in each row for which the weight of all lower numbers is at most
    `remaining_weight` `[B, 1]`. Find `digit_bits` bits at a time; `histogram` returns the histogram of a digit.
    """
    width = 8 * dtype.itemsize
    prefix = torch.zeros_like(remaining_weight, dtype=dtype)
    for high in range(width, 0, -digit_bits):
        digit = Digit(width, high, max(0, high - digit_bits), prefix)
        bin_weights = histogram(digit)
        cumulative = bin_weights.cumsum(1)
        # The digit is the first bin with cumulative > remaining_weight. For the next digit, subtract the weight of all
        # lower bins.
        bin_index = torch.searchsorted(cumulative, remaining_weight, right=True).clamp_(max=digit.bins - 1)
        remaining_weight = remaining_weight - cumulative.gather(1, bin_index) + bin_weights.gather(1, bin_index)
        bin_index = bin_index.to(dtype)
        prefix = bin_index - (digit.bins >> 1) if high == width else (prefix << (high - digit.low)) | bin_index
    return prefix


class RadixSelect:
    """Finds the number digit by digit from the top, without a sort: the histogram of a digit gives the bin, and the
    histogram of the next digit counts only numbers of that bin (radix select, as in Alabi et al., "Fast k-selection
    algorithms for graphics processing units", 2012). Three histograms are enough for 32 bits in long rows.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._digit_bits = max(4, min(MAX_DIGIT_BITS, numbers.shape[1].bit_length()))

    def threshold(self, needed_weight: Tensor, weights: Tensor | None = None) -> Tensor:
        """Search with up to `MAX_DIGIT_BITS` bits per histogram; see `ThresholdSearch.threshold`."""
        rows, vocab = self._numbers.shape
        dtype = torch.int32 if weights is None else torch.int64
        bins = torch.zeros(rows, 1 << self._digit_bits, dtype=dtype, device=needed_weight.device)
        total = vocab if weights is None else weights.sum(1, keepdim=True)
        # The weight of numbers >= x is at least needed_weight  <=>  that of numbers < x is at most remaining_weight.
        remaining_weight = total - needed_weight.to(torch.int64)
        return radix_descend(
            lambda digit: histogram_(bins, self._numbers, digit, weights),
            remaining_weight,
            self._digit_bits,
            self._numbers.dtype,
        )
