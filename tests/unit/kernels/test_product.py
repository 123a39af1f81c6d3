"""Matrix products of the C kernels with weights in panels: they match products in float64, and a row's bits do not
depend on the other rows of its batch.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from cluster.kernels.panels import in_panels, in_tiles, out_of_panels
from cluster.kernels.torch_kernels import TorchKernels
from tests.unit.kernels.library import c_kernels

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 96, 97, 200)
SIZES = ((1, 1), (5, 17), (16, 16), (64, 15), (700, 33), (1100, 130), (513, 250))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
EPS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
    assert ((actual.double() - expected).abs() <= EPS[dtype] * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_packed_weight_product_matches_float64(size: tuple[int, int], dtype: torch.dtype) -> None:
    matrix, bias = random_tensor(*size, dtype=dtype), random_tensor(size[1], dtype=dtype, seed=1)
    weight = c_kernels().weight(matrix)
    assert weight.shape == size
    assert weight.dtype == dtype
    assert torch.equal(weight.dense(), matrix)
    for rows in ROWS:
        inputs = random_tensor(rows, size[0], dtype=dtype, seed=2)
        expected = inputs.double() @ matrix.double()
        assert_close(weight(inputs), expected, dtype)
        assert_close(weight(inputs, bias), expected + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_product_row_has_same_bits_in_any_batch(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight, rows = (
        c_kernels().weight(random_tensor(*size, dtype=dtype)),
        random_tensor(200, size[0], dtype=dtype, seed=2),
    )
    single_row_outputs = torch.cat([weight(row) for row in rows.split(1)])
    for count in ROWS:
        assert torch.equal(weight(rows[:count]), single_row_outputs[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_product_is_right_and_row_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """The product is so large that it is computed in parts: partial sums over stretches of inputs, and columns and rows
    in several blocks.
    """
    for inputs, outputs in ((4500, 40), (2080, 4200)):
        matrix, all_rows = random_tensor(inputs, outputs, dtype=dtype), random_tensor(530, inputs, dtype=dtype, seed=2)
        weight = c_kernels().weight(matrix)
        out = weight(all_rows)
        assert_close(out, all_rows.double() @ matrix.double(), dtype)
        for rows in (1, 16, 33):
            assert torch.equal(weight(all_rows[500 : 500 + rows]), out[500 : 500 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_bits_do_not_depend_on_thread_count(dtype: torch.dtype) -> None:
    """Threads divide the columns if there are few rows, the rows if there are many, and both for counts between."""
    weight, bias = c_kernels().weight(random_tensor(300, 250, dtype=dtype)), random_tensor(250, dtype=dtype, seed=1)
    previous_threads, rows = torch.get_num_threads(), random_tensor(300, 300, dtype=dtype, seed=2)
    try:
        torch.set_num_threads(1)
        single_thread_output = weight(rows, bias)
        for threads in (2, 3, 4, 6):
            torch.set_num_threads(threads)
            for count in (1, 47, 95, 96, 97, 150, 191, 192, 240, 300):
                assert torch.equal(weight(rows[:count], bias), single_thread_output[:count])
    finally:
        torch.set_num_threads(previous_threads)


def test_product_takes_strided_rows_and_nan_stays_in_its_row() -> None:
    weight, rows = (
        c_kernels().weight(random_tensor(40, 24, dtype=torch.float32)),
        random_tensor(9, 80, dtype=torch.float32, seed=3),
    )
    assert torch.equal(weight(rows[:, 20:60]), weight(rows[:, 20:60].contiguous()))
    rows_with_nan = rows[:, :40].clone()
    rows_with_nan[4, 7] = float("nan")
    out = weight(rows_with_nan)
    assert out[4].isnan().all()
    assert out[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_panel_and_tile_layouts_round_trip_to_the_matrix(dtype: torch.dtype) -> None:
    for experts, inputs, outputs in product((1, 3), (1, 7), (1, 16, 37)):
        matrices = random_tensor(experts, inputs, outputs, dtype=dtype)
        assert torch.equal(out_of_panels(in_panels(matrices), inputs, outputs), matrices)
        assert torch.equal(out_of_panels(in_tiles(matrices), inputs, outputs), matrices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 2), (5, 40, 1), (0, 0, 17), (3, 100, 0)], ids=str)
def test_expert_stack_product_matches_reference(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices, total = random_tensor(len(counts), 70, 33, dtype=dtype), sum(counts)
    rows, ends = random_tensor(total, 70, dtype=dtype, seed=4), torch.tensor(counts).cumsum(0).to(torch.int32)
    stack = c_kernels().stack(matrices)
    assert torch.equal(stack.dense(), matrices)
    assert_close(stack(rows, ends), TorchKernels().stack(matrices.double())(rows.double(), ends), dtype)


def test_weight_and_stack_refuse_rows_of_wrong_width_or_dtype() -> None:
    """Without this check, the C code would read memory beyond the rows."""
    weight, stack = c_kernels().weight(torch.zeros(8, 4)), c_kernels().stack(torch.zeros(2, 8, 4))
    ends = torch.tensor([1, 2], dtype=torch.int32)
    for wrong in (torch.zeros(2, 7), torch.zeros(2, 16), torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8)):
        with pytest.raises(ValueError, match="do not fit 8 of"):
            weight(wrong)
        with pytest.raises(ValueError, match="do not fit 8 of"):
            stack(wrong, ends)


def test_unsupported_dtype_and_meta_weights_fall_back_to_torch() -> None:
    matrix = random_tensor(8, 8, dtype=torch.float16)
    assert torch.equal(c_kernels().weight(matrix).dense(), matrix)
    assert c_kernels().weight(matrix.to("meta")).shape == (8, 8)


def test_product_refuses_wrong_bias_or_ends_but_takes_strided_bias() -> None:
    """Without this check, the C code would read their bytes as the dtype and shape that it expects."""
    rows, matrix = random_tensor(3, 8, dtype=torch.float32), random_tensor(8, 4, dtype=torch.float32)
    weight, stack = c_kernels().weight(matrix), c_kernels().stack(matrix[None])
    strided_bias = random_tensor(8, dtype=torch.float32)[::2]
    assert torch.equal(weight(rows, strided_bias), weight(rows, strided_bias.contiguous()))
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(1, 4)):
        with pytest.raises(ValueError, match=r"a bias .* does not fit 4 outputs of torch\.float32"):
            weight(rows, wrong)
    for ends in (torch.tensor([3]), torch.tensor([1, 3], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"ends .* do not fit 1 experts; give int32"):
            stack(rows, ends)
