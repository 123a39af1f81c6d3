"""The places of requests' cells: as slots, padded so that no request reads another's cells, or, if the host reads the
lengths on a CPU, in runs of slots.
"""

import pytest
import torch

from cluster.attention import cells
from cluster.attention.cells import RequestCells, Span, slot_spans
from tests.support.page_tables import table_of

TABLE = (torch.randperm(39, generator=torch.Generator().manual_seed(3)) + 1)[:20].view(2, 10)


@pytest.mark.parametrize("host_reads", [True, False])
def test_padded_slots_point_to_cells_the_request_writes_itself(
    host_reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short chunk at the end of its table row is padded to the length of a longer chunk. Each request reads only
    cells that it writes itself.
    """
    if not host_reads:
        monkeypatch.setattr(cells, "host_values", lambda *_: None)
    written = torch.tensor([1, 6])
    request_cells = RequestCells(
        table_of(TABLE), torch.tensor([0, 1]), torch.tensor([9, 0]), 9 if host_reads else 12, 6, written
    )
    slots = request_cells.slots(6)
    assert request_cells.longest == (9 if host_reads else 10)
    query_window = slots[:, request_cells.longest :]
    assert query_window[0].tolist() == [int(TABLE[0, 9])] * 6
    assert torch.equal(query_window[1].long(), TABLE[1, :6])
    assert slots[0, :9].tolist() == TABLE[0, :9].tolist()
    assert (slots[1, : request_cells.longest] == TABLE[1, 0]).all(), "padding must point to an own new cell"
    visible = request_cells.bias(torch.float64)[:, 0] == 0
    assert visible[:, request_cells.longest :].all() and visible[0, :9].all()
    assert not visible[1, : request_cells.longest].any() and not visible[0, 9 : request_cells.longest].any()
    assert request_cells.labels(False)[:, :9].tolist() == [list(range(9)), [-1] * 9]


def test_labels_are_right_aligned_when_requests_are_read_separately() -> None:
    request_cells = RequestCells(table_of(TABLE), torch.tensor([0, 1]), torch.tensor([4, 2]), 4, 3)
    assert request_cells.labels(True).tolist() == [[0, 1, 2, 3], [-1, -1, 0, 1]]


def test_requests_are_read_separately_if_single_or_large_but_never_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, lens = torch.tensor([0, 1]), torch.tensor([7, 3])
    assert RequestCells(table_of(TABLE), rows[:1], lens[:1], 7, 2).reads_separately(2, 8)
    request_cells = RequestCells(table_of(TABLE), rows, lens, 7, 2)
    monkeypatch.setattr(cells, "READ_SEPARATELY_BYTES", 2 * 9 * 8)
    assert (
        request_cells.reads_separately(2, 8)
        and not request_cells.reads_separately(1, 8)
        and not request_cells.reads_separately(2, 7)
    )
    monkeypatch.setattr(cells, "host_values", lambda *_: None)
    assert not RequestCells(table_of(TABLE), rows, lens, 7, 2).reads_separately(2, 1 << 30), "not on a GPU"


@pytest.mark.parametrize(
    ("pages", "min_slots", "spans"),
    [
        ([3, 4, 5], None, [Span(0, 12, 12)]),
        ([7], None, [Span(0, 4, 28)]),
        ([3, 4, 6], None, [Span(0, 12, None)]),
        ([3, 4, 6], 8, [Span(0, 8, 12), Span(8, 12, None)]),
        ([9, 3, 4, 6, 8, 1, 2, 3], 8, [Span(0, 4, None), Span(4, 12, 12), Span(12, 20, None), Span(20, 32, 4)]),
        ([5, 4, 3], 8, [Span(0, 12, None)]),
        ([0, 0], 8, [Span(0, 8, None)]),
        ([2, 3, 5, 6], 8, [Span(0, 8, 8), Span(8, 16, 20)]),
        ([2, 3, 5, 6], 9, [Span(0, 16, None)]),
    ],
)
def test_slot_spans_split_pages_into_contiguous_runs_and_scattered_spans(
    pages: list[int], min_slots: int | None, spans: list[Span]
) -> None:
    assert list(slot_spans(pages, 4, min_slots)) == spans


def test_last_piece_of_cells_includes_the_query_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have one token each: 1 to 6 are a run, then come 9, 7 and 8."""
    monkeypatch.setattr(cells, "READ_IN_PIECES_BYTES", 0)
    monkeypatch.setattr(cells, "READ_IN_PLACE_BYTES", 4)
    table = table_of(torch.tensor([[1, 2, 3, 4, 5, 6, 9, 7, 8]]))
    request_cells = RequestCells(table, torch.tensor([0]), torch.tensor([4]), 4, 5)
    assert request_cells.pieces(0, 2, 1, True) == [(slice(1, 7), 6)]
    (run, run_length), (scattered_slots, scattered_length) = request_cells.pieces(0, 4, 1, True)
    assert (run, run_length, scattered_slots.tolist(), scattered_length) == (slice(1, 7), 6, [9, 7], 2)
    ((copied_slots, length),) = request_cells.pieces(0, 4, 1, False)
    assert (copied_slots.tolist(), length) == ([1, 2, 3, 4, 5, 6, 9, 7], 8)
