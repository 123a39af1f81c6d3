"""Who sees whom within a window, as bits: bit j % 32 of a row's word j // 32 says whether it sees window slot j."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 32


def words(width: int) -> int:
    """How many words hold `width` bits."""
    return -(-width // WORD)


def packed(visible: Tensor) -> Tensor:
    """The bits `[.., ceil(w / 32)]` int32 of a mask `[.., w]` of what each row sees."""
    width = visible.shape[-1]
    if width <= WORD:
        return (visible * _places(width, visible.device)).sum(-1, keepdim=True, dtype=torch.int32)
    padded = F.pad(visible.to(torch.int64), (0, -width % WORD)).view(*visible.shape[:-1], words(width), WORD)
    numbers: Tensor = padded << torch.arange(WORD, device=visible.device)
    return numbers.sum(-1).to(torch.int32)


def visible_in(bits: Tensor, width: int) -> Tensor:
    """The mask `[.., w]` that `bits` `[.., ceil(w / 32)]` stand for."""
    if width <= WORD:
        return (bits & _places(width, bits.device)) != 0
    return (bits[..., None] & _places(WORD, bits.device) != 0).flatten(-2)[..., :width]


@cache
def _places(count: int, device: torch.device) -> Tensor:
    """The numbers of the first `count` bits of a word, int32."""
    return (1 << torch.arange(count, device=device)).to(torch.int32)


@cache
def line_bits(rows: int, width: int, device: torch.device) -> Tensor:
    """The bits `[1, rows, words]` of the last `rows` of `width` rows in a line: each sees itself and all before it."""
    return packed(in_line(rows, width, device))


@cache
def own_bits(start: int, rows: int, width: int, device: torch.device) -> Tensor:
    """The bits `[1, rows, words]` of rows that see nothing but their own slot: slot `start` and the next ones."""
    return packed(torch.eye(width, dtype=torch.bool, device=device)[None, start : start + rows])


def in_line(rows: int, width: int, device: torch.device) -> Tensor:
    """The mask `[1, rows, width]` of `line_bits`."""
    return torch.ones(1, rows, width, dtype=torch.bool, device=device).tril_(width - rows)
