import json
from dataclasses import dataclass
from pathlib import Path

from cluster.bench.report import first_difference, json_line, medians, table, write_json


@dataclass
class Pair:
    one: float
    two: float | None


def test_table_aligns_numbers_right_and_text_left() -> None:
    text = table(("name", "x", "same"), [("a", 1.5, True), ("bcdef", 123.456, False), ("c", None, True)])
    assert text.splitlines() == [
        "name       x  same",
        "-----  -----  ----",
        "a       1.50  yes",
        "bcdef  123.5  NO",
        "c          -  yes",
    ]


def test_medians_omit_fields_without_values() -> None:
    assert medians([Pair(1.0, None), Pair(3.0, None)]) == {"one": 2.0}


def test_first_difference_returns_the_first_unequal_position_or_none() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [5]) == 0


def test_json_line_is_one_line_with_rounded_numbers(tmp_path: Path) -> None:
    result = {"a": 1 / 3, "b": [{"c": (0.123456, True, None, "x")}]}
    assert json_line(result) == '{"a": 0.3333, "b": [{"c": [0.1235, true, null, "x"]}]}'
    write_json(result, tmp_path / "new" / "offline.json")
    assert json.loads((tmp_path / "new" / "offline.json").read_text()) == json.loads(json_line(result))
