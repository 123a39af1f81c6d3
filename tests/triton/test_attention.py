"""Triton's attention matches the definition of attention, reads no cell that was not written, and may be split over
several programs.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.attention.ancestor_bits import chain_bits
from cluster.attention.shape import AttentionShape
from cluster.attention.triton_backend import TritonAttention
from cluster.batch import AttentionMetadata, PromptRows, TreeRows
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from tests.unit.attention.borrowed import KINDS as BORROWED_KINDS
from tests.unit.attention.borrowed import check_borrowed
from tests.unit.attention.dense import Case
from tests.unit.attention.test_c_attention import ERROR, check_not_finite
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, TREE, make_case

CPU = torch.device("cpu")
FAST_SHAPES = ("all", "wide")  # together these two have every feature of the other shapes
FAST_FP8_SHAPE = "wide"  # the interpreter takes seconds for FP8
PAGES = ((4, "tail"), (1, "scattered"), (16, "run"))
SIZES: tuple[dict[str, Any], ...] = ({"d": 20}, {"d": 96}, {"d": 192, "latent": True, "kv_heads": 1})
LONG: dict[str, dict[str, Any]] = {
    "tiles": {"committed": (31, 33, 200), "parents": TREE, "chunks": ()},
    "alone, long": {"committed": (600,), "parents": TREE, "chunks": ()},
    "texts over tiles": {"committed": (63,), "parents": (-1,), "chunks": ((50, 52), (70, 150))},
}


def short_cases() -> Iterator[Any]:
    """Parameters: every shape with every kind. The page sizes and layouts take turns, so that each shape and each kind
    has all of them.
    """
    for (s, shape), (k, kind) in product(enumerate(SHAPES), enumerate(KINDS)):
        is_fast = shape == FAST_FP8_SHAPE if KINDS[kind].get("fp8") else shape in FAST_SHAPES
        yield pytest.param(*PAGES[(s + k) % 3], shape, kind, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("page_size", "page_layout", "shape", "kind"), short_cases())
def test_triton_attention_matches_the_definition(page_size: int, page_layout: str, shape: str, kind: str) -> None:
    attention_case = make_case(shape, kind, page_size, page_layout)
    assert torch.allclose(
        attention_case.backend_output(make=TritonAttention), attention_case.expected(), atol=1e-12, rtol=0
    )


def long_cases() -> Iterator[Any]:
    """Parameters: every shape with every dtype. The sizes take turns, so that each shape and each dtype has
    all sizes.
    """
    for (s, shape), (t, dtype) in product(enumerate(LONG), enumerate([*ERROR, torch.float16])):
        size = SIZES[(s + t) % 3]
        yield pytest.param(shape, size, dtype, marks=() if size["d"] == 20 else pytest.mark.slow)


@pytest.mark.parametrize(("shape", "size", "dtype"), long_cases())
def test_triton_attention_matches_the_definition_for_long_prefixes_and_dtypes(
    shape: str, size: dict[str, Any], dtype: torch.dtype
) -> None:
    settings = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "dtype": dtype}
    attention_case = Case(**settings | LONG[shape] | size)
    tolerance = ERROR.get(dtype, 2e-3)
    assert torch.allclose(
        attention_case.backend_output(make=TritonAttention).double(), attention_case.expected(), atol=tolerance, rtol=0
    )


def test_triton_attention_handles_many_prompt_chunks_of_different_lengths() -> None:
    """Some chunks have one row, and some have more rows than one program handles."""
    chunks = tuple((3 * i, 3 * i + (1, 7, 40)[i % 3]) for i in range(19))
    settings = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered"}
    attention_case = Case(**settings, committed=(5,), parents=TREE, chunks=chunks)
    assert torch.allclose(
        attention_case.backend_output(make=TritonAttention), attention_case.expected(), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("has_sinks", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("processors", [1, 3, 100])
def test_triton_attention_is_right_for_any_prefix_split(
    processors: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 100 processors a prefix is split into more parts than it has tiles."""
    monkeypatch.setattr("cluster.attention.triton_backend.INTERPRETED_PROCESSORS", processors)
    settings = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "sunk": has_sinks, "window": 250}
    attention_case = Case(**settings, committed=(300, 20), parents=TREE, chunks=((5, 9),))
    assert torch.allclose(
        attention_case.backend_output(make=TritonAttention), attention_case.expected(), atol=1e-12, rtol=0
    )


def table_and_attention() -> tuple[PageTable, TritonAttention]:
    """The page table of one request, and an attention backend with one layer on it."""
    table = PageTable(1, 64, 16, CPU)
    table.device_pages[0] = torch.arange(table.device_pages.shape[1]) + 1
    pool = KVPool(1, 100, Cell(2, 24, 24), torch.float32, CPU)
    return table, TritonAttention(pool, table, AttentionShape(4, (None,), 0.3))


def test_non_finite_kv_affects_only_its_own_row() -> None:
    table, attention = table_and_attention()
    check_not_finite(table, attention)
    assert attention._pool.kv.isfinite().all()


def test_cells_are_stored_at_slots_that_are_not_contiguous() -> None:
    """Of trees with one node, the slots are a column of the requests' windows."""
    stored = []
    for copied in (False, True):
        table, attention = table_and_attention()
        column = table.slots(torch.tensor([0]), torch.arange(15)).view(5, 3)[:, 0]
        row, lens, bits = torch.zeros(5, dtype=torch.int64), torch.tensor([0, 3, 6, 9, 12]), chain_bits(1, 1, CPU)
        attention.bind(AttentionMetadata(column.clone() if copied else column, TreeRows(row, lens, bits, 1)))
        attention(0, torch.ones(5, 4, 24), torch.arange(1.0, 6.0).view(5, 1, 1, 1).expand(5, 2, 2, 24))
        stored.append(attention._pool.kv)
    assert stored[1].any() and torch.equal(*stored)


def test_padding_prompt_rows_get_zero_output() -> None:
    """A plan may have more prompt rows than the chunks of a rank have together."""
    table, attention = table_and_attention()
    row, start = torch.tensor([0]), torch.tensor([0])
    attention.bind(
        AttentionMetadata(table.slots(row, torch.arange(5)), None, PromptRows(row, start, torch.tensor([0, 3])))
    )
    out = attention(0, torch.ones(5, 4, 24), torch.ones(5, 2, 2, 24))
    assert torch.allclose(out[:3], torch.ones(()))
    assert not out[3:].any()


@pytest.mark.parametrize("kind", BORROWED_KINDS)
def test_a_call_without_cells_reads_those_of_the_call_before(kind: str) -> None:
    check_borrowed(kind, TritonAttention, torch.float32)


def test_triton_attention_refuses_kv_of_wrong_width() -> None:
    table, attention = table_and_attention()
    row, lens = torch.tensor([0]), torch.tensor([0])
    attention.bind(AttentionMetadata(table.slots(row, torch.arange(1)), TreeRows(row, lens, chain_bits(1, 1, CPU), 1)))
    with pytest.raises(ValueError, match="for a pool"):
        attention(0, torch.ones(1, 4, 24), torch.ones(1, 2, 2, 25))
