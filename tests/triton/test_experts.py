"""Rows by their experts and back: by Triton as by the twin, and the same each time."""

import pytest
import torch

from cluster.kernels.torch_kernels import TorchKernels
from cluster.kernels.triton_kernels import TritonKernels
from tests.unit.kernels.test_product import DTYPES, close, made

TWIN, OWN = TorchKernels(), TritonKernels()


def choices(rows: int, active: int, experts: int) -> torch.Tensor:
    """Different experts of each row; some experts have no rows."""
    dice = torch.Generator().manual_seed(rows)
    return torch.rand(rows, experts, generator=dice).mul_(torch.arange(experts) % 3).topk(active, 1).indices


@pytest.mark.parametrize(("active", "experts"), [(1, 1), (1, 5), (3, 5), (8, 40)])
def test_triton_expert_grouping_matches_reference(active: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kernels.triton_kernels.MAX_BLOCK_CHOICES", 16)
    for rows in (0, 1, 7, 40 if experts < 40 else 9):
        chosen = choices(rows, active, experts)
        given, expected = OWN.group(chosen, experts), TWIN.group(chosen, experts)
        for name, own, twin in zip(given._fields, given, expected, strict=True):
            assert own.dtype == twin.dtype and torch.equal(own, twin), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_triton_expert_combine_matches_reference_and_is_deterministic(biased: bool, dtype: torch.dtype) -> None:
    for rows, active, experts, size in ((0, 2, 4, 8), (1, 1, 3, 5), (6, 3, 5, 70), (4, 6, 9, 1030)):
        chosen = choices(rows, active, experts)
        groups = TWIN.group(chosen, experts)
        results, weights = made(rows * active, size, dtype=dtype), made(rows, active, dtype=dtype, seed=1)
        bias = made(experts, size, dtype=dtype, seed=2) if biased else None
        given = OWN.combine(results, groups, weights, bias)
        wide = TWIN.combine(results.double(), groups, weights.double(), None if bias is None else bias.double())
        assert given.dtype == dtype and given.shape == (rows, size)
        close(given, wide, dtype)
        if dtype == torch.float64 and not biased:
            assert torch.equal(given, wide), "the same sums in the same order"
        assert torch.equal(given, OWN.combine(results, groups, weights, bias))
