"""Targets of every family against `transformers` in float64: logits and all boundaries, in prefill and decode, on one
and two ranks.
"""

import pytest
import torch
from torch import Tensor

from tests.support.families import VOCAB, all_cases, family_checkpoint
from tests.unit.models.sharded import run_text

LENGTH = 75
CHUNKS = [31, 1, 30, *[1] * 4, 9]
"""Lengths: prefill chunks longer than any window, single decoded tokens, and one more chunk."""


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def text(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("family", "case"), all_cases())
def test_target_logits_and_boundaries_equal_transformers(family: str, case: str, record_property) -> None:  # type: ignore[no-untyped-def]
    checkpoint = family_checkpoint(family, case)
    tokens = text(1)
    logits, stream = checkpoint.oracle.forward(tokens)
    largest_error = 0.0
    for size in (1, 2):
        for ours, boundaries in run_text(checkpoint.folder, tokens, CHUNKS, size):
            assert len(boundaries) == len(stream)
            for index, (boundary, theirs) in enumerate(zip(boundaries, stream, strict=True)):
                largest_error = max(largest_error, relative_error(boundary, theirs))
                assert largest_error < 1e-9, f"boundary {index} on {size} ranks"
            largest_error = max(largest_error, relative_error(ours, logits))
            assert largest_error < 1e-9, f"logits on {size} ranks"
    record_property("max_relative_error", largest_error)
