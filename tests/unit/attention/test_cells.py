"""Where requests' cells lie: as slots, padded so that nobody reads others' memory, or in runs where a CPU may look."""

import pytest
import torch

from cluster.attention import cells
from cluster.attention.cells import RequestCells, Span, slot_spans
from tests.tables import table_of

TABLE = (torch.randperm(39, generator=torch.Generator().manual_seed(3)) + 1)[:20].view(2, 10)


@pytest.mark.parametrize("looks", [True, False])
def test_padded_slots_point_to_cells_the_request_writes_itself(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short chunk at the end of its row, padded to a longer one's rows: both read what they write themselves."""
    if not looks:
        monkeypatch.setattr(cells, "host_values", lambda *_: None)
    written = torch.tensor([1, 6])
    both = RequestCells(table_of(TABLE), torch.tensor([0, 1]), torch.tensor([9, 0]), 9 if looks else 12, 6, written)
    slots = both.slots(6)
    assert both.longest == (9 if looks else 10)
    window = slots[:, both.longest :]
    assert window[0].tolist() == [int(TABLE[0, 9])] * 6
    assert torch.equal(window[1].long(), TABLE[1, :6])
    assert slots[0, :9].tolist() == TABLE[0, :9].tolist()
    assert (slots[1, : both.longest] == TABLE[1, 0]).all(), "beyond its own count a request reads what it writes itself"
    seen = both.bias(torch.float64)[:, 0] == 0
    assert seen[:, both.longest :].all() and seen[0, :9].all()
    assert not seen[1, : both.longest].any() and not seen[0, 9 : both.longest].any()
    assert both.labels(False)[:, :9].tolist() == [list(range(9)), [-1] * 9]


def test_labels_are_right_aligned_when_requests_are_read_separately() -> None:
    both = RequestCells(table_of(TABLE), torch.tensor([0, 1]), torch.tensor([4, 2]), 4, 3)
    assert both.labels(True).tolist() == [[0, 1, 2, 3], [-1, -1, 0, 1]]


def test_requests_are_read_separately_if_single_or_large_but_never_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, lens = torch.tensor([0, 1]), torch.tensor([7, 3])
    assert RequestCells(table_of(TABLE), rows[:1], lens[:1], 7, 2).reads_separately(2, 8)
    both = RequestCells(table_of(TABLE), rows, lens, 7, 2)
    monkeypatch.setattr(cells, "READ_SEPARATELY_BYTES", 2 * 9 * 8)
    assert both.reads_separately(2, 8) and not both.reads_separately(1, 8) and not both.reads_separately(2, 7)
    monkeypatch.setattr(cells, "host_values", lambda *_: None)
    assert not RequestCells(table_of(TABLE), rows, lens, 7, 2).reads_separately(2, 1 << 30), "a GPU never looks"


@pytest.mark.parametrize(
    ("pages", "least", "spans"),
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
    pages: list[int], least: int | None, spans: list[Span]
) -> None:
    assert list(slot_spans(pages, 4, least)) == spans


def test_last_piece_of_cells_includes_the_query_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of one token: 1 to 6 in a run, then 9, then 7 and 8."""
    monkeypatch.setattr(cells, "READ_IN_PIECES_BYTES", 0)
    monkeypatch.setattr(cells, "READ_IN_PLACE_BYTES", 4)
    table = table_of(torch.tensor([[1, 2, 3, 4, 5, 6, 9, 7, 8]]))
    one = RequestCells(table, torch.tensor([0]), torch.tensor([4]), 4, 5)
    assert one.pieces(0, 2, 1, True) == [(slice(1, 7), 6)]
    (run, six), (rest, two) = one.pieces(0, 4, 1, True)
    assert (run, six, rest.tolist(), two) == (slice(1, 7), 6, [9, 7], 2)
    ((copied, length),) = one.pieces(0, 4, 1, False)
    assert (copied.tolist(), length) == ([1, 2, 3, 4, 5, 6, 9, 7], 8)
