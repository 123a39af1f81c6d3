"""Results as tables for people and as JSON for programs, and the small arithmetic behind both."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

Say = Callable[[str], None]  # who is told of the progress


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under headers; columns that hold only numbers are right-aligned."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    right = [all(_is_number(row[at]) for row in rows) for at in range(len(headers))]
    widths = [max(len(line[at]) for line in [list(headers), *cells]) for at in range(len(headers))]

    def line(parts: Sequence[str]) -> str:
        padded = [p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def records(rows: Sequence[Mapping[str, object]]) -> str:
    """A table of rows with the same keys, which are the headers."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def median(values: Sequence[float]) -> float:
    """The median; 0.0 of no values."""
    return statistics.median(values) if values else 0.0


def mean(values: Sequence[float]) -> float:
    """The mean; 0.0 of no values."""
    return sum(values) / len(values) if values else 0.0


def medians(items: Sequence[Any]) -> dict[str, float]:
    """The median of each field over items of one dataclass; a field that is None in an item is left out."""
    values = {own.name: [getattr(item, own.name) for item in items] for own in fields(items[0])}
    return {name: median([float(one) for one in of]) for name, of in values.items() if None not in of}


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, by nearest rank; 0.0 of no values."""
    return sorted(values)[-(-99 * len(values) // 100) - 1] if values else 0.0


def ratio(part: float, whole: float) -> float:
    """`part / whole`; 0.0 when `whole` is 0."""
    return part / whole if whole else 0.0


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two token lists differ, a missing token included; None when they are equal."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def machine() -> dict[str, Any]:
    """The hardware and load that figures were taken under, without a host's name."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def json_line(result: Mapping[str, Any]) -> str:
    """One line of JSON with floats short enough to read."""
    return json.dumps(rounded(result))


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """Write a result where `docs/benchmarks.md` and later runs can find it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(result), indent=2) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """The same structure, every float to four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _is_number(cell: object) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def _shown(cell: object) -> str:
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
