"""`aerie bench levels`: accept length and acceptance by depth of any draft, with trees of three levels.

To compare a draft of three trained MTP layers with a draft that uses one layer three times, run this bench once on each
draft's folder.
"""

from dataclasses import asdict
from typing import Any

from cluster.bench.cases.acceptance import QUICK, Size, accept_lengths, heading
from cluster.bench.pair import ModelPair, TreeChoice, short_path
from cluster.bench.report import LogProgress, machine_info, table

__all__ = ["QUICK", "Size", "measure", "show"]

SHAPES = (TreeChoice(3), TreeChoice(3, 4, 16))


def measure(pair: ModelPair, size: Size, log_progress: LogProgress = print) -> dict[str, Any]:
    """Return accept length and acceptance by depth on held-out prompts, JSON-ready."""
    figures, identical = accept_lengths(pair, size, SHAPES, log_progress)
    return {
        "what": "levels",
        "machine": machine_info(),
        "draft": short_path(pair.draft),
        **asdict(size),
        "identical": identical,
        "figures": figures,
    }


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    rows = [(row["name"], row["temperature"], row["accept_length"], *row["by_depth"]) for row in result["figures"]]
    return "\n".join(
        [
            heading(result["draft"], result),
            "accepted of those reached, depth by depth",
            table(("setting", "T", "accept length", "depth 1", "2", "3"), rows),
        ]
    )
