"""Token bitmasks: the torch reference against the definition, and C against the reference, bit for bit."""

import pytest
import torch
from torch import Tensor

from cluster.sampling.noise import at_least_float32
from cluster.sampling.token_bitmask import DISALLOWED_TOKEN_BIAS, TOKENS_PER_WORD, CTokenBitmask, apply_token_bitmask
from tests.unit.kernels.library import c_kernels

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SIZES = (1, 31, 32, 33, 64, 100, 515)


def random_logits_and_masks(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random logits with a row stride above `size`, and random masks; mask 1 is empty, mask 2 allows all."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size + 3, generator=generator).to(dtype)[:, :size]
    word_count = -(-size // TOKENS_PER_WORD)
    masks = torch.randint(-(2**31), 2**31, (rows, word_count), generator=generator, dtype=torch.int64).to(torch.int32)
    if rows > 2:
        masks[1], masks[2] = 0, -1
    return logits, masks


def equal_with_nan(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_reference_masks_tokens_that_the_bitmask_does_not_allow(size: int, dtype: torch.dtype) -> None:
    logits, masks = random_logits_and_masks(4, size, dtype)
    masked = apply_token_bitmask(logits, masks, None)
    assert masked.dtype == at_least_float32(dtype)
    for row in range(4):
        for token in range(size):
            allowed = masks[row, token // TOKENS_PER_WORD].item() >> token % TOKENS_PER_WORD & 1
            unmasked = logits[row, token].to(masked.dtype)
            expected = unmasked + (float("nan") if row == 1 else 0.0 if allowed else DISALLOWED_TOKEN_BIAS)
            assert equal_with_nan(masked[row, token], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_c_bitmask_equals_the_torch_reference_bit_for_bit(size: int, dtype: torch.dtype) -> None:
    library = c_kernels().library
    assert library is not None
    c_bitmask = CTokenBitmask(library)
    for rows in (0, 1, 4, 70):
        logits, masks = random_logits_and_masks(rows, size, dtype)
        assert equal_with_nan(c_bitmask(logits, masks, None), apply_token_bitmask(logits, masks, None))
        ids = torch.randperm(size, generator=torch.Generator().manual_seed(rows))[: size // 2 + 1]
        assert equal_with_nan(
            c_bitmask(logits[:, : len(ids)], masks, ids), apply_token_bitmask(logits[:, : len(ids)], masks, ids)
        )


def test_c_bitmask_refuses_masks_of_the_wrong_shape() -> None:
    library = c_kernels().library
    assert library is not None
    logits, masks = random_logits_and_masks(4, 100, torch.float32)
    for wrong in (masks[:3], masks[:, :3]):
        with pytest.raises(ValueError, match="do not fit"):
            CTokenBitmask(library)(logits, wrong, None)
