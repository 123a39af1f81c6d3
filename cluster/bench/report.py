"""Format results as tables and as JSON, and compute medians, percentiles and ratios for them."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

LogProgress = Callable[[str], None]  # a function that shows a line of progress


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows under headers as text. Columns that hold only numbers and None are right-aligned."""
    cells = [[_cell_text(cell) for cell in row] for row in rows]
    right_aligned = [all(_is_number(row[column]) for row in rows) for column in range(len(headers))]
    widths = [max(len(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]

    def line(texts: Sequence[str]) -> str:
        padded = [p.rjust(w) if r else p.ljust(w) for p, w, r in zip(texts, widths, right_aligned, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def records_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a table of rows, of which there is at least one. All have the same keys, which become the headers."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def columns_table(
    rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str], rounded_headers: Sequence[str] = ()
) -> str:
    """Return a table of some values of each row. `keys` maps headers to keys. Numbers under `rounded_headers` are
    rounded to integers.
    """
    cells = [
        [round(row[key]) if header in rounded_headers else row[key] for header, key in keys.items()] for row in rows
    ]
    return table(list(keys), cells)


def median(values: Sequence[float]) -> float:
    """Return the median, or 0.0 without values."""
    return statistics.median(values) if values else 0.0


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0.0 without values."""
    return sum(values) / len(values) if values else 0.0


def medians(items: Sequence[Any]) -> dict[str, float]:
    """Return the median of each field over instances of a dataclass. Fields that are None in any are left out."""
    values = {field_info.name: [getattr(item, field_info.name) for item in items] for field_info in fields(items[0])}
    return {
        name: median([float(value) for value in field_values])
        for name, field_values in values.items()
        if None not in field_values
    }


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile by nearest rank, or 0.0 without values."""
    return sorted(values)[-(-99 * len(values) // 100) - 1] if values else 0.0


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, or 0.0 if the denominator is 0."""
    return numerator / denominator if denominator else 0.0


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first index at which two token lists differ, in value or length, or None if the lists are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def machine_info() -> dict[str, Any]:
    """Return the CPU, number of cores, Python version and load of this machine, without its host name."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def json_line(result: Mapping[str, Any]) -> str:
    """Return a result as one line of JSON with rounded floats."""
    return json.dumps(rounded(result))


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """Write a result to the file `path` as JSON with rounded floats."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(result), indent=2) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Return the value with every float rounded to four decimals, tuples as lists and keys as text, as in JSON."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _is_number(cell: object) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def _cell_text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    if isinstance(cell, float):
        return f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.2f}"
    return str(cell)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
