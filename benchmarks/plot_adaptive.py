"""Draws tokens per second over the batch size from a result of `aerie bench adaptive --out FILE`, as an SVG.

python -m benchmarks.plot_adaptive RESULT SVG [--family chains] [--kind code] [--temperature 0]
"""

import argparse
import json
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 360, 70, 50, 40
SERIES = (("plain", "#888888"), ("best fixed", "#1f77b4"), ("adaptive", "#d62728"))


def points_of(cells: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return tokens per second by series, in the order of `cells`."""
    return {
        "plain": [cell["tokens_per_second"]["plain"] for cell in cells],
        "best fixed": [cell["tokens_per_second"][cell["best_fixed"]] for cell in cells],
        "adaptive": [cell["tokens_per_second"]["adaptive"] for cell in cells],
    }


def svg(cells: Sequence[dict[str, Any]], title: str) -> str:
    """Return the plot. The axis of the batch size is logarithmic. The name of the tree stands below each point of the
    series `best fixed`.
    """
    points, batches = points_of(cells), [cell["batch"] for cell in cells]
    highest = max(max(values) for values in points.values()) * 1.1
    span = max(1.0, log2(batches[-1] / batches[0]))

    def x(batch: int) -> float:
        return LEFT + (WIDTH - LEFT - 20) * log2(batch / batches[0]) / span

    def y(speed: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * speed / highest

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">requests at once</text>',
    ]
    for step in range(5):
        speed = highest * step / 4
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(speed):.1f}" y2="{y(speed):.1f}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed:.0f}</text>')
    lines += [
        f'<text x="{x(batch):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{batch}</text>' for batch in batches
    ]
    for i, (name, colour) in enumerate(SERIES):
        path = " ".join(f"{x(b):.1f},{y(v):.1f}" for b, v in zip(batches, points[name], strict=True))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{LEFT + 15}" y="{TOP + 15 + 16 * i}" fill="{colour}">{name}</text>')
    for cell, speed in zip(cells, points["best fixed"], strict=True):
        label = f'<text x="{x(cell["batch"]):.1f}" y="{y(speed) + 16:.1f}" text-anchor="middle" fill="#1f77b4"'
        lines.append(f'{label} font-size="10">{cell["best_fixed"]}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Read the result, write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--family", default="chains")
    parser.add_argument("--kind", default="code")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    result = json.loads(args.result.read_text(encoding="utf-8"))
    cells = [
        cell
        for cell in result["families"][args.family]["cells"]
        if cell["kind"] == args.kind and cell["temperature"] == args.temperature
    ]
    title = f"Tokens per second ({args.family}, {args.kind}, T {args.temperature:g}; {result['target']})"
    args.svg.write_text(svg(cells, title), encoding="utf-8")


if __name__ == "__main__":
    main()
