"""Every target family against `transformers` in float64: logits, all boundaries, prefill, decode, one rank and two."""

import pytest
import torch
from torch import Tensor

from tests.families import VOCAB, all_cases, made
from tests.unit.models.sharded import run_text

LENGTH = 75
CHUNKS = [31, 1, 30, *[1] * 4, 9]
"""Prefill in chunks longer than any window, then decoding, and a chunk after it."""


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def text(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("family", "case"), all_cases())
def test_target_logits_and_boundaries_equal_transformers(family: str, case: str, record_property) -> None:  # type: ignore[no-untyped-def]
    one = made(family, case)
    tokens = text(1)
    logits, stream = one.oracle.forward(tokens)
    worst = 0.0
    for size in (1, 2):
        for ours, boundaries in run_text(one.folder, tokens, CHUNKS, size):
            assert len(boundaries) == len(stream)
            for at, (mine, theirs) in enumerate(zip(boundaries, stream, strict=True)):
                worst = max(worst, relative(mine, theirs))
                assert worst < 1e-9, f"boundary {at} on {size} ranks"
            worst = max(worst, relative(ours, logits))
            assert worst < 1e-9, f"logits on {size} ranks"
    record_property("max_relative_error", worst)
