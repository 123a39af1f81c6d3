"""Products with packed quantised weights match products with the dequantised weights, and a row's bits do not depend on
the other rows of its batch.
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from cluster.kernels.quantised import Kind, Quantised
from cluster.kernels.torch_kernels import TorchKernels
from tests.unit.kernels.library import c_kernels
from tests.unit.kernels.test_product import DTYPES, assert_close, random_tensor

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 13, 24, 25, 60, 100)
SIZES = (
    (1, 1, 1),
    (5, 17, 5),
    (64, 16, 32),
    (70, 15, 32),
    (129, 33, 129),
    (700, 65, 128),
    (512, 130, 16),
    (200, 33, 40),
    (1101, 20, 1101),
)
KINDS: tuple[tuple[Kind, bool], ...] = (
    *(("int4", False), ("int4", True), ("int8", False), ("int8", True), ("fp8", False), ("fp4", False)),
)


def random_quantised_matrix(
    kind: Kind, inputs: int, outputs: int, group: int, zeros: bool = False, seed: int = 0
) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    code_count = 16 if kind in ("int4", "fp4") else 256
    codes = torch.randint(code_count, (outputs, inputs), generator=generator).byte()
    if kind == "fp8":
        codes[(codes & 127) == 127] = 1  # replace the codes of NaN
    scales = torch.rand(outputs, groups, generator=generator) / code_count
    zero_points = torch.randint(code_count, (outputs, groups), generator=generator).byte() if zeros else None
    scales = scales.bfloat16() if group == 32 else scales
    return Quantised(kind, codes, scales, zero_points, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_quantised_product_matches_dequantised_weight_for_any_row_count(
    kind: Kind, zeros: bool, dtype: torch.dtype
) -> None:
    for inputs, outputs, group in SIZES:
        quantised_matrix = random_quantised_matrix(kind, inputs, outputs, group, zeros)
        assert c_kernels().keeps_quantised(quantised_matrix, dtype)
        weight, dequantised = (
            c_kernels().quantised(quantised_matrix, dtype),
            quantised_matrix.dequantised(torch.float64).t(),
        )
        assert (weight.shape, weight.dtype) == ((inputs, outputs), dtype)
        expected_dense = dequantised if dtype == torch.float64 else quantised_matrix.dequantised().t().to(dtype)
        assert torch.equal(weight.dense(), expected_dense)
        bias, all_rows = (
            random_tensor(outputs, dtype=dtype, seed=1),
            random_tensor(max(ROWS), inputs, dtype=dtype, seed=2),
        )
        single_row_outputs = torch.cat([weight(row) for row in all_rows.split(1)])
        for rows in ROWS:
            batch = all_rows[:rows]
            assert_close(weight(batch), batch.double() @ dequantised, dtype)
            assert_close(weight(batch, bias), batch.double() @ dequantised + bias.double(), dtype)
            assert torch.equal(weight(batch), single_row_outputs[:rows]), (
                "a row must have the same bits alone and in a batch"
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "zeros"), KINDS)
def test_quantised_product_of_many_rows_keeps_the_bits_of_each_row(kind: Kind, zeros: bool, dtype: torch.dtype) -> None:
    quantised_matrix = random_quantised_matrix(kind, 600, 70, 88, zeros)
    weight, all_rows = c_kernels().quantised(quantised_matrix, dtype), random_tensor(530, 600, dtype=dtype, seed=2)
    out = weight(all_rows)
    assert_close(out, all_rows.double() @ quantised_matrix.dequantised(torch.float64).t(), dtype)
    for row in (0, 95, 96, 255, 256, 257, 511, 512, 529):
        assert torch.equal(weight(all_rows[row : row + 1]), out[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "zeros"), KINDS)
@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 2), (5, 40, 1), (0, 0, 17)], ids=str)
def test_quantised_expert_stack_matches_reference_and_single_weights(
    counts: tuple[int, ...], kind: Kind, zeros: bool, dtype: torch.dtype
) -> None:
    matrices = [random_quantised_matrix(kind, 96, 33, 32, zeros, seed) for seed in range(len(counts))]
    stack, reference = (
        c_kernels().quantised_stack(matrices, dtype),
        TorchKernels().quantised_stack(matrices, torch.float64),
    )
    rows, ends = random_tensor(sum(counts), 96, dtype=dtype, seed=4), torch.tensor(counts).cumsum(0).to(torch.int32)
    assert_close(stack(rows, ends), reference(rows.double(), ends), dtype)
    single_weight = c_kernels().quantised(matrices[1], dtype)
    assert torch.equal(
        stack(rows, ends)[counts[0] : counts[0] + counts[1]], single_weight(rows[counts[0] :][: counts[1]])
    )
    assert_close(stack.dense(), reference.dense(), dtype)


def test_every_quantised_code_is_decoded_to_its_value() -> None:
    for kind in get_args(Kind):
        if kind != "fp8_e5m2":
            codes = torch.arange(16 if kind in ("int4", "fp4") else 256).byte()[:, None]
            codes = codes[(codes & 127) != 127][:, None] if kind == "fp8" else codes
            quantised_matrix = Quantised(kind, codes, torch.ones(len(codes), 1), None, 1)
            for dtype in DTYPES:
                assert torch.equal(
                    c_kernels().quantised(quantised_matrix, dtype).dense(), quantised_matrix.dequantised().t().to(dtype)
                )


def test_keeps_quantised_is_false_for_formats_c_does_not_support() -> None:
    quantised_matrix, kernels = random_quantised_matrix("int4", 96, 33, 32), c_kernels()
    assert kernels.keeps_quantised(quantised_matrix, torch.float32)
    assert not kernels.keeps_quantised(quantised_matrix, torch.float16)
    assert not kernels.keeps_quantised(replace(quantised_matrix, kind="fp8_e5m2"), torch.float32)
    for group in (1, 12):
        regrouped_matrix = replace(quantised_matrix, scales=torch.ones(33, 96 // group), group=group)
        assert not kernels.keeps_quantised(regrouped_matrix, torch.float32)
    nan_codes = torch.full_like(quantised_matrix.codes, 255)
    assert not kernels.keeps_quantised(replace(quantised_matrix, kind="fp8", codes=nan_codes), torch.float32)
    assert not TorchKernels().keeps_quantised(quantised_matrix, torch.float32)


def test_quantised_weight_size_is_that_of_codes_and_scales() -> None:
    for kind, zeros, bytes_per_weight in (
        ("int4", False, 0.5 + 2 / 32),
        ("int8", True, 1 + 3 / 32),
        ("fp4", False, 0.5 + 2 / 32),
    ):
        weight = c_kernels().quantised(random_quantised_matrix(kind, 1024, 64, 32, zeros), torch.float32)  # type: ignore[arg-type]
        assert weight.nbytes == 1024 * 64 * bytes_per_weight


def test_quantised_weight_refuses_rows_of_wrong_width_or_dtype() -> None:
    weight = c_kernels().quantised(random_quantised_matrix("int4", 64, 16, 32), torch.float32)
    for wrong in (torch.zeros(2, 63), torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64)):
        with pytest.raises(ValueError, match="do not fit 64 of"):
            weight(wrong)
