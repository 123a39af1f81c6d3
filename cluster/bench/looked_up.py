"""Measure the gain from looked-up tokens (`speculative_lookup_tokens`): tree nodes for tokens found by matching the end
of the text in earlier text. Engines with adaptive trees generate with a draft and these nodes, and with a draft alone,
in turns. Where an answer copies text, speed must rise; for other texts it must hardly fall.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.pair import ModelPair, TreeChoice
from cluster.bench.report import LogProgress, median, ratio, table
from cluster.bench.runs import TokenLists
from cluster.bench.steady_runs import SingleRanks, run_together

COPIED = "copy"
TREES = (TreeChoice(3), TreeChoice(5, 2, 12))
LOOKUPS = {"off": 0, "on": 8}
"""`speculative_lookup_tokens` of each contender, by its name."""
GOAL_COPY, GOAL_OTHERS = 1.15, 0.98
"""Bounds of the gain (speed with looked-up tokens over speed without). The first is for copied text at temperature 0
and batch 1, the second for all other cases.
"""


def measure(
    pair: ModelPair,
    prompts: Mapping[str, TokenLists],
    cells: Sequence[tuple[float, int, int]],
    repeats: int,
    log_progress: LogProgress,
) -> list[dict[str, Any]]:
    """Return the figures of each of `TREES` as the largest tree, each kind of text (the keys of `prompts`), and each of
    `cells`: (temperature, batch, new tokens).
    """
    results = []
    for tree in TREES:
        config = pair.config(tree, max(batch for _, batch, _ in cells)).model_copy(
            update={"speculative_mode": "adaptive"}
        )
        contenders = SingleRanks(
            {name: config.model_copy(update={"speculative_lookup_tokens": tokens}) for name, tokens in LOOKUPS.items()}
        )
        for kind, (temperature, batch, new_tokens) in product(prompts, cells):
            speeds: dict[str, list[float]] = {name: [] for name in LOOKUPS}
            for repeat in range(repeats + 1):
                start = repeat * batch % len(prompts[kind])
                part = [prompts[kind][(start + i) % len(prompts[kind])] for i in range(batch)]
                for name, run in run_together(contenders, contenders.names, part, temperature, new_tokens).items():
                    speeds[name].append(run.tokens_per_second)
            # The first repeat, a warm-up, does not count: steps are captured, and acceptance estimates learn the text.
            gains = [ratio(on, off) for on, off in zip(speeds["on"][1:], speeds["off"][1:], strict=True)]
            results.append(
                {
                    "tree": str(tree),
                    "kind": kind,
                    "temperature": temperature,
                    "batch": batch,
                    "tokens_per_second": {name: median(values[1:]) for name, values in speeds.items()},
                    "gain": median(gains),
                }
            )
            log_progress(f"looked-up tokens: {_line(results[-1])}")
    return results


def goals(results: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals: copied text at temperature 0 and batch 1 is faster; all else is at most 2% slower."""
    return [
        Goal(
            f"looked-up tokens, {_name(result)}",
            result["gain"],
            GOAL_COPY if (result["kind"], result["temperature"], result["batch"]) == (COPIED, 0, 1) else GOAL_OTHERS,
            True,
        )
        for result in results
    ]


def show(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of the figures, or no lines if there are no figures."""
    rows = [
        (
            result["tree"],
            result["kind"],
            f"{result['temperature']:g}",
            result["batch"],
            *(f"{result['tokens_per_second'][name]:.0f}" for name in ("off", "on")),
            f"{result['gain']:.3f}",
        )
        for result in results
    ]
    header = ["largest tree", "text", "T", "batch", "tok/s without", "with", "gain"]
    return ["adaptive trees with and without looked-up tokens", table(header, rows)] if rows else []


def _name(result: dict[str, Any]) -> str:
    return f"{result['tree']}, {result['kind']}, T {result['temperature']:g}, batch {result['batch']}"


def _line(result: dict[str, Any]) -> str:
    return f"{_name(result)}: {result['gain']:.3f} times as fast"
