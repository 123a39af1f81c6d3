"""Visibility as an additive bias, 0 for visible cells and -inf for masked ones. Used by the torch backend only.

The label of a cell (the K and V of one token) is its position in the sequence. A row sees its request's committed
tokens and, among the nodes of the tree (in the window's slots), its ancestors and itself. These are one cell for each
position up to its own. So the labels can be computed from the bits of the ancestor mask, and from the labels what
sliding windows and the limit `first` (`AttentionMetadata`) hide.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cluster.attention.ancestor_bits import chain_bits, chain_mask, unpack_bits

MASKED = float("-inf")


def mask_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias of the visibility mask `visible`, in the shape of the mask."""
    return torch.where(visible, *_visible_and_masked_bias(dtype, visible.device))


@cache
def _visible_and_masked_bias(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the biases of a visible and of a masked cell, as scalars. They are cached, so that steps create none."""
    return torch.zeros((), dtype=dtype, device=device), torch.full((), MASKED, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Visibility:
    """What q rows of each of R requests see: all committed tokens and, of w window slots (the slots after the committed
    tokens), those that the mask `visible` `[R or 1, q, w]` has. Rows at label `first` and above see no label below
    `first`. `bias` is the bias of `visible`; `all_visible` is True only if that bias is 0 everywhere.
    """

    visible: Tensor
    bias: Tensor
    first: int
    all_visible: bool = False

    @staticmethod
    def of(bits: Tensor, width: int, first: int, dtype: torch.dtype) -> "Visibility":
        """Return the visibility for the ancestor `bits` `[R or 1, q, ceil(w / 32)]` of trees with w = `width` window
        slots. Masks of chains are cached.
        """
        rows, device = bits.shape[1], bits.device
        if bits is chain_bits(rows, width, device):
            return Visibility(*_chain_visibility(rows, width, dtype, device), first, rows == 1)
        visible = unpack_bits(bits, width)
        return Visibility(visible, mask_bias(visible, dtype), first)

    @staticmethod
    def text(rows: int, first: int, dtype: torch.dtype, device: torch.device) -> "Visibility":
        """Return the visibility of the rows of a prompt chunk: of the chunk, each row sees the rows up to itself."""
        visible = chain_mask(rows, rows, device)
        return Visibility(visible, mask_bias(visible, dtype), first)

    def limits_committed_tokens(self, sliding_window: int | None) -> bool:
        """Return whether the sliding window or `first` may hide committed tokens from a row."""
        return sliding_window is not None or self.first > 0

    def limited_bias(self, cell_labels: Tensor, committed_lens: Tensor, sliding_window: int | None) -> Tensor:
        """Return the bias `[R, q, P + w]` with the sliding window and `first` applied. The P cells have the
        `cell_labels` `[R, P]` (-1 for padding); w window slots follow. `committed_lens` `[R]` tokens are committed.
        """
        # If slot j is the depth-th visible slot of a row, its label is lens + depth - 1. A row's last visible slot is
        # the row itself, so the last column has the row's own label. Labels of masked slots are not used.
        depths = self.visible.cumsum(-1)
        slot_labels = committed_lens[:, None, None] + depths - 1
        row_label = slot_labels[..., -1:]
        # The lowest label that the row sees: own - window + 1, or the first of its chunk. For rows at `first` or above
        # it is at least `first`. It is never below 0, so padding cells, labelled -1, are always masked.
        if sliding_window is None:
            lowest_label = torch.zeros_like(row_label)
        elif sliding_window < 0:
            lowest_label = (row_label - row_label.remainder(-sliding_window)).clamp_(min=0)
        else:
            lowest_label = (row_label - (sliding_window - 1)).clamp_(min=0)
        if self.first:
            lowest_label = torch.where(row_label >= self.first, lowest_label.clamp(min=self.first), lowest_label)
        return mask_bias(
            torch.cat([cell_labels[:, None] >= lowest_label, self.visible & (slot_labels >= lowest_label)], 2),
            self.bias.dtype,
        )


@cache
def _chain_visibility(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mask that `chain_bits` packs, and its bias."""
    visible = chain_mask(rows, width, device)
    return visible, mask_bias(visible, dtype)
