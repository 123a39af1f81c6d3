"""`aerie bench levels`: accept length and acceptance by depth of any draft, three levels deep.

To compare three trained MTP layers with one layer used three times, run it on both folders.
"""

from collections.abc import Callable
from typing import Any

from cluster.bench.cases.acceptance import QUICK, Size
from cluster.bench.pair import PLAIN, Pair, Shape
from cluster.bench.report import machine, table
from cluster.bench.runs import params_of, run_together
from cluster.engine import build_engine

__all__ = ["QUICK", "Size", "measure", "show"]

SHAPES = (Shape(3), Shape(3, 4, 16))
TEMPERATURES = (0.0, 0.8)


def measure(pair: Pair, size: Size, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Accept length and acceptance by depth on held-out prompts, JSON-ready."""
    prompts = pair.prompts(size.prompts, size.prompt_tokens)
    engines = {shape: build_engine(pair.config(shape, size.prompts)) for shape in (PLAIN, *SHAPES)}
    figures, identical = [], True
    for temperature in TEMPERATURES:
        params = [params_of(size.new_tokens, temperature, seed) for seed in range(size.prompts)]
        say(f"levels: plain at T={temperature:g}")
        truth = run_together(engines[PLAIN], prompts, params).tokens
        for shape in SHAPES:
            say(f"levels: {shape} at T={temperature:g}")
            run = run_together(engines[shape], prompts, params)
            identical = identical and run.tokens == truth
            figures.append(
                {
                    "name": str(shape),
                    "temperature": temperature,
                    "accept_length": run.accept_length,
                    "by_depth": run.by_depth(shape.num_steps),
                }
            )
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
