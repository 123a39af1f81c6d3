"""`aerie bench adaptive`: trees that each step chooses (`speculative_mode: adaptive`) against every fixed tree.

In each cell (a kind of text, a temperature, a batch size) contenders generate the same tokens in turns. Only steps in
which the whole batch decodes are timed. First all contenders run a few times, which shows the best fixed tree. Then
plain decoding, this tree and the adaptive contender run in turns, in reverse order in every other repeat. A ratio is
taken within a repeat; the median over the repeats counts. The adaptive engine is the same in all cells, so it has to
find the right tree again after every change of the load.

Then comes mixed traffic: how many drafted tokens are accepted if the requests of a step share its rows, against equal
trees with as many rows (`bench/shared_rows.py`). Then come looked-up tokens beside a draft (`bench/looked_up.py`).

The last part of a family is a load that swings between one request and the largest batch. It is compared with a
contender that does not exist: one that uses, in each phase, the tree that is the best for it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import product
from math import prod
from random import Random
from typing import Any

from cluster.bench import looked_up
from cluster.bench import shared_rows as shared
from cluster.bench.goals import Goal
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice, short_path
from cluster.bench.report import LogProgress, machine_info, median, ratio, table
from cluster.bench.runs import TokenLists, fixed_length_params
from cluster.config import EngineConfig
from cluster.engine import Engine, build_engine
from cluster.request import Request

CHAINS = tuple(TreeChoice(steps) for steps in (1, 2, 3, 5))
TREES = (TreeChoice(2, 4, 6), TreeChoice(3, 4, 8), TreeChoice(3, 4, 12))
NGRAM_DEPTHS = (2, 4, 8)
FAMILIES = ("chains", "trees", "ngram")
ADAPTIVE = "adaptive"
KINDS = ("code", "prose", "random", "copy")
FEW_REQUESTS, MANY_REQUESTS = 4, 32
"""With few requests each generates twice as many tokens, so that a run takes long enough; with many, half as many."""
LONGEST = 3
"""A run ends when its requests have generated a given number of tokens on average. One request may generate at most
this many times as many.
"""
GOAL_CELL, GOAL_MEAN, GOAL_SWING = 0.98, 1.05, 0.97


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement. `sweeps` are the repeats of all contenders, `repeats` those of the last three.
    `shared_steps` are the steps that count for shared rows. Each family has at most `fixed_settings` fixed settings,
    those with the largest trees.
    """

    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    kinds: tuple[str, ...] = KINDS
    families: tuple[str, ...] = FAMILIES
    fixed_settings: int = 4
    prompt_tokens: int = 48
    new_tokens: int = 96
    sweeps: int = 2
    repeats: int = 6
    swings: int = 4
    shared_steps: int = 200


QUICK = Size(
    batches=(1, 4),
    temperatures=(0.8,),
    kinds=("code", "random"),
    fixed_settings=1,
    new_tokens=16,
    sweeps=1,
    repeats=1,
    swings=1,
    shared_steps=4,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: a kind of text, a temperature and a batch size."""

    kind: str
    temperature: float
    batch: int


def measure(pair: ModelPair, size: Size = Size(), log_progress: LogProgress = print) -> dict[str, Any]:
    """Run all cells and the swinging load for each family of trees; return the figures, JSON-ready."""
    prompts = {kind: text_prompts(pair, kind, max(size.batches), size.prompt_tokens) for kind in size.kinds}
    families = {name: _measure_family(pair, name, size, prompts, log_progress) for name in size.families}
    shared_rows = []
    if "chains" in size.families:
        shared_rows = shared.measure(pair, prompts, size.new_tokens, size.shared_steps, log_progress)
    lookups = []
    if "trees" in size.families:
        loads = product(size.temperatures, size.batches)
        cells = [(temperature, batch, _new_tokens(size, batch)) for temperature, batch in loads]
        lookups = looked_up.measure(pair, prompts, cells, run_steadily, size.repeats, log_progress)
    return {
        "what": "adaptive",
        "machine": machine_info(),
        "target": short_path(pair.target),
        "new_tokens": size.new_tokens,
        "repeats": size.repeats,
        "families": families,
        "shared_rows": shared_rows,
        "looked_up": lookups,
    }


def _measure_family(
    pair: ModelPair, family: str, size: Size, prompts: Mapping[str, TokenLists], log_progress: LogProgress
) -> dict[str, Any]:
    engines = {name: build_engine(config) for name, config in configs(pair, family, size).items()}
    cells = []
    for cell in (Cell(*values) for values in product(size.kinds, size.temperatures, size.batches)):
        cells.append(_measure_cell(cell, engines, prompts[cell.kind], size))
        log_progress(f"adaptive: {family}, {_cell_line(cells[-1])}")
    swing = _measure_swing(engines, prompts[size.kinds[0]], size)
    log_progress(f"adaptive: {family}, swinging load: {swing['of_oracle']:.3f} of the oracle")
    return {"cells": cells, "swing": swing, "best_single": _best_single(cells), "over_best_single": _over_single(cells)}


def configs(pair: ModelPair, family: str, size: Size) -> dict[str, EngineConfig]:
    """Return the settings of the contenders by name: plain decoding, fixed trees, and adaptive trees up to the last of
    these.
    """
    requests = max(size.batches)
    plain = pair.config(PLAIN, requests)
    if family == "ngram":
        fixed = {
            f"n-gram of {depth}": plain.model_copy(
                update={"speculative_algorithm": "NGRAM", "speculative_num_steps": depth}
            )
            for depth in NGRAM_DEPTHS
        }
    else:
        fixed = {str(tree): pair.config(tree, requests) for tree in (CHAINS if family == "chains" else TREES)}
    fixed = dict(list(fixed.items())[-size.fixed_settings :])
    largest = list(fixed.values())[-1]
    return {str(PLAIN): plain, **fixed, ADAPTIVE: largest.model_copy(update={"speculative_mode": "adaptive"})}


def _measure_cell(cell: Cell, engines: dict[str, Engine], prompts: TokenLists, size: Size) -> dict[str, Any]:
    new_tokens = _new_tokens(size, cell.batch)

    def run(names: Sequence[str], repeats: int) -> dict[str, list[SteadyRun]]:
        runs: dict[str, list[SteadyRun]] = {name: [] for name in names}
        for repeat in range(repeats):
            start = repeat * cell.batch % len(prompts)  # each repeat has prompts of its own while there are enough
            batch = prompts[start : start + cell.batch]
            for name in names[:: -1 if repeat % 2 else 1]:
                runs[name].append(run_steadily(engines[name], batch, cell.temperature, new_tokens))
        return runs

    run(list(engines), 1)  # warms up: programs are captured, and estimates learn the load
    sweep = run(list(engines), size.sweeps)
    speedups = {name: _ratio(sweep[name], sweep[str(PLAIN)]) for name in engines}
    best = max((name for name in engines if name != ADAPTIVE), key=speedups.__getitem__)
    runs = run(list(dict.fromkeys((str(PLAIN), best, ADAPTIVE))), size.repeats)
    return {
        "kind": cell.kind,
        "temperature": cell.temperature,
        "batch": cell.batch,
        "speedup": speedups,
        "tokens_per_second": {name: median([each.tokens_per_second for each in runs[name]]) for name in runs},
        "best_fixed": best,
        "best_of_plain": _ratio(runs[best], runs[str(PLAIN)]),
        "of_plain": _ratio(runs[ADAPTIVE], runs[str(PLAIN)]),
        "of_best_fixed": _ratio(runs[ADAPTIVE], runs[best]),
        "identical": all(_are_identical(repeat) for repeat in zip(*runs.values(), strict=True)),
    }


def _new_tokens(size: Size, batch: int) -> int:
    """Return how many tokens each request of a batch generates on average."""
    factor = 2 if batch <= FEW_REQUESTS else 0.5 if batch >= MANY_REQUESTS else 1
    return int(size.new_tokens * factor)


@dataclass(frozen=True, slots=True)
class SteadyRun:
    """The tokens of each request, and the number and the seconds of those that were generated while all requests
    decoded.
    """

    tokens: list[list[int]]
    steady_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second while all requests decoded."""
        return ratio(self.steady_tokens, self.seconds)


def run_steadily(engine: Engine, prompts: TokenLists, temperature: float, new_tokens: int) -> SteadyRun:
    """Run the prompts as one batch, until they have `new_tokens` new tokens on average; then abort them.

    No request ends before: if the first one to end ended the run, contenders that give some requests more rows than
    others would be stopped early.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        params = fixed_length_params(LONGEST * new_tokens, temperature, seed=i)
        engine.submit(Request(str(i), tuple(prompt), params))
    started_at, steady_tokens, finished = 0.0, 0, False
    while not finished and steady_tokens < new_tokens * len(prompts):
        outputs = engine.step().outputs
        for output in outputs:
            tokens[int(output.request_id)] += output.token_ids
            finished |= output.finish_reason is not None
        if started_at:
            steady_tokens += sum(len(output.token_ids) for output in outputs)
        elif all(tokens):
            started_at = time.perf_counter()
    seconds = time.perf_counter() - started_at
    for i in range(len(prompts)):
        engine.abort(str(i))
    while engine.has_work:
        engine.step()
    return SteadyRun(tokens, steady_tokens, seconds)


def _are_identical(runs: Sequence[SteadyRun]) -> bool:
    """Return whether each request has the same tokens in all runs. The runs may have generated different numbers of
    tokens: only the positions that two runs have in common are compared.
    """
    longest = max(runs, key=lambda run: sum(map(len, run.tokens))).tokens
    return all(
        own[: len(other)] == other[: len(own)] for run in runs for own, other in zip(run.tokens, longest, strict=True)
    )


def _measure_swing(engines: dict[str, Engine], prompts: TokenLists, size: Size) -> dict[str, Any]:
    """Run phases of one request and of the largest batch in turns, `size.swings` times."""
    phases = [prompts[:1], prompts[: max(size.batches)]]
    seconds = {name: [0.0, 0.0] for name in engines}
    for turn in range(-1, size.swings):
        for name in list(engines)[:: -1 if turn % 2 else 1]:
            for i, phase in enumerate(phases):
                phase_run = run_steadily(engines[name], phase, 0.0, size.new_tokens)
                seconds[name][i] += phase_run.seconds / phase_run.steady_tokens if turn >= 0 else 0.0
    fixed = [name for name in engines if name != ADAPTIVE]
    # Seconds per token, so that each phase weighs as if it had lasted as long as the other.
    shares = [min(seconds[name][i] for name in fixed) / seconds[ADAPTIVE][i] for i in range(len(phases))]
    return {"seconds_per_token": seconds, "of_oracle_by_phase": shares, "of_oracle": sum(shares) / len(shares)}


def _ratio(runs: Sequence[SteadyRun], others: Sequence[SteadyRun]) -> float:
    """Return the median of the ratios of speed within each repeat."""
    return median([ratio(a.tokens_per_second, b.tokens_per_second) for a, b in zip(runs, others, strict=True)])


def _best_single(cells: Sequence[dict[str, Any]]) -> str:
    """Return the name of the fixed tree whose speedups over all cells have the highest geometric mean."""
    names: list[str] = [name for name in cells[0]["speedup"] if name != ADAPTIVE]
    return max(names, key=lambda name: prod(cell["speedup"][name] for cell in cells))


def _over_single(cells: Sequence[dict[str, Any]]) -> float:
    """Return the geometric mean, over all cells, of adaptive over the best single fixed tree."""
    single = _best_single(cells)
    return float(prod(cell["speedup"][ADAPTIVE] / cell["speedup"][single] for cell in cells) ** (1 / len(cells)))


def text_prompts(pair: ModelPair, kind: str, count: int, length: int) -> list[list[int]]:
    """Return prompts of one kind: held-out source code; English descriptions of installed packages; random tokens;
    source code of which the first lines are repeated at the end, as when a file is to be copied.
    """
    if kind == "code":
        return pair.prompts(count, length)
    if kind == "copy":
        return [[*prompt, *prompt[: length // 3]] for prompt in pair.prompts(count, length)]
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
    return goal_list + shared.goals(result["shared_rows"]) + looked_up.goals(result["looked_up"])


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
                f"{cell['of_plain']:.3f}",
                f"{cell['of_best_fixed']:.3f}",
                cell["identical"],
            )
            for cell in figures["cells"]
        ]
        lines += [
            f"{family}: speed over plain decoding, medians of {result['repeats']} repeats",
            table(["text", "T", "batch", *names, "of plain", "of best", "same tokens"], rows),
            f"over the best single setting ({figures['best_single']}): {figures['over_best_single']:.3f}",
            f"swinging load: {figures['swing']['of_oracle']:.3f} of an oracle",
            "",
        ]
    return "\n".join([*lines, *shared.show(result["shared_rows"]), *looked_up.show(result["looked_up"])])


def _cell_line(cell: dict[str, Any]) -> str:
    speedups = ", ".join(f"{name} {speedup:.2f}" for name, speedup in cell["speedup"].items())
    load = f"{cell['kind']}, T {cell['temperature']:g}, batch {cell['batch']}"
    speedups += f"; of the best ({cell['best_fixed']}) {cell['of_best_fixed']:.3f}"
    return f"{load}: {speedups}, of plain {cell['of_plain']:.3f}"
