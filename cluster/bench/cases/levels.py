"""`aerie bench levels`: accept length and acceptance by depth of any draft, three levels deep.

To compare three trained MTP layers with one layer used three times, run it on both folders.
"""

from collections.abc import Callable
from typing import Any

from cluster.bench.cases.acceptance import QUICK, Size, accept_lengths
from cluster.bench.pair import Pair, Shape
from cluster.bench.report import machine, table

__all__ = ["QUICK", "Size", "measure", "show"]

SHAPES = (Shape(3), Shape(3, 4, 16))


def measure(pair: Pair, size: Size, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Accept length and acceptance by depth on held-out prompts, JSON-ready."""
    figures, identical = accept_lengths(pair, size, SHAPES, say)
    return {
        "what": "levels",
        "machine": machine(),
        "draft": "/".join(pair.draft.split("/")[-2:]),
        "prompts": size.prompts,
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
        "identical": identical,
        "figures": figures,
    }


def show(result: dict[str, Any]) -> str:
    """The figures as a table."""
    rows = [(x["name"], x["temperature"], x["accept_length"], *x["by_depth"]) for x in result["figures"]]
    return "\n".join(
        [
            f"{result['draft']}: {result['prompts']} held-out prompts of {result['prompt_tokens']} tokens, "
            f"{result['new_tokens']} new, EOS ignored; same tokens as plain decoding: "
            f"{'yes' if result['identical'] else 'NO'}",
            "accepted of those reached, depth by depth",
            table(("setting", "T", "accept length", "depth 1", "2", "3"), rows),
        ]
    )
