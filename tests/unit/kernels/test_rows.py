"""C norms, rotary embeddings and activations match the torch kernels in float64, for odd sizes, strides and no rows."""

import pytest
import torch
from torch import Tensor

from cluster.kernels.interface import Activation, Angles, HeadNorms, Kernels
from cluster.kernels.torch_kernels import TorchKernels
from tests.unit.kernels.library import c_kernels
from tests.unit.kernels.test_product import DTYPES, assert_close, random_tensor

REFERENCE = TorchKernels()
ROWS = (0, 1, 3, 70)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 65, 256, 500])
def test_c_norm_and_add_norm_match_reference(size: int, dtype: torch.dtype) -> None:
    for count in ROWS:
        rows, added_rows = (
            random_tensor(count, 2 * size, dtype=dtype)[:, :size],
            random_tensor(count, size, dtype=dtype, seed=1),
        )
        for scale in (random_tensor(size, dtype=dtype, seed=2), random_tensor(size, dtype=scale_dtype(dtype), seed=2)):
            expected = REFERENCE.norm(rows.double(), scale.double(), 1e-5)
            actual = c_kernels().norm(rows, scale, 1e-5)
            assert actual.dtype == dtype
            assert_close(actual, expected, dtype)
            contiguous_rows = rows.contiguous()
            total, normed = c_kernels().add_norm(contiguous_rows, added_rows, scale, 1e-5)
            assert torch.equal(total, contiguous_rows + added_rows)
            assert torch.equal(normed, c_kernels().norm(total, scale, 1e-5))
            assert_close(c_kernels().add_norm(contiguous_rows, None, scale, 1e-5)[1], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotary_dim"), [(4, 4), (10, 6), (64, 64), (96, 32), (192, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_c_rotary_embedding_matches_reference(size: int, rotary_dim: int, normed: bool, dtype: torch.dtype) -> None:
    check_rotations(c_kernels(), ROWS, size, rotary_dim, normed, dtype)


def check_rotations(
    kernels: Kernels, counts: tuple[int, ...], size: int, rotary_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    for count in counts:
        packed = random_tensor(count, 7, size + 3, dtype=dtype)
        angles = [random_tensor(count, 1, rotary_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
        q, k = (random_tensor(size, dtype=dtype, seed=seed) for seed in (3, 4))
        expected = packed.double()
        norms = HeadNorms(3, q.double(), k.double(), 1e-6) if normed else None
        REFERENCE.rotate(expected[:, 1:6, 3:], Angles(*(angle.double() for angle in angles)), norms)
        norms = HeadNorms(3, q, k, 1e-6) if normed else None
        kernels.rotate(packed[:, 1:6, 3:], Angles(*angles), norms)
        assert_close(packed, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 1.5), Activation("clamped_silu", limit=0.5)],
    ids=str,
)
def test_c_activations_match_reference(kind: Activation, dtype: torch.dtype) -> None:
    for count in ROWS:
        for size in (1, 5, 16, 100):
            gate_up = random_tensor(count, 2 * size, dtype=dtype) * 4
            assert_close(c_kernels().activate(gate_up, kind), REFERENCE.activate(gate_up.double(), kind), dtype)


@pytest.mark.parametrize(
    "kind",
    [Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 7.0), Activation("clamped_silu", limit=0.5)],
    ids=str,
)
def test_c_activations_match_reference_on_extreme_values(kind: Activation) -> None:
    extremes = [0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 89.0, -89.0, 1e4, -1e4, 1e30, -1e30, float("inf"), float("nan")]
    for dtype in (torch.float64, torch.float32):
        gates = torch.tensor(extremes, dtype=dtype)
        gate_up = torch.cat([gates, torch.ones_like(gates)])[None]
        expected, actual = REFERENCE.activate(gate_up.double(), kind), c_kernels().activate(gate_up, kind)
        assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_unsupported_scales_and_strided_heads_fall_back_to_the_reference() -> None:
    """C supports neither strided scales, nor scales of another dtype, nor heads that are not contiguous."""
    rows, added_rows = random_tensor(3, 8, dtype=torch.float32), random_tensor(3, 8, dtype=torch.float32, seed=1)
    for scale in (random_tensor(16, dtype=torch.float32)[::2], random_tensor(8, dtype=torch.float64)):
        assert_close(
            c_kernels().norm(rows, scale, 1e-5), REFERENCE.norm(rows.double(), scale.double(), 1e-5), torch.float32
        )
        total, normed = c_kernels().add_norm(rows, added_rows, scale, 1e-5)
        assert_close(normed, REFERENCE.norm(total.double(), scale.double(), 1e-5), torch.float32)
    heads, expected_heads = (random_tensor(3, 4, 16, dtype=dtype)[..., ::2] for dtype in (torch.float32, torch.float64))
    angles = [random_tensor(3, 1, 8, dtype=torch.float32, seed=seed) for seed in (1, 2)]
    c_kernels().rotate(heads, Angles(*angles))
    REFERENCE.rotate(expected_heads, Angles(*(angle.double() for angle in angles)))
    assert_close(heads.contiguous(), expected_heads.contiguous(), torch.float32)


def test_norm_keeps_non_finite_values_in_their_own_row() -> None:
    rows: Tensor = random_tensor(4, 32, dtype=torch.float32)
    rows[1, 3], rows[2, 5] = float("inf"), float("nan")
    normed_rows = c_kernels().norm(rows, torch.ones(32), 1e-5)
    assert normed_rows[[0, 3]].isfinite().all()
    assert normed_rows[1, 3].isnan() and normed_rows[2].isnan().all()
