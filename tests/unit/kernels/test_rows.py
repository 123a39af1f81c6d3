"""Norms, rotations and activations equal their twins in float64, for odd sizes, strides and no rows at all."""

import pytest
import torch
from torch import Tensor

from cluster.kernels.interface import Activation, Angles, HeadNorms, Kernels
from cluster.kernels.torch_kernels import TorchKernels
from tests.unit.kernels.library import c_kernels
from tests.unit.kernels.test_product import DTYPES, close, made

TWIN = TorchKernels()
ROWS = (0, 1, 3, 70)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 65, 256, 500])
def test_c_norm_and_add_norm_match_reference(size: int, dtype: torch.dtype) -> None:
    for count in ROWS:
        rows, more = made(count, 2 * size, dtype=dtype)[:, :size], made(count, size, dtype=dtype, seed=1)
        for scale in (made(size, dtype=dtype, seed=2), made(size, dtype=wide(dtype), seed=2)):
            expected = TWIN.norm(rows.double(), scale.double(), 1e-5)
            given = c_kernels().norm(rows, scale, 1e-5)
            assert given.dtype == dtype
            close(given, expected, dtype)
            whole = rows.contiguous()
            total, normed = c_kernels().add_norm(whole, more, scale, 1e-5)
            assert torch.equal(total, whole + more)
            assert torch.equal(normed, c_kernels().norm(total, scale, 1e-5))
            close(c_kernels().add_norm(whole, None, scale, 1e-5)[1], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "turned"), [(4, 4), (10, 6), (64, 64), (96, 32), (192, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_c_rotary_embedding_matches_reference(size: int, turned: int, normed: bool, dtype: torch.dtype) -> None:
    check_rotations(c_kernels(), ROWS, size, turned, normed, dtype)


def check_rotations(
    kernels: Kernels, counts: tuple[int, ...], size: int, turned: int, normed: bool, dtype: torch.dtype
) -> None:
    for count in counts:
        packed = made(count, 7, size + 3, dtype=dtype)
        angles = [made(count, 1, turned, dtype=dtype, seed=seed) for seed in (1, 2)]
        q, k = (made(size, dtype=dtype, seed=seed) for seed in (3, 4))
        twin = packed.double()
        norms = HeadNorms(3, q.double(), k.double(), 1e-6) if normed else None
        TWIN.rotate(twin[:, 1:6, 3:], Angles(*(one.double() for one in angles)), norms)
        norms = HeadNorms(3, q, k, 1e-6) if normed else None
        kernels.rotate(packed[:, 1:6, 3:], Angles(*angles), norms)
        close(packed, twin, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 1.5)], ids=str)
def test_c_activations_match_reference(kind: Activation, dtype: torch.dtype) -> None:
    for count in ROWS:
        for size in (1, 5, 16, 100):
            both = made(count, 2 * size, dtype=dtype) * 4
            close(c_kernels().activate(both, kind), TWIN.activate(both.double(), kind), dtype)


@pytest.mark.parametrize("kind", [Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 7.0)], ids=str)
def test_c_activations_match_reference_on_extreme_values(kind: Activation) -> None:
    extremes = [0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 89.0, -89.0, 1e4, -1e4, 1e30, -1e30, float("inf"), float("nan")]
    for dtype in (torch.float64, torch.float32):
        gates = torch.tensor(extremes, dtype=dtype)
        both = torch.cat([gates, torch.ones_like(gates)])[None]
        expected, given = TWIN.activate(both.double(), kind), c_kernels().activate(both, kind)
        assert torch.allclose(given.double(), expected, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_unsupported_scales_and_strided_heads_fall_back_to_the_reference() -> None:
    """Scales with strides or of a dtype that C does not expect, heads whose numbers do not lie together."""
    rows, more = made(3, 8, dtype=torch.float32), made(3, 8, dtype=torch.float32, seed=1)
    for scale in (made(16, dtype=torch.float32)[::2], made(8, dtype=torch.float64)):
        close(c_kernels().norm(rows, scale, 1e-5), TWIN.norm(rows.double(), scale.double(), 1e-5), torch.float32)
        total, normed = c_kernels().add_norm(rows, more, scale, 1e-5)
        close(normed, TWIN.norm(total.double(), scale.double(), 1e-5), torch.float32)
    heads, twin = (made(3, 4, 16, dtype=dtype)[..., ::2] for dtype in (torch.float32, torch.float64))
    angles = [made(3, 1, 8, dtype=torch.float32, seed=seed) for seed in (1, 2)]
    c_kernels().rotate(heads, Angles(*angles))
    TWIN.rotate(twin, Angles(*(angle.double() for angle in angles)))
    close(heads.contiguous(), twin.contiguous(), torch.float32)


def test_norm_keeps_non_finite_values_in_their_own_row() -> None:
    rows: Tensor = made(4, 32, dtype=torch.float32)
    rows[1, 3], rows[2, 5] = float("inf"), float("nan")
    given = c_kernels().norm(rows, torch.ones(32), 1e-5)
    assert given[[0, 3]].isfinite().all()
    assert given[1, 3].isnan() and given[2].isnan().all()
