"""`aerie bench adaptive`: an engine that chooses the tree of each step (`speculative_mode: adaptive`) against engines
with a fixed tree.

A family is a set of fixed trees with an adaptive engine that may use all of them. Plain decoding counts as a fixed
tree. In each cell (a kind of text, a temperature, a batch size) contenders generate the same tokens, and take turns
after every few steps. Only steps in which the whole batch decodes are timed. First all contenders run a few times,
which shows the best fixed tree. Then plain decoding, this tree and the adaptive contender run. A ratio is taken within
a repeat; the median over the repeats counts. A cell whose ratios miss the goal is measured again with more repeats, and
these count, whatever they are. The adaptive engine of a family is the same in all cells, so it has to find the right
tree again after every change of the load.

After its cells, each family runs a load (`swing`) that alternates between one request and the largest batch. An
imaginary contender, the oracle, is the reference: in each phase of the load it is as fast as the best fixed tree of
this phase.

After the families come mixed traffic (`bench/shared_rows.py`) and looked-up tokens (`bench/looked_up.py`). Mixed
traffic counts accepted draft tokens if requests share the rows of a step, against equal trees with as many rows in all.
Looked-up tokens are draft tokens found by matching the end of the text in earlier text.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import product
from math import ceil, prod
from random import Random
from typing import Any

from cluster.bench import looked_up, steady_rank
from cluster.bench import shared_rows as shared
from cluster.bench.goals import Goal
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice, short_path
from cluster.bench.ranks import RankProcesses
from cluster.bench.report import LogProgress, machine_info, median, ratio, table
from cluster.bench.runs import TokenLists
from cluster.bench.steady_runs import Contenders, Gangs, SingleRanks, SteadyRun, run_together
from cluster.config import EngineConfig

CHAINS = tuple(TreeChoice(steps) for steps in (1, 2, 3, 5))
TREES = (TreeChoice(2, 4, 6), TreeChoice(3, 4, 8), TreeChoice(3, 4, 12))
NGRAM_DEPTHS = (2, 4, 8)
FAMILIES = ("chains", "trees", "ngram")
ADAPTIVE = "adaptive"
KINDS = ("code", "prose", "random", "copy")
FEW_REQUESTS, MANY_REQUESTS = 4, 32
"""In batches of at most `FEW_REQUESTS`, each request generates twice `Size.new_tokens` tokens, so that a run takes long
enough; in batches of at least `MANY_REQUESTS`, half as many.
"""
GOAL_CELL, GOAL_MEAN, GOAL_SWING = 0.98, 1.05, 0.97


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement. All contenders run `sweeps` times; plain decoding, the best fixed tree and the
    adaptive contender then run `repeats` times, and `more_repeats` times if a goal was missed. The alternating load
    runs `swings` times. `shared_steps` is the number of counted steps of mixed traffic. A family has at most
    `fixed_settings` fixed trees besides plain decoding: its largest ones. All is measured with each of the numbers of
    `ranks`; the batches are those of all ranks together.
    """

    batches: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    kinds: tuple[str, ...] = KINDS
    families: tuple[str, ...] = FAMILIES
    ranks: tuple[int, ...] = (1, 2)
    fixed_settings: int = 4
    prompt_tokens: int = 48
    new_tokens: int = 96
    sweeps: int = 2
    repeats: int = 6
    more_repeats: int = 12
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
    more_repeats=1,
    swings=1,
    shared_steps=4,
)


@dataclass(frozen=True, slots=True)
class LoadCell:
    """One load: a kind of text, a temperature and a batch size."""

    kind: str
    temperature: float
    batch: int


def measure(pair: ModelPair, size: Size = Size(), log_progress: LogProgress = print) -> dict[str, Any]:
    """Run the cells and the alternating load of each family. Then run mixed traffic if the family `chains` is measured,
    and looked-up tokens if `trees` is. Return the figures, JSON-ready.
    """
    prompts = {kind: text_prompts(pair, kind, max(size.batches), size.prompt_tokens) for kind in size.kinds}
    families = {}
    for name, ranks in product(size.families, size.ranks):
        with _contenders(configs(pair, name, size, ranks), ranks) as contenders:
            family = name if ranks == 1 else f"{name} on {ranks} ranks"
            families[family] = _measure_family(family, contenders, size, prompts, log_progress)
    shared_rows = []
    if "chains" in size.families:
        shared_rows = shared.measure(pair, prompts, size.new_tokens, size.shared_steps, log_progress)
    lookups = []
    if "trees" in size.families:
        loads = product(size.temperatures, size.batches)
        cells = [(temperature, batch, _new_tokens(size, batch)) for temperature, batch in loads]
        lookups = looked_up.measure(pair, prompts, cells, size.repeats, log_progress)
    return {
        "what": "adaptive",
        "machine": machine_info(),
        "target": short_path(pair.target),
        "new_tokens": size.new_tokens,
        "families": families,
        "shared_rows": shared_rows,
        "looked_up": lookups,
    }


@contextmanager
def _contenders(configs: Mapping[str, EngineConfig], ranks: int) -> Iterator[Contenders]:
    """Yield contenders with these settings, which have `ranks` ranks each."""
    if ranks == 1:
        yield SingleRanks(configs)
        return
    with RankProcesses(ranks, steady_rank.__name__) as processes:
        yield Gangs(configs, processes)


def _measure_family(
    family: str, contenders: Contenders, size: Size, prompts: Mapping[str, TokenLists], log_progress: LogProgress
) -> dict[str, Any]:
    cells = []
    for cell in (LoadCell(*values) for values in product(size.kinds, size.temperatures, size.batches)):
        cells.append(_measure_cell(cell, contenders, prompts[cell.kind], size))
        log_progress(f"adaptive: {family}, {_cell_line(cells[-1])}")
    swing = _measure_swing(contenders, prompts[size.kinds[0]], size)
    log_progress(f"adaptive: {family}, swinging load: {swing['of_oracle']:.3f} of the oracle")
    return {"cells": cells, "swing": swing, "best_single": _best_single(cells), "over_best_single": _over_single(cells)}


def configs(pair: ModelPair, family: str, size: Size, ranks: int = 1) -> dict[str, EngineConfig]:
    """Return the settings of a family's contenders by name: plain decoding, the fixed trees, and adaptive trees, which
    are at most as large as the last fixed tree. With several ranks, each has an attention group and one thread.
    """
    requests = ceil(max(size.batches) / ranks)
    of_ranks = {"tp_size": ranks, "attn_dp_size": ranks, "num_threads": 1} if ranks > 1 else {}

    def config(tree: TreeChoice) -> EngineConfig:
        return pair.config(tree, requests).model_copy(update=of_ranks)

    if family == "ngram":
        fixed = {
            f"n-gram of {depth}": config(PLAIN).model_copy(
                update={"speculative_algorithm": "NGRAM", "speculative_num_steps": depth}
            )
            for depth in NGRAM_DEPTHS
        }
    else:
        fixed = {str(tree): config(tree) for tree in (CHAINS if family == "chains" else TREES)}
    fixed = dict(list(fixed.items())[-size.fixed_settings :])
    largest = list(fixed.values())[-1]
    return {str(PLAIN): config(PLAIN), **fixed, ADAPTIVE: largest.model_copy(update={"speculative_mode": "adaptive"})}


def _measure_cell(cell: LoadCell, contenders: Contenders, prompts: TokenLists, size: Size) -> dict[str, Any]:
    new_tokens = _new_tokens(size, cell.batch)

    def run(names: Sequence[str], repeats: int) -> dict[str, list[SteadyRun]]:
        runs: dict[str, list[SteadyRun]] = {name: [] for name in names}
        for repeat in range(repeats):
            start = repeat * cell.batch % len(prompts)  # repeats use different prompts as long as there are enough
            batch = [prompts[(start + i) % len(prompts)] for i in range(cell.batch)]
            for name, steady_run in run_together(contenders, names, batch, cell.temperature, new_tokens).items():
                runs[name].append(steady_run)
        return runs

    run(contenders.names, 1)  # warms up: programs are captured, and estimates learn the load
    sweep = run(contenders.names, size.sweeps)
    speedups = {name: _ratio(sweep[name], sweep[str(PLAIN)]) for name in contenders.names}
    best = max((name for name in contenders.names if name != ADAPTIVE), key=speedups.__getitem__)
    compared = list(dict.fromkeys((str(PLAIN), best, ADAPTIVE)))
    runs = run(compared, size.repeats)
    first = {"of_plain": _ratio(runs[ADAPTIVE], runs[str(PLAIN)]), "of_best_fixed": _ratio(runs[ADAPTIVE], runs[best])}
    if min(first.values()) < GOAL_CELL:
        runs = run(compared, size.more_repeats)
    return {
        "kind": cell.kind,
        "temperature": cell.temperature,
        "batch": cell.batch,
        "speedup": speedups,
        "repeats": len(runs[ADAPTIVE]),
        "first_ratios": first,
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


def _are_identical(runs: Sequence[SteadyRun]) -> bool:
    """Return whether each request has the same tokens in all runs. The runs may have different numbers of tokens: each
    run is compared with the run that has the most tokens, at the positions that both have.
    """
    longest = max(runs, key=lambda run: sum(map(len, run.tokens))).tokens
    return all(
        own[: len(other)] == other[: len(own)] for run in runs for own, other in zip(run.tokens, longest, strict=True)
    )


def _measure_swing(contenders: Contenders, prompts: TokenLists, size: Size) -> dict[str, Any]:
    """Alternate between one request and the largest batch, `size.swings` times after a warm-up. For each
    contender and phase, return the seconds per token, summed over the turns. Also return the speed of adaptive trees as
    a share of the oracle's: in each phase, and the mean of both.
    """
    phases = [prompts[:1], prompts[: max(size.batches)]]
    seconds = {name: [0.0, 0.0] for name in contenders.names}
    for turn in range(-1, size.swings):
        for i, phase in enumerate(phases):
            for name, phase_run in run_together(contenders, contenders.names, phase, 0.0, size.new_tokens).items():
                seconds[name][i] += phase_run.seconds / phase_run.steady_tokens if turn >= 0 else 0.0
    fixed = [name for name in contenders.names if name != ADAPTIVE]
    # Shares of speed, one for each phase: in their mean, both phases have the same weight, however long they took.
    shares = [min(seconds[name][i] for name in fixed) / seconds[ADAPTIVE][i] for i in range(len(phases))]
    return {"seconds_per_token": seconds, "of_oracle_by_phase": shares, "of_oracle": sum(shares) / len(shares)}


def _ratio(runs: Sequence[SteadyRun], others: Sequence[SteadyRun]) -> float:
    """Return the median, over the repeats, of the speed of `runs` divided by the speed of `others`."""
    return median([ratio(a.tokens_per_second, b.tokens_per_second) for a, b in zip(runs, others, strict=True)])


def _best_single(cells: Sequence[dict[str, Any]]) -> str:
    """Return the fixed tree (or plain decoding) whose speedups over all cells have the highest geometric mean."""
    names: list[str] = [name for name in cells[0]["speedup"] if name != ADAPTIVE]
    return max(names, key=lambda name: prod(cell["speedup"][name] for cell in cells))


def _over_single(cells: Sequence[dict[str, Any]]) -> float:
    """Return the geometric mean, over all cells, of the speed of adaptive trees over that of `_best_single`."""
    single = _best_single(cells)
    return float(prod(cell["speedup"][ADAPTIVE] / cell["speedup"][single] for cell in cells) ** (1 / len(cells)))


def text_prompts(pair: ModelPair, kind: str, count: int, length: int) -> list[list[int]]:
    """Return prompts of one `kind`. "code" is held-out source code, "prose" is English descriptions of installed
    packages, and "random" is random tokens. "copy" is source code whose first third is repeated at the end, as when a
    file is to be copied; only these prompts are longer than `length` tokens.
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
    """Return the goals. In no cell are adaptive trees slower than plain decoding or the best fixed tree. Over all cells
    they are faster than the best single fixed tree. Under the alternating load they come close to the oracle. The goals
    of mixed traffic and of looked-up tokens follow.
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
                cell["repeats"],
                *(f"{cell['speedup'][name]:.2f}" for name in names),
                f"{cell['of_plain']:.3f}",
                f"{cell['of_best_fixed']:.3f}",
                cell["identical"],
            )
            for cell in figures["cells"]
        ]
        lines += [
            f"{family}: speed over plain decoding, medians",
            table(["text", "T", "batch", "repeats", *names, "of plain", "of best", "same tokens"], rows),
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
