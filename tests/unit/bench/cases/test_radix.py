import pytest

from cluster.bench import command
from cluster.bench.cases import radix
from cluster.bench.cases.radix import Size
from tests.unit.bench.test_command import parsed


def test_every_operation_is_measured_and_shown() -> None:
    result = radix.measure(Size(chain=20, pages=300, repeats=2))
    assert [row["goal_ms"] for row in result["rows"]] == [20.0, 0.2, 0.2, None]
    assert all(0 <= row["median_ms"] <= row["most_ms"] for row in result["rows"])
    text = radix.show(result)
    assert "evict 20 pages of one chain" in text and "evict 4 of 307 pages, 3 texts" in text


def test_it_is_a_part_of_aerie_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(radix, "measure", lambda size, say: {"what": "radix", "repeats": size.repeats})
    monkeypatch.setattr(radix, "show", lambda result: f"{result['repeats']} repeats")
    monkeypatch.setattr(radix, "goals", lambda result: [])
    assert command.run(parsed("radix", "--repeats", "3")) == 0
    assert capsys.readouterr().out == "3 repeats\n\n"
