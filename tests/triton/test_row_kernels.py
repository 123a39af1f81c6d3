"""Triton's norms, rotations and activations match the torch kernels, for odd sizes, strided rows and no rows at all."""

import pytest
import torch

from cluster.kernels.interface import Activation
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kernels.triton_kernels import TritonKernels
from tests.unit.kernels.test_product import DTYPES, assert_close, random_tensor
from tests.unit.kernels.test_rows import check_rotations, scale_dtype

REFERENCE, TRITON = TorchKernels(), TritonKernels()
ROWS = (0, 1, 3)
KINDS = (
    Activation(),
    Activation("gelu_tanh"),
    Activation("clamped", 1.702, 1.5),
    Activation("clamped_silu", limit=0.5),
)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 65, 500])
def test_triton_norm_and_add_norm_match_reference(size: int, dtype: torch.dtype) -> None:
    for count in ROWS:
        rows, added_rows = (
            random_tensor(count, 2 * size, dtype=dtype)[:, :size],
            random_tensor(count, size, dtype=dtype, seed=1),
        )
        for scale in (random_tensor(size, dtype=dtype, seed=2), random_tensor(size, dtype=scale_dtype(dtype), seed=2)):
            actual = TRITON.norm(rows, scale, 1e-5)
            assert actual.dtype == dtype
            assert_close(actual, REFERENCE.norm(rows.double(), scale.double(), 1e-5), dtype)
            total, normed = TRITON.add_norm(rows.contiguous(), added_rows, scale, 1e-5)
            if dtype == torch.bfloat16:  # Triton's interpreter truncates to bfloat16 and does not round
                assert_close(total, (rows + added_rows).double(), dtype)
            else:
                assert torch.equal(total, rows + added_rows)
            assert torch.equal(normed, TRITON.norm(total, scale, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "turned"), [(4, 4), (10, 6), (64, 64), (192, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_triton_rotary_embedding_matches_reference(size: int, turned: int, normed: bool, dtype: torch.dtype) -> None:
    check_rotations(TRITON, ROWS, size, turned, normed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_triton_activations_match_reference(kind: Activation, dtype: torch.dtype) -> None:
    for count in ROWS:
        for size in (1, 100, 1500):
            gate_and_up = random_tensor(count, 2 * size, dtype=dtype) * 4
            assert_close(TRITON.activate(gate_and_up, kind), REFERENCE.activate(gate_and_up.double(), kind), dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_triton_activations_match_reference_on_extreme_values(kind: Activation) -> None:
    extremes = torch.tensor([0.0, -0.0, 1e-30, 80.0, -80.0, 89.0, -89.0, 1e4, -1e4, float("inf"), float("nan")])
    gate_and_up = torch.cat([extremes, extremes.new_ones(extremes.shape)])[None].double()
    actual, expected = TRITON.activate(gate_and_up, kind), REFERENCE.activate(gate_and_up, kind)
    assert torch.allclose(actual, expected, atol=1e-12, rtol=1e-12, equal_nan=True)
