"""What each row sees as a bias, 0 where it may look and minus infinity where not: the torch twin's private form.

A cell's label is its position. A row sees its request's committed tokens and, of the window, its ancestors and itself:
one cell for each position up to its own. So sliding windows, and the first label that is seen, follow from the bits.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cluster.attention.ancestor_bits import in_line, line_bits, visible_in

MASKED = float("-inf")


def bias_of(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias of a mask of what each row sees, of the same shape."""
    return torch.where(visible, *_either(dtype, visible.device))


@cache
def _either(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The bias of what is seen, and of what is not."""
    return torch.zeros((), dtype=dtype, device=device), torch.full((), MASKED, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Visibility:
    """What q rows of each of R requests see: of the window's w slots what `visible` `[R or 1, q, w]` says, and all
    committed tokens; but rows at label `first` and above see nothing below it. `bias` is that of `visible`; `whole`
    says that it is 0 everywhere.
    """

    visible: Tensor
    bias: Tensor
    first: int
    whole: bool = False

    @staticmethod
    def of(bits: Tensor, width: int, first: int, dtype: torch.dtype) -> "Visibility":
        """By bits `[R or 1, q, ceil(w / 32)]`; those of rows in a line are known, so that a chain pays nothing."""
        rows, device = bits.shape[1], bits.device
        if bits is line_bits(rows, width, device):
            return Visibility(*_line(rows, width, dtype, device), first, rows == 1)
        visible = visible_in(bits, width)
        return Visibility(visible, bias_of(visible, dtype), first)

    @staticmethod
    def text(rows: int, first: int, dtype: torch.dtype, device: torch.device) -> "Visibility":
        """Rows of a text."""
        visible = in_line(rows, rows, device)
        return Visibility(visible, bias_of(visible, dtype), first)

    def narrows(self, sliding_window: int | None) -> bool:
        """Whether a row may see less than all committed tokens."""
        return sliding_window is not None or self.first > 0

    def narrowed(self, labels: Tensor, lens: Tensor, sliding_window: int | None) -> Tensor:
        """The bias `[R, q, P + w]` over cells with `labels` `[R, P]`, -1 where nobody looks, then over the window;
        `lens` `[R]` tokens are committed.
        """
        depth = self.visible.cumsum(-1)
        label = lens[:, None, None] + depth - 1  # of the window's slots, where a row sees them
        own = label[..., -1:]
        low = torch.zeros_like(own) if sliding_window is None else (own - (sliding_window - 1)).clamp_(min=0)
        if self.first:
            low = torch.where(own >= self.first, low.clamp(min=self.first), low)
        return bias_of(torch.cat([labels[:, None] >= low, self.visible & (label >= low)], 2), self.bias.dtype)


@cache
def _line(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The mask and the bias of `line_bits`."""
    visible = in_line(rows, width, device)
    return visible, bias_of(visible, dtype)
