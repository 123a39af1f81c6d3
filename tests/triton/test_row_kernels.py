"""Norms, rotations and activations by Triton equal their twins, for odd sizes, strides and no rows at all."""

import pytest
import torch

from cluster.kernels.interface import Activation
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kernels.triton_kernels import TritonKernels
from tests.unit.kernels.test_product import DTYPES, close, made
from tests.unit.kernels.test_rows import check_rotations, wide

TWIN, OWN = TorchKernels(), TritonKernels()
ROWS = (0, 1, 3)
KINDS = (Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 1.5))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 65, 500])
def test_triton_norm_and_add_norm_match_reference(size: int, dtype: torch.dtype) -> None:
    for count in ROWS:
        rows, more = made(count, 2 * size, dtype=dtype)[:, :size], made(count, size, dtype=dtype, seed=1)
        for scale in (made(size, dtype=dtype, seed=2), made(size, dtype=wide(dtype), seed=2)):
            given = OWN.norm(rows, scale, 1e-5)
            assert given.dtype == dtype
            close(given, TWIN.norm(rows.double(), scale.double(), 1e-5), dtype)
            total, normed = OWN.add_norm(rows.contiguous(), more, scale, 1e-5)
            if dtype == torch.bfloat16:  # to which the interpreter does not round, but cuts off
                close(total, (rows + more).double(), dtype)
            else:
                assert torch.equal(total, rows + more)
            assert torch.equal(normed, OWN.norm(total, scale, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "turned"), [(4, 4), (10, 6), (64, 64), (192, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_triton_rotary_embedding_matches_reference(size: int, turned: int, normed: bool, dtype: torch.dtype) -> None:
    check_rotations(OWN, ROWS, size, turned, normed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_triton_activations_match_reference(kind: Activation, dtype: torch.dtype) -> None:
    for count in ROWS:
        for size in (1, 100, 1500):
            both = made(count, 2 * size, dtype=dtype) * 4
            close(OWN.activate(both, kind), TWIN.activate(both.double(), kind), dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_triton_activations_match_reference_on_extreme_values(kind: Activation) -> None:
    extremes = torch.tensor([0.0, -0.0, 1e-30, 80.0, -80.0, 89.0, -89.0, 1e4, -1e4, float("inf"), float("nan")])
    both = torch.cat([extremes, extremes.new_ones(extremes.shape)])[None].double()
    given, expected = OWN.activate(both, kind), TWIN.activate(both, kind)
    assert torch.allclose(given, expected, atol=1e-12, rtol=1e-12, equal_nan=True)
