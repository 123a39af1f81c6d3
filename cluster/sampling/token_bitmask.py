"""Applying token bitmasks of grammars to logits: by torch operators, and in C for CPUs.

Legend: T rows, V token ids, v columns.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.sampling.noise import at_least_float32
from cluster.sampling.penalties import BANNED_TOKEN_BIAS

DISALLOWED_TOKEN_BIAS = 1000 * BANNED_TOKEN_BIAS
"""This is added to the logit of a token that the grammar does not allow. Such a token gets a lower logit than any
banned token, so the grammar prevails over bans. The factor is 1000, because several bans of a token add up, and a
repetition penalty multiplies a ban by up to 100.
"""
TOKENS_PER_WORD = 32  # tokens per word of a mask

ApplyTokenBitmask = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function that returns what `apply_token_bitmask` returns for the same arguments."""


def apply_token_bitmask(logits: Tensor, masks: Tensor, ids: Tensor | None) -> Tensor:
    """Return `logits` `[T, v]`, in float32 or wider, with `DISALLOWED_TOKEN_BIAS` added where `masks` has a 0. This is
    the reference implementation of `ApplyTokenBitmask`.

    `masks` `[T, words]` int32 has one bit per token id. A mask of zeros allows nothing and makes its row NaN. `ids`
    `[v]` are the token ids of the columns. If `ids` is None, column i is token id i.
    """
    wide_logits, mask_bytes = logits.to(at_least_float32(logits.dtype)), masks.view(torch.uint8)
    mask_logits = (
        _byte_logits(wide_logits.dtype, wide_logits.device)
        .index_select(0, mask_bytes.flatten().int())
        .view(masks.shape[0], masks.shape[1] * TOKENS_PER_WORD)
    )
    mask_logits = mask_logits[:, : logits.shape[1]] if ids is None else mask_logits.index_select(1, ids)
    empty = (masks == 0).all(1, keepdim=True)
    return wide_logits + mask_logits.masked_fill(empty, float("nan"))


@cache  # never freed: captured CUDA graphs read this tensor
def _byte_logits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table `[256, 8]`. For each value of a byte of a mask, it has the numbers that are added to the logits of
    the byte's eight tokens.
    """
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(bits == 0).to(device, dtype) * DISALLOWED_TOKEN_BIAS


class CTokenBitmask:
    """`ApplyTokenBitmask` in C; results must equal those of `apply_token_bitmask` to the bit."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, logits: Tensor, masks: Tensor, ids: Tensor | None) -> Tensor:
        """Apply the masks in one pass; arguments and result as in `apply_token_bitmask`.

        Raises:
            ValueError: the masks do not fit the logits.
        """
        (count, size), words = logits.shape, masks.shape[1]
        if masks.shape[0] != count or (ids is None and words * TOKENS_PER_WORD < size):
            raise ValueError(f"masks {list(masks.shape)} do not fit logits {list(logits.shape)}")
        logits, masks = logits if logits.stride(1) == 1 else logits.contiguous(), masks.contiguous()
        out = logits.new_empty(count, size, dtype=at_least_float32(logits.dtype))
        ids_pointer = None if ids is None else ids.data_ptr()
        sizes = count, size, logits.stride(0), words, DISALLOWED_TOKEN_BIAS, torch.get_num_threads()
        function = self._library.functions["bar", logits.dtype]
        native(function, logits.data_ptr(), masks.data_ptr(), ids_pointer, out.data_ptr(), *sizes)
        return out
