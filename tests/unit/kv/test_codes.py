"""KV cells in FP8 hold exactly the values of the definition, in every dtype, and do not depend on other cells."""

import pytest
import torch
from torch import Tensor

from cluster.arch.cell import Cell
from cluster.batch import PageCopy
from cluster.kv.codes import decode, encode, max_magnitude
from cluster.kv.pool import KVPool, copied_slots
from tests.unit.attention.fp8 import MAGNITUDES, cached_values, error_bound

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CELLS = {
    "grouped": Cell(3, 20, 20),
    "two widths": Cell(3, 24, 11),
    "latent": Cell(1, 29, 24, is_latent=True),
    "no rotated key": Cell(1, 8, 8, is_latent=True),
}


def random_cells(cell: Cell, dtype: torch.dtype, count: int = 60) -> Tensor:
    """Return random cells. Their magnitudes range from the smallest numbers of `dtype` to its largest, and each cell
    holds numbers of many magnitudes.
    """
    generator, largest = torch.Generator().manual_seed(1), max_magnitude(dtype)
    kv = torch.randn(count, *cell.shape, generator=generator, dtype=torch.float64)
    kv *= 2.0 ** torch.randint(-18, 1, kv.shape, generator=generator)
    kv /= kv.abs().amax((1, 2, 3), keepdim=True)
    sizes = torch.logspace(-8 if dtype == torch.float16 else -45, 0, count, dtype=torch.float64) * largest
    return (kv * sizes.view(-1, 1, 1, 1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CELLS)
def test_fp8_cells_hold_the_values_of_the_definition(name: str, dtype: torch.dtype) -> None:
    cell = CELLS[name]
    kv = random_cells(cell, dtype)
    kv[3] = 0
    stored = encode(kv, cell)
    assert stored.shape == (len(kv), cell.fp8_bytes) and stored.dtype == torch.uint8
    decoded = decode(stored, cell, dtype)
    assert decoded.dtype == dtype and decoded.isfinite().all()
    assert torch.equal(decoded.double(), cached_values(kv, cell))
    assert torch.equal(decode(encode(decoded, cell), cell, dtype), decoded), "decoded values must encode unchanged"
    error = (decoded.double() - kv.double()).abs()
    assert (error <= error_bound(kv, cell)).all(), "the error exceeds that of 3 mantissa bits"
    assert error.max() > 0


def test_fp8_encoding_rounds_ties_to_even_and_preserves_all_e4m3_values() -> None:
    cell = Cell(1, 255, 255, is_latent=True)
    midpoints = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    kv = torch.cat([MAGNITUDES, midpoints, torch.tensor([448.0, -448.0])]).view(1, 1, 1, 255)
    decoded = decode(encode(kv, cell), cell, torch.float64)[0, 0, 0]
    assert torch.equal(decoded[:127], MAGNITUDES)
    lower_index = torch.arange(126)
    assert torch.equal(decoded[127:253], MAGNITUDES[lower_index + lower_index % 2])


def test_fp8_scale_is_the_smallest_that_fits() -> None:
    cell = Cell(1, 2, 2, is_latent=True)
    for largest, expected_byte in ((448.0, 127), (448.5, 128), (224.5, 127), (224.0, 126), (0.0, 10), (1e-45, 10)):
        assert encode(torch.tensor([[[[largest, -largest / 2]]]], dtype=torch.float64), cell)[0, 2] == expected_byte, (
            largest
        )


@pytest.mark.parametrize("name", CELLS)
def test_fp8_encoding_of_a_cell_is_independent_of_other_cells(name: str) -> None:
    kv = random_cells(CELLS[name], torch.float32)
    encoded_one_by_one = torch.cat([encode(cell[None], CELLS[name]) for cell in kv])
    assert torch.equal(encoded_one_by_one, encode(kv, CELLS[name]))
    changed_kv = kv.clone()
    changed_kv[:, 0, 0, 0] *= 1000
    changed_bytes = (encode(changed_kv, CELLS[name]) != encode(kv, CELLS[name])).any(0).nonzero()[:, 0].tolist()
    first_group_size = CELLS[name].groups[0][1]
    assert all(index < first_group_size or index == CELLS[name].numbers for index in changed_bytes), (
        "groups of a cell are independent too"
    )


def test_fp8_cell_size_includes_scales_and_alignment_padding() -> None:
    assert Cell(8, 64, 64).fp8_bytes == 1024 + 16 + 48, "aligned to 64 bytes"
    assert Cell(1, 128, 128).fp8_bytes == 256 + 2 + 14, "aligned to 16 bytes where 64 cost too much"
    assert Cell(1, 576, 512, is_latent=True).fp8_bytes == 576 + 2 + 14
    assert Cell(4, 192, 128).fp8_bytes == 1280 + 8 + 56
    assert KVPool(3, 8, Cell(2, 4, 4), torch.bfloat16, CPU, fp8=True).kv.nbytes == 8 * 3 * Cell(2, 4, 4).fp8_bytes


def test_kv_pool_moves_fp8_codes_with_their_scales_in_every_layer() -> None:
    cell = Cell(2, 8, 8)
    pool, kv = KVPool(3, 16, cell, torch.float32, CPU, fp8=True), torch.randn(3, 16, 2, 2, 8)
    kv *= 10.0 ** torch.arange(-8, 8).view(16, 1, 1, 1)
    for layer, numbers in zip(pool.kv, kv, strict=True):
        layer.copy_(encode(numbers, cell))
    before = torch.stack([decode(layer, cell, torch.float32) for layer in pool.kv])
    pool.move_kv_cache(torch.tensor([[1, 2], [8, 9]]), torch.tensor([[2, 1], [8, 11]]))
    pool.move_kv_cache(*torch.tensor(copied_slots([PageCopy(1, 3, 3)], 4)).view(2, -1))
    after = torch.stack([decode(layer, cell, torch.float32) for layer in pool.kv])
    source_slots = [0, 2, 1, 3, 4, 5, 6, 7, 8, 11, 10, 11, 4, 5, 6, 15]
    assert torch.equal(after, before[:, source_slots])
