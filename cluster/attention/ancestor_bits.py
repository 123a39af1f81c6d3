"""Ancestor masks as bits. Bit j % 32 of word j // 32 of a row is set if the row sees window slot j; the window is the
slots of a request after its committed tokens, which hold the nodes of its tree.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 32


def word_count(width: int) -> int:
    """Return the number of words that hold `width` bits."""
    return -(-width // WORD_BITS)


def pack_bits(visible: Tensor) -> Tensor:
    """Pack a visibility mask `[.., w]` to bits `[.., ceil(w / 32)]`, int32."""
    width = visible.shape[-1]
    if (
        width <= WORD_BITS
    ):  # the usual case, with fewer operators; 2 ** 31 wraps in int32, so the sum has the right bits
        return (visible * _bit_values(width, visible.device)).sum(-1, keepdim=True, dtype=torch.int32)
    padded = F.pad(visible.to(torch.int64), (0, -width % WORD_BITS)).view(
        *visible.shape[:-1], word_count(width), WORD_BITS
    )
    shifted_bits: Tensor = padded << torch.arange(WORD_BITS, device=visible.device)
    return shifted_bits.sum(-1).to(torch.int32)


def unpack_bits(bits: Tensor, width: int) -> Tensor:
    """Unpack `bits` `[.., ceil(w / 32)]` to the visibility mask `[.., w]`."""
    if width <= WORD_BITS:
        return (bits & _bit_values(width, bits.device)) != 0
    return (bits[..., None] & _bit_values(WORD_BITS, bits.device) != 0).flatten(-2)[..., :width]


@cache
def _bit_values(count: int, device: torch.device) -> Tensor:
    """Return the values 2 ** j of the first `count` bits of a word, int32; 2 ** 31 wraps to the lowest int32."""
    return (1 << torch.arange(count, device=device)).to(torch.int32)


@cache
def chain_bits(rows: int, width: int, device: torch.device) -> Tensor:
    """Return the bits `[1, rows, words]` of the last `rows` rows of a chain of `width` slots. A row of a chain sees its
    own slot and all slots before it.

    The result is cached, so `Visibility.of` can recognise a chain by the identity of the tensor.
    """
    return pack_bits(chain_mask(rows, width, device))


@cache
def self_bits(start: int, rows: int, width: int, device: torch.device) -> Tensor:
    """Return the bits `[1, rows, words]` of `rows` rows that see only their own window slot. Row i is in slot
    `start` + i of `width`.
    """
    return pack_bits(torch.eye(width, dtype=torch.bool, device=device)[None, start : start + rows])


def chain_mask(rows: int, width: int, device: torch.device) -> Tensor:
    """Return the mask `[1, rows, width]` that `chain_bits` packs: row i sees slots 0 to width - rows + i."""
    return torch.ones(1, rows, width, dtype=torch.bool, device=device).tril_(width - rows)
