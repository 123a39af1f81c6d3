"""C copy kernels in a replayed program copy the same rows as torch's operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.capture.tape import Tape
from cluster.kernels.c_copies import MAX_BLOCKS, MAX_BYTES, MAX_CALLS, Copies
from tests.unit.kernels.library import c_library

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def tape_of(table: Tensor, ids: Tensor, *program_names: str) -> Tape[list[Tensor]]:
    programs = {
        "select": lambda: table.index_select(0, ids.view(-1)),
        "embed": lambda: F.embedding(ids, table),
        "take": lambda: table.take(ids),
    }
    return Tape(lambda: [programs[program_name]() for program_name in program_names], substitute=Copies(c_library()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int64_ids", [True, False])
@pytest.mark.parametrize("size", [1, 3, 64, 257])
def test_c_row_lookups_on_tape_match_torch_and_join_into_one_call(
    size: int, int64_ids: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    table = torch.randint(-100, 100, (37, size), generator=generator).to(dtype)
    ids = torch.randint(37, (4, 3), generator=generator).to(torch.int64 if int64_ids else torch.int32)
    program_names = ("select", "embed", "take") if int64_ids else ("select", "embed")  # take accepts int64 ids only
    tape = tape_of(table, ids, *program_names)
    assert len(tape) == 1, "one call for all of them"
    for _ in range(3):
        ids.copy_(torch.randint(37, (4, 3), generator=generator))
        table.copy_(torch.randint(-100, 100, (37, size), generator=generator))
        tape.replay()
        expected_rows = {
            "select": table[ids.view(-1).long()],
            "embed": table[ids.long()],
            "take": table.view(-1)[ids.long()],
        }
        for program_name, actual_rows in zip(program_names, tape.output, strict=True):
            assert torch.equal(actual_rows, expected_rows[program_name]), program_name


def test_take_kernel_accepts_negative_ids_in_a_table_of_one_number() -> None:
    table, ids = torch.arange(9)[::9], torch.tensor([0])  # contiguous, but its stride is not 1
    tape = tape_of(table, ids, "take")
    ids[0] = -1
    tape.replay()
    assert tape.output[0].tolist() == [0]


def test_take_kernel_accepts_negative_ids() -> None:
    table, ids = torch.arange(5), torch.tensor([1, 2])
    tape = tape_of(table, ids, "take")
    ids.copy_(torch.tensor([-1, -5]))
    tape.replay()
    assert tape.output[0].tolist() == [4, 0]


@pytest.mark.parametrize(
    ("program_name", "invalid_id"), [("select", 5), ("select", -1), ("embed", 7), ("take", 5), ("take", -6)]
)
def test_row_lookup_kernel_raises_index_error_for_invalid_ids(program_name: str, invalid_id: int) -> None:
    table, ids = (
        torch.arange(5)[:, None].contiguous() if program_name == "embed" else torch.arange(5),
        torch.tensor([1, 2]),
    )
    tape = tape_of(table, ids, program_name)
    ids[1] = invalid_id
    with pytest.raises(IndexError, match="1 row indices"):
        tape.replay()
    ids[1] = 4
    tape.replay()
    assert tape.output[0].flatten().tolist() == [1, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_copy_and_cat_kernels_match_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def random_rows(*shape: int) -> Tensor:
        return torch.randint(-100, 100, shape, generator=generator).to(dtype)

    table, ids, rows = random_rows(9, 5), torch.tensor([7, 0, 3]), random_rows(3, 5)
    left, right, wide_rows, concatenated = (
        random_rows(3, 2, 4),
        random_rows(3, 6, 4),
        random_rows(8, 16),
        random_rows(3, 8, 4),
    )

    def program(destination: Tensor) -> list[Tensor]:
        destination.index_copy_(0, ids, rows)
        torch.cat([left, right], 1, out=concatenated)
        no_rows = torch.zeros(0, 5, dtype=torch.bool)
        return [
            concatenated,
            torch.cat([rows, no_rows, destination]),
            torch.cat([wide_rows[:, 3:4], wide_rows[:, 5:9]], 1),
        ]

    tape_table = table.clone()
    tape = Tape(lambda: program(tape_table), substitute=Copies(c_library()))
    assert len(tape) == 1, "one call for all of them"
    for _ in range(2):
        for source in (rows, left, right, wide_rows):
            source.copy_(random_rows(*source.shape))
        tape.replay()
        expected = program(table)
        assert torch.equal(tape_table, table) and all(map(torch.equal, tape.output, expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_advanced_indexing_kernels_match_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-100, 100, (6, 9), generator=generator).to(dtype)
    columns, rows = torch.randint(9, (6, 4), generator=generator), torch.tensor([5, 0, 3])
    column_ids = torch.randint(9, (3, 2), generator=generator)

    def program() -> list[Tensor]:
        gathered = table.gather(1, columns), table.t().gather(1, rows.expand(9, 3))
        return [
            *gathered,
            table[rows[:, None], column_ids],
            table[rows[:, None], column_ids[:1]],
            table[rows, column_ids[:, 1]],
            table.t()[column_ids, rows[:, None]],
        ]

    tape = Tape(program, substitute=Copies(c_library()))
    assert len(tape) == 1, "one call for all of them"
    columns.copy_(torch.randint(9, (6, 4), generator=generator))
    column_ids.copy_(torch.randint(-9, 9, (3, 2), generator=generator))
    rows.copy_(torch.tensor([1, 4, 2]))
    tape.replay()
    assert all(map(torch.equal, tape.output, program()))
    columns[2, 1] = 9
    with pytest.raises(IndexError, match="1 row indices"):
        tape.replay()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rearranging_kernels_match_torch(dtype: torch.dtype) -> None:
    """Reshapes and copies of tensors whose numbers do not lie side by side, and lookups of rows in a stack."""
    generator = torch.Generator().manual_seed(0)
    table, ids = torch.zeros(4, 3, 5, 6, dtype=dtype), torch.randint(3, (4, 2), generator=generator)

    def program() -> list[Tensor]:
        return [
            table[:, :, 0].reshape(-1, 6),
            table[:, 0].transpose(1, 2).contiguous(),
            table[:, 1, :, 3].reshape(-1),
            table[0, 0, :, 2].contiguous(),
            table[:, :1, :1, ::2].reshape(4, 3),
            table[0, :1, 0].expand(5, 6).reshape(-1),
            table[:2].transpose(1, 3).contiguous(),
            table[:, :, 1].gather(1, ids[..., None].expand(4, 2, 6)),
            table[..., 2:3].squeeze(3)[..., :1].gather(1, ids[..., None]),
            table[0, :, 1, 2].index_select(0, ids.view(-1)),
        ]

    tape = Tape(program, substitute=Copies(c_library()))
    assert len(tape) == 1, "one call for all of them"
    for _ in range(2):
        table.copy_(torch.randint(-100, 100, table.shape, generator=generator))
        ids.copy_(torch.randint(3, ids.shape, generator=generator))
        tape.replay()
        assert all(map(torch.equal, tape.output, program()))
    ids[1, 1] = 3
    with pytest.raises(IndexError, match="3 row indices"):
        tape.replay()


def test_copies_leave_unsupported_operators_and_layouts_to_torch() -> None:
    copies, select = Copies(c_library()), torch.ops.aten.index_select.default
    table, ids = torch.randn(6, 8), torch.tensor([3, 1])
    cases = [
        (select, (table, 1, ids)),
        (select, (table.t(), 0, ids)),
        (select, (table[:, :4], 0, ids)),
        (select, (table, 0, torch.tensor([3, 0, 1])[::2])),
        (select, (table[:, 0], 0, torch.tensor([3, 1], dtype=torch.int32))),
        (select, (table[0, 0], 0, torch.tensor([0]))),
        (select, (torch.empty(MAX_BYTES // 4, 1), 0, torch.zeros(MAX_BYTES // 4 + 1, dtype=torch.int64))),
        (torch.ops.aten.add.Tensor, (table, table)),
        (torch.ops.aten.cat.default, ([table.t(), table.t()], 0)),
        (torch.ops.aten.cat.default, ([table, table.double()], 0)),
        (torch.ops.aten.take.default, (table.t(), ids)),
        (torch.ops.aten.contiguous.default, (torch.empty(2, MAX_BLOCKS).t(),)),
        (torch.ops.aten.contiguous.default, (torch.empty(2, 2, MAX_CALLS + 1).transpose(0, 2),)),
        (torch.ops.aten.gather.default, (table[None], 1, torch.zeros(1, 2, 8, dtype=torch.int64))),
    ]
    for function, args in cases:
        assert copies(function, args, {}, [function(*args)]) is None, args
    assert copies(select, (table, 0, ids), {}, [table[ids]]) is not None
