"""Measure the gain from shared rows (`spec/row_budget.py`). Either each request has an equal chain, or the requests
share the same total number of rows: the likeliest nodes are verified, whichever request they belong to. The figure is
the accepted draft tokens per step. Half of the requests continue source code, which the draft predicts well, and half
continue other texts. Nothing is timed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.pair import ModelPair, TreeChoice
from cluster.bench.report import LogProgress, table
from cluster.bench.runs import TokenLists, fixed_length_params
from cluster.dp_attention.tree_times import TreeCosts
from cluster.engine import Engine, build_engine
from cluster.request import Request, RequestParams

PREDICTABLE, OTHERS = "code", ("random", "prose")
REQUESTS = 16
TEMPERATURES = ((0.0, 0.0), (0.8, 0.8), (0.0, 1.5))
"""Temperatures of source code and of the other texts. At 1.5 the draft predicts hardly any text."""
DEPTHS, SHARING_TREE = (3, 5), TreeChoice(5, 2, 12)
"""The depths of the equal chains, and the shape of the trees that share as many rows as the chains have."""
GOAL_GAIN = 1.15
MUCH_US = 1_000_000_000


def measure(
    pair: ModelPair, prompts: Mapping[str, TokenLists], new_tokens: int, steps: int, log_progress: LogProgress
) -> list[dict[str, Any]]:
    """Return the figures of each mix of source code and one of `OTHERS`, each of `TEMPERATURES` and each of `DEPTHS`. A
    mix is left out if one of its texts is not in `prompts`, which maps kinds of text to prompts. A request generates
    `new_tokens` tokens. `steps` steps are counted.
    """
    results, others = [], [other for other in OTHERS if PREDICTABLE in prompts and other in prompts]
    for depth in DEPTHS if others else ():
        equal = _engine(pair, TreeChoice(depth), depth + 1)
        sharing = _engine(pair, SHARING_TREE, depth + 1)
        for other in others:
            halves = prompts[PREDICTABLE], prompts[other]
            for temperatures in TEMPERATURES:
                params = fixed_length_params(new_tokens, 0.0, seed=0)
                halves_params = [replace(params, temperature=temperature) for temperature in temperatures]
                counts = [_accepted_per_step(e, halves, halves_params, steps) for e in (equal, sharing)]
                results.append(
                    {
                        "mix": f"{PREDICTABLE}, {other}",
                        "temperatures": temperatures,
                        "rows_per_request": depth + 1,
                        "equal_depth": depth,
                        "sharing": str(SHARING_TREE),
                        "accepted_equal": counts[0],
                        "accepted_shared": counts[1],
                        "gain": counts[1] / counts[0],
                    }
                )
                log_progress(f"shared rows: {_line(results[-1])}")
    return results


def _engine(pair: ModelPair, tree: TreeChoice, nodes: int) -> Engine:
    """Return an engine whose steps all draft the levels of `tree` and verify `nodes` nodes per request on average. Such
    an engine chooses trees by their costs, and here every other choice is given a very high cost.
    """
    config = pair.config(tree, REQUESTS).model_copy(update={"speculative_mode": "adaptive"})
    engine, depth = build_engine(config), tree.num_steps
    costs = engine.info().tree_costs
    wanted = depth, nodes, 0
    us = tuple((1 if (c.num_steps, c.num_draft_tokens, c.lookup_tokens) == wanted else MUCH_US,) for c in costs)
    assert (1,) in us, "no tier has this shape"
    engine.lockstep.coordinator.use_costs(TreeCosts((1,), us, (MUCH_US,)))
    return engine


def _accepted_per_step(
    engine: Engine, halves: Sequence[TokenLists], params_of_halves: Sequence[RequestParams], steps: int
) -> float:
    """Return the accepted draft tokens per step, summed over the requests, over `steps` steps in which all requests
    decode. The two halves of the requests have the prompts of `halves` and the parameters of `params_of_halves`. A
    request that ends is replaced by the next one of its half, so that the mix does not depend on which half is faster.
    """
    supplies, count = [cycle(half) for half in halves], 0

    def submit(half: int) -> None:
        nonlocal count
        params = replace(params_of_halves[half], seed=count)
        engine.submit(Request(f"{half}/{count}", tuple(next(supplies[half])), params))
        count += 1

    for i in range(REQUESTS):
        submit(i % 2)
    accepted, counted = 0, 0
    while counted < steps:
        result = engine.step()
        for output in result.outputs:
            if output.finish_reason is not None:
                submit(int(output.request_id[0]))
        if result.stats.drafts == REQUESTS:
            accepted += sum(result.stats.accept_lens) - REQUESTS
            counted += 1
    for half, number in product(range(2), range(count)):
        engine.abort(f"{half}/{number}")
    while engine.has_work:
        engine.step()
    return accepted / counted


def goals(results: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals: at least `GOAL_GAIN` times as many draft tokens are accepted with shared rows."""
    return [Goal(f"shared rows, {_name(result)}", result["gain"], GOAL_GAIN, True) for result in results]


def show(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of the figures, or no lines if there are no figures."""
    rows = [
        (
            result["mix"],
            "{:g}, {:g}".format(*result["temperatures"]),
            result["rows_per_request"],
            f"{result['accepted_equal']:.2f}",
            f"{result['accepted_shared']:.2f}",
            f"{result['gain']:.3f}",
        )
        for result in results
    ]
    header = ["text", "T", "rows per request", "equal trees", "shared rows", "gain"]
    title = f"accepted drafted tokens per step of {REQUESTS} requests"
    return [title, table(header, rows)] if rows else []


def _name(result: dict[str, Any]) -> str:
    temperatures = "{:g} and {:g}".format(*result["temperatures"])
    return f"{result['mix']}, T {temperatures}, {result['rows_per_request']} rows per request"


def _line(result: dict[str, Any]) -> str:
    return (
        f"{_name(result)}: {result['accepted_equal']:.2f} accepted with equal trees, {result['accepted_shared']:.2f} "
        f"with shared rows, {result['gain']:.3f}"
    )
