"""C attention matches the definition, reads no unwritten memory, and gives a row the same bits in every batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cluster.arch.cell import Cell
from cluster.attention.ancestor_bits import chain_bits, pack_bits
from cluster.attention.c_backend import CAttention
from cluster.attention.shape import AttentionShape
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from cluster.models.runner import AttentionBackend
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, TREE, make_case
from tests.unit.kernels.library import c_library

CPU = torch.device("cpu")
ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
LONG: dict[str, dict[str, Any]] = {
    "blocks": {"committed": (511, 513, 1200), "parents": TREE, "chunks": ()},
    "one long request": {"committed": (2500,), "parents": TREE, "chunks": ()},
    "prompts across blocks": {"committed": (1023,), "parents": (-1,), "chunks": ((500, 520), (1010, 1040))},
}
OTHER_PLACES = ((1, "scattered"), (16, "tail"), (4, "run"))
SIZES: dict[str, dict[str, Any]] = {"20": {"d": 20}, "64": {"d": 64}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("page_size", "lies"), [(4, "tail"), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_PLACES)]
)
def test_c_attention_matches_the_definition(page_size: int, lies: str, shape: str, kind: str) -> None:
    case = make_case(shape, kind, page_size, lies)
    assert torch.allclose(case.backend_output(make=c_attention()), case.expected(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("size", ["20", pytest.param("64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", LONG)
def test_c_attention_on_long_prefixes_has_same_bits_for_any_thread_count(
    shape: str, size: str, dtype: torch.dtype
) -> None:
    """The threads share the work on a long prefix."""
    case_options = {"heads": 4, "kv_heads": 2, "page_size": 16, "lies": "scattered", "dtype": dtype}
    case, previous_threads, outputs = Case(**case_options | LONG[shape] | SIZES[size]), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outputs.append(case.backend_output(make=c_attention()))
    finally:
        torch.set_num_threads(previous_threads)
    assert torch.allclose(outputs[0].double(), case.expected(), atol=ERROR[dtype], rtol=0)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_idle_rows_writing_the_same_slot_leave_the_last_row_in_the_cache() -> None:
    """If another row's cell stayed there, the cell that idle rows read in the next step, and so the tokens that they
    draw, would depend on the order of threads and differ among ranks.
    """
    rows, table = 64, PageTable(4, 64, 16, CPU)
    pool = KVPool(1, 32, Cell(4, 64, 64), torch.float32, CPU)
    attention = CAttention(pool, table, AttentionShape(4, (None,)), c_library())
    idle, lens, previous_threads = torch.full((rows,), 4), torch.zeros(rows, dtype=torch.int64), torch.get_num_threads()
    attention.bind(AttentionMetadata(table.slots(idle, lens), TreeRows(idle, lens, chain_bits(1, 1, CPU), 1)))
    kv = torch.arange(float(rows)).view(rows, 1, 1, 1).expand(rows, 2, 4, 64).contiguous()
    try:
        torch.set_num_threads(5)
        for _ in range(300):
            attention(0, torch.ones(rows, 4, 64), kv)
            assert (pool.kv[0, 0] == rows - 1).all()
    finally:
        torch.set_num_threads(previous_threads)


def c_attention() -> Callable[..., CAttention]:
    return partial(CAttention, library=c_library())


def one_head(
    length: int, dtype: torch.dtype, window: int | None, fp8: bool = False
) -> tuple[PageTable, KVPool, CAttention]:
    table = PageTable(1, length, 16, CPU)
    pages = table.device_pages.shape[1]
    table.device_pages[0] = torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1
    pool = KVPool(1, (pages + 1) * 16, Cell(2, 24, 24), dtype, CPU, fp8)
    return table, pool, CAttention(pool, table, AttentionShape(4, (window,), 0.3), c_library())


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("window", "fp8"), [(None, False), (700, False), (40, False), (None, True), (40, True)])
@pytest.mark.parametrize("start", [3, 505, 1100])
def test_row_has_same_bits_in_prompt_chunk_chain_tree_and_single_decode(
    start: int, window: int | None, fp8: bool, dtype: torch.dtype
) -> None:
    """The last 12 tokens run as part of one chunk, one by one, as a chain, and as a path in a tree with siblings."""
    total, generator = start + 12, torch.Generator().manual_seed(start)
    q = torch.randn(total, 4, 24, generator=generator, dtype=torch.float64).to(dtype)
    kv = torch.randn(total, 2, 2, 24, generator=generator, dtype=torch.float64).to(dtype)
    positions = torch.arange(total)

    def run_parts(parts: list[tuple[str, int, int]]) -> torch.Tensor:
        table, _, attention = one_head(total + 30, dtype, window, fp8)
        row, outs = torch.tensor([0]), []
        attention.prepare(HostBounds())
        for kind, first, last in parts:
            n, part_positions = last - first, positions[first:last]
            rows, cells = q[part_positions], kv[part_positions]
            lens = torch.tensor([first])
            if kind == "prompt":
                metadata = AttentionMetadata(
                    table.slots(row, part_positions), None, PromptRows(row, lens, torch.tensor([0, n]))
                )
            elif kind == "chain":
                metadata = AttentionMetadata(
                    table.slots(row, part_positions), TreeRows(row, lens, chain_bits(n, n, CPU), n)
                )
            else:  # even nodes form the path; odd nodes are siblings, which see the path before them and themselves
                own = torch.eye(2 * n, dtype=torch.bool)
                path = torch.arange(2 * n) % 2 == 0
                visible = own | (torch.ones(2 * n, 2 * n, dtype=torch.bool).tril(-1) & path)
                doubled_positions = part_positions.repeat_interleave(2)
                rows, cells = q[doubled_positions].clone(), kv[doubled_positions].clone()
                cells[1::2] = 7.0
                slots = table.slots(row, first + torch.arange(2 * n))
                tree = TreeRows(row, lens, pack_bits(visible[None]), 2 * n)
                if kind == "single rows":  # each row of the tree as a request with one row
                    tree = TreeRows(row.repeat(2 * n), lens.repeat(2 * n), pack_bits(visible[:, None]), 2 * n)
                metadata = AttentionMetadata(slots, tree)
            attention.bind(metadata)
            out = attention(0, rows, cells)
            outs.append(out[0::2] if kind in ("tree", "single rows") else out)
        return torch.cat(outs)

    expected = run_parts([("prompt", 0, total)])
    for parts in (
        [("prompt", 0, start), *(("chain", at, at + 1) for at in range(start, total))],
        [("prompt", 0, start // 2), ("prompt", start // 2, start), ("chain", start, total)],
        [("prompt", 0, start), ("tree", start, total)],
        [("prompt", 0, start), ("single rows", start, total)],
    ):
        assert torch.equal(run_parts(parts), expected), parts[-1]


def test_non_finite_kv_affects_only_its_own_row() -> None:
    table, pool, attention = one_head(64, torch.float32, None)
    check_not_finite(table, attention)
    assert pool.kv.isfinite().all()


def check_not_finite(table: PageTable, attention: AttentionBackend, sizes: tuple[int, int, int] = (4, 2, 24)) -> None:
    """Check that an infinite cell makes its own row NaN and no other row. `sizes`: heads, KV heads, head dimension."""
    heads, kv_heads, size = sizes
    q, kv = torch.ones(3, heads, size), torch.ones(3, 2, kv_heads, size)
    kv[1, 0, 0, 5] = float("inf")
    row, lens = torch.tensor([0]), torch.tensor([0])
    attention.bind(AttentionMetadata(table.slots(row, torch.arange(3)), TreeRows(row, lens, chain_bits(3, 3, CPU), 3)))
    out = attention(0, q, kv)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_c_attention_takes_non_contiguous_metadata_tensors() -> None:
    """Slots are a column of a larger tensor, rows and lengths every other entry, mask bits a part of more words."""
    table = PageTable(4, 64, 4, CPU)
    table.device_pages[:4] = torch.arange(1, 65).view(4, 16)
    q, kv = torch.randn(2, 4, 24), torch.randn(2, 2, 2, 24)
    rows, lens = torch.tensor([0, 9, 2, 9]), torch.tensor([5, 9, 7, 9])
    window = table.slots(rows[::2, None], lens[::2, None] + torch.arange(3))
    bits = torch.tensor([1, 0, 1, 0], dtype=torch.int32).view(2, 1, 2)
    outs = []
    for contiguous in (False, True):
        pool = KVPool(1, 65 * 4, Cell(2, 24, 24), torch.float32, CPU)
        attention = CAttention(pool, table, AttentionShape(4, (None,), 0.3), c_library())
        arguments = [window[:, :1].reshape(-1), rows[::2], lens[::2], bits[..., :1]]
        write, row, length, mask_bits = (argument.contiguous() for argument in arguments) if contiguous else arguments
        attention.bind(AttentionMetadata(write, TreeRows(row, length, mask_bits, 1)))
        outs.append(attention(0, q, kv))
    assert torch.equal(*outs)
