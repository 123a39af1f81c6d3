"""docs/metrics.md lists every series of /metrics."""

from tests.reference_pages.metrics import FILE, page_text, series


def test_metrics_page_matches_the_code() -> None:
    assert FILE.read_text(encoding="utf-8") == page_text(), "run python -m tests.reference_pages.metrics"


def test_metrics_page_lists_every_series_once() -> None:
    rows = FILE.read_text(encoding="utf-8").splitlines()
    names = [metric.name for _, metric in series()]
    assert len(names) == len(set(names)) >= 40, "not all series were found"
    for name in names:
        assert sum(row.startswith((f"| `{name}` |", f"| `{name}_total` |")) for row in rows) == 1, name
