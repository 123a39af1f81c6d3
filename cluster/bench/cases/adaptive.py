"""`aerie bench adaptive`: trees that each step chooses (`speculative_mode: adaptive`) against every fixed tree.

In each cell (a kind of text, a temperature, a batch size) all contenders generate the same tokens in turns, in reverse
order in every other repeat. A ratio is taken within a repeat; the median over the repeats counts. The adaptive engine
is the same in all cells, so it has to find the right tree again after every change of the load.

The last part is a load that swings between one request and the largest batch. It is compared with a contender that does
not exist: one that uses, in each phase, the tree that is the best for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import product
from math import prod
from random import Random
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice, short_path
from cluster.bench.report import LogProgress, machine_info, median, ratio, table
from cluster.bench.runs import EngineRun, TokenLists, fixed_length_params, run_batch
from cluster.engine import Engine, build_engine

CHAINS = tuple(TreeChoice(steps) for steps in (1, 2, 3, 5))
TREES = (TreeChoice(2, 4, 6), TreeChoice(3, 4, 8), TreeChoice(3, 4, 12))
SWEEPS = {"chains": CHAINS, "trees": TREES}
"""The fixed trees by family. The last one is the bound of the adaptive contender."""
ADAPTIVE = "adaptive"
KINDS = ("code", "prose", "random")
GOAL_CELL, GOAL_MEAN, GOAL_SWING = 0.98, 1.05, 0.97


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement. Batches below `prompts` run one after another until all `prompts` have run."""

    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    kinds: tuple[str, ...] = KINDS
    prompts: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 128
    repeats: int = 7
    swings: int = 4


QUICK = Size(batches=(1, 4), temperatures=(0.0, 0.8), kinds=("code", "random"), new_tokens=16, repeats=1, swings=1)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: a kind of text, a temperature and a batch size."""

    kind: str
    temperature: float
    batch: int


def measure(pair: ModelPair, size: Size = Size(), log_progress: LogProgress = print) -> dict[str, Any]:
    """Run all cells and the swinging load for each family of trees; return the figures, JSON-ready."""
    prompts = {kind: _prompts(pair, kind, max(size.batches), size.prompt_tokens) for kind in size.kinds}
    families = {name: _measure_family(pair, name, size, prompts, log_progress) for name in SWEEPS}
    return {
        "what": "adaptive",
        "machine": machine_info(),
        "target": short_path(pair.target),
        "new_tokens": size.new_tokens,
        "repeats": size.repeats,
        "families": families,
    }


def _measure_family(
    pair: ModelPair, family: str, size: Size, prompts: Mapping[str, TokenLists], log_progress: LogProgress
) -> dict[str, Any]:
    sweep = SWEEPS[family]
    requests = max(size.batches)
    engines = {str(tree): build_engine(pair.config(tree, requests)) for tree in (PLAIN, *sweep)}
    adaptive_config = pair.config(sweep[-1], requests).model_copy(update={"speculative_mode": "adaptive"})
    engines[ADAPTIVE] = build_engine(adaptive_config)
    cells = []
    for cell in (Cell(*values) for values in product(size.kinds, size.temperatures, size.batches)):
        cells.append(_measure_cell(cell, engines, prompts[cell.kind], size))
        log_progress(f"adaptive: {family}, {_cell_line(cells[-1])}")
    swing = _measure_swing(engines, prompts[size.kinds[0]], size)
    log_progress(f"adaptive: {family}, swinging load {swing['of_oracle']:.3f} of the oracle")
    return {"cells": cells, "swing": swing, "best_single": _best_single(cells), "over_best_single": _over_single(cells)}


def _measure_cell(cell: Cell, engines: dict[str, Engine], prompts: TokenLists, size: Size) -> dict[str, Any]:
    runs: dict[str, list[EngineRun]] = {name: [] for name in engines}
    for repeat in range(-1, size.repeats):  # the first round warms up
        for name in list(engines)[:: -1 if repeat % 2 else 1]:
            engine_run = _run(engines[name], prompts[: max(cell.batch, size.prompts)], cell, size.new_tokens)
            if repeat >= 0:
                runs[name].append(engine_run)
    speedups = {name: _ratio(runs[name], runs[str(PLAIN)]) for name in engines}
    best = max((name for name in engines if name != ADAPTIVE), key=speedups.__getitem__)
    return {
        "kind": cell.kind,
        "temperature": cell.temperature,
        "batch": cell.batch,
        "tokens_per_second": {name: median([run.tokens_per_second for run in runs[name]]) for name in engines},
        "accept_length": {name: runs[name][0].accept_length for name in engines},
        "speedup": speedups,
        "best_fixed": best,
        "of_plain": _ratio(runs[ADAPTIVE], runs[str(PLAIN)]),
        "of_best_fixed": _ratio(runs[ADAPTIVE], runs[best]),
        "identical": len({str(run.tokens) for name in engines for run in runs[name]}) == 1,
    }


def _measure_swing(engines: dict[str, Engine], prompts: TokenLists, size: Size) -> dict[str, Any]:
    """Run phases of one request and of the largest batch in turns, `size.swings` times."""
    phases = [Cell("", 0.0, 1), Cell("", 0.0, max(size.batches))]
    seconds = {name: [0.0, 0.0] for name in engines}
    for turn in range(-1, size.swings):
        for name in list(engines)[:: -1 if turn % 2 else 1]:
            for i, phase in enumerate(phases):
                count = max(phase.batch, size.prompts)
                phase_seconds = _run(engines[name], prompts[:count], phase, size.new_tokens).seconds
                seconds[name][i] += phase_seconds if turn >= 0 else 0.0
    fixed = [name for name in engines if name != ADAPTIVE]
    oracle = sum(min(seconds[name][i] for name in fixed) for i in range(len(phases)))
    return {"seconds": seconds, "oracle_seconds": oracle, "of_oracle": ratio(oracle, sum(seconds[ADAPTIVE]))}


def _run(engine: Engine, prompts: TokenLists, cell: Cell, new_tokens: int) -> EngineRun:
    """Run the prompts in batches of the cell's size."""
    total = EngineRun()
    for start in range(0, len(prompts), cell.batch):
        batch = prompts[start : start + cell.batch]
        params = [fixed_length_params(new_tokens, cell.temperature, seed=start + i) for i in range(len(batch))]
        total.add(run_batch(engine, batch, params))
    return total


def _ratio(runs: Sequence[EngineRun], others: Sequence[EngineRun]) -> float:
    """Return the median of the ratios of speed within each repeat."""
    return median([ratio(a.tokens_per_second, b.tokens_per_second) for a, b in zip(runs, others, strict=True)])


def _best_single(cells: Sequence[dict[str, Any]]) -> str:
    """Return the fixed tree with the highest geometric mean of speedups over all cells."""
    names: list[str] = [name for name in cells[0]["speedup"] if name != ADAPTIVE]
    return max(names, key=lambda name: prod(cell["speedup"][name] for cell in cells))


def _over_single(cells: Sequence[dict[str, Any]]) -> float:
    """Return the geometric mean, over all cells, of adaptive over the best single fixed tree."""
    single = _best_single(cells)
    return float(prod(cell["speedup"][ADAPTIVE] / cell["speedup"][single] for cell in cells) ** (1 / len(cells)))


def _prompts(pair: ModelPair, kind: str, count: int, length: int) -> list[list[int]]:
    """Return prompts of one kind: held-out source code; English descriptions of installed packages; random tokens."""
    if kind == "code":
        return pair.prompts(count, length)
    if kind == "random":
        random, vocab_size = Random(0), pair.vocab_size
        return [[random.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    texts = sorted({(dist.read_text("METADATA") or "").partition("\n\n")[2] for dist in distributions()})
    tokens = [pair.encode(text)[-length:] for text in texts if len(text) > 8 * length]
    prompts = [ids for ids in tokens if len(ids) == length]
    return [prompts[i % len(prompts)] for i in range(count)]


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals: no cell is slower than plain decoding or the best fixed tree; on the whole, adaptive beats the
    best single fixed tree.
    """
    goal_list = []
    for family, figures in result["families"].items():
        for cell in figures["cells"]:
            name = f"{family}, {cell['kind']}, T {cell['temperature']:g}, batch {cell['batch']}"
            goal_list += [
                Goal(f"of plain: {name}", cell["of_plain"], GOAL_CELL, True),
                Goal(f"of the best fixed ({cell['best_fixed']}): {name}", cell["of_best_fixed"], GOAL_CELL, True),
            ]
        goal_list += [
            Goal(
                f"of the best single ({figures['best_single']}): {family}", figures["over_best_single"], GOAL_MEAN, True
            ),
            Goal(f"swinging load, of the oracle: {family}", figures["swing"]["of_oracle"], GOAL_SWING, True),
        ]
    return goal_list


def show(result: dict[str, Any]) -> str:
    """Return the figures as tables."""
    lines = []
    for family, figures in result["families"].items():
        names = list(figures["cells"][0]["speedup"])
        rows = [
            (
                cell["kind"],
                f"{cell['temperature']:g}",
                cell["batch"],
                *(f"{cell['speedup'][name]:.2f}" for name in names),
                f"{cell['of_best_fixed']:.3f}",
                cell["identical"],
            )
            for cell in figures["cells"]
        ]
        lines += [
            f"{family}: speed over plain decoding, medians of {result['repeats']} repeats",
            table(["text", "T", "batch", *names, "adaptive of best", "same tokens"], rows),
            f"over the best single setting ({figures['best_single']}): {figures['over_best_single']:.3f}",
            f"swinging load: {figures['swing']['of_oracle']:.3f} of an oracle",
            "",
        ]
    return "\n".join(lines)


def _cell_line(cell: dict[str, Any]) -> str:
    speedups = ", ".join(f"{name} {speedup:.2f}" for name, speedup in cell["speedup"].items())
    load = f"{cell['kind']}, T {cell['temperature']:g}, batch {cell['batch']}"
    return f"{load}: {speedups}; of the best {cell['of_best_fixed']:.3f}"
