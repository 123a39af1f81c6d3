"""Triton's kernels that group rows by experts and combine the experts' results match the torch kernels, and give the
same bits each time.
"""

import pytest
import torch

from cluster.kernels.torch_kernels import TorchKernels
from cluster.kernels.triton_kernels import TritonKernels
from tests.unit.kernels.test_product import DTYPES, assert_close, random_tensor

REFERENCE, TRITON = TorchKernels(), TritonKernels()


def choices(rows: int, active: int, experts: int) -> torch.Tensor:
    """Random ids of the active experts of each row, different within a row. Some experts have no rows."""
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, experts, generator=generator).mul_(torch.arange(experts) % 3).topk(active, 1).indices


@pytest.mark.parametrize(("active", "experts"), [(1, 1), (1, 5), (3, 5), (8, 40)])
def test_triton_expert_grouping_matches_reference(active: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kernels.triton_kernels.MAX_BLOCK_CHOICES", 16)
    for rows in (0, 1, 7, 40 if experts < 40 else 9):
        expert_ids = choices(rows, active, experts)
        actual, expected = TRITON.group(expert_ids, experts), REFERENCE.group(expert_ids, experts)
        for name, actual_field, expected_field in zip(actual._fields, actual, expected, strict=True):
            assert actual_field.dtype == expected_field.dtype and torch.equal(actual_field, expected_field), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_triton_expert_combine_matches_reference_and_is_deterministic(biased: bool, dtype: torch.dtype) -> None:
    for rows, active, experts, size in ((0, 2, 4, 8), (1, 1, 3, 5), (6, 3, 5, 70), (4, 6, 9, 1030)):
        expert_ids = choices(rows, active, experts)
        groups = REFERENCE.group(expert_ids, experts)
        results, weights = (
            random_tensor(rows * active, size, dtype=dtype),
            random_tensor(rows, active, dtype=dtype, seed=1),
        )
        bias = random_tensor(experts, size, dtype=dtype, seed=2) if biased else None
        actual = TRITON.combine(results, groups, weights, bias)
        expected = REFERENCE.combine(
            results.double(), groups, weights.double(), None if bias is None else bias.double()
        )
        assert actual.dtype == dtype and actual.shape == (rows, size)
        assert_close(actual, expected, dtype)
        if dtype == torch.float64 and not biased:
            assert torch.equal(actual, expected), "not the same sums in the same order"
        assert torch.equal(actual, TRITON.combine(results, groups, weights, bias))
