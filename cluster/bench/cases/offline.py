"""`aerie bench offline`: speculation on and off, and plain decoding against `transformers`, in one run.

Contenders take turns in every repeat, in reverse order in every other repeat. So if the machine becomes slower for a
while, all of them are affected. A ratio is taken within a repeat; the median over the repeats is shown. All settings of
this engine must give the same tokens. For `transformers`, the number of texts with the same tokens is shown.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.pair import DEFAULT_TREE, PLAIN, ModelPair, TreeChoice, short_path
from cluster.bench.reference import Transformers
from cluster.bench.report import LogProgress, first_difference, machine_info, median, ratio, table
from cluster.bench.runs import EngineRun, TokenLists, run_batch_greedily
from cluster.engine import build_engine

BATCHES = (1, 8)
TRIED_TREES = (
    *(TreeChoice(steps) for steps in (2, 3, 4, 5)),
    TreeChoice(3, 2, 6),
    TreeChoice(4, 2, 8),
    TreeChoice(5, 2, 12),
    TreeChoice(2, 4, 8),
    TreeChoice(3, 4, 12),
    TreeChoice(4, 4, 16),
)
SHAPES = TRIED_TREES if DEFAULT_TREE in TRIED_TREES else (*TRIED_TREES, DEFAULT_TREE)
TRANSFORMERS = "transformers"
GOAL_SPEEDUP = {1: 1.6, 8: 1.2}
GOAL_TRANSFORMERS = {1: 3.0, 8: 2.0}
GOAL_OUTSIDE_SHARE = 0.15

RunBatch = Callable[[TokenLists], EngineRun]  # runs prompts as one batch


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement. At batch 1, only the first `single_prompts` prompts run, one after another."""

    prompts: int = 8
    single_prompts: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 128
    repeats: int = 5


QUICK = Size(prompts=8, single_prompts=1, new_tokens=12, repeats=1)


@dataclass(slots=True)
class Contender:
    """One way to generate. `runs` has its recorded runs by batch size, one per repeat."""

    name: str
    run_batch: RunBatch
    runs: dict[int, list[EngineRun]] = field(default_factory=dict)

    def run(self, prompts: TokenLists, batch: int) -> EngineRun:
        """Run the prompts, `batch` at a time, and return the sum of these runs."""
        total = EngineRun()
        for start in range(0, len(prompts), batch):
            total.add(self.run_batch(prompts[start : start + batch]))
        return total

    def speed(self, batch: int) -> float:
        """Return the median, over the repeats, of the tokens per second at this batch size."""
        return median([run.tokens_per_second for run in self.runs[batch]])

    def speedup_over(self, other: "Contender", batch: int) -> float:
        """Return the median, over the repeats, of this contender's speed divided by the speed of `other`."""
        pairs = zip(self.runs[batch], other.runs[batch], strict=True)
        return median([ratio(a.tokens_per_second, b.tokens_per_second) for a, b in pairs])


def measure(pair: ModelPair, size: Size = Size(), log_progress: LogProgress = print) -> dict[str, Any]:
    """Run all contenders and return the figures, JSON-ready."""
    return report(pair, size, SHAPES, run_contenders(pair, size, SHAPES, log_progress))


def run_contenders(
    pair: ModelPair, size: Size, trees: Sequence[TreeChoice], log_progress: LogProgress = print
) -> dict[str, Contender]:
    """Warm up each contender with an unrecorded run, and run all contenders in every repeat. Return them by name."""
    prompts = pair.prompts(size.prompts, size.prompt_tokens)
    contenders: dict[str, Contender] = {}
    for tree in (PLAIN, *trees):
        engine = build_engine(pair.config(tree, max(BATCHES)))
        contenders[str(tree)] = Contender(str(tree), partial(run_batch_greedily, engine, new_tokens=size.new_tokens))
        dtype, device = engine.info().dtype, engine.info().device
    reference = Transformers(pair.target, dtype, device)
    contenders[TRANSFORMERS] = Contender(TRANSFORMERS, partial(reference.run, new_tokens=size.new_tokens))
    for contender in contenders.values():
        contender.run(prompts[:1], 1)
        contender.runs = {batch: [] for batch in BATCHES}
    for repeat in range(size.repeats):
        log_progress(f"offline: repeat {repeat + 1} of {size.repeats}, {len(contenders)} contenders")
        turn_order = list(contenders.values())[:: -1 if repeat % 2 else 1]
        for batch in BATCHES:
            for contender in turn_order:
                contender.runs[batch].append(
                    contender.run(prompts[: size.single_prompts] if batch == 1 else prompts, batch)
                )
    return contenders


def report(
    pair: ModelPair, size: Size, trees: Sequence[TreeChoice], contenders: dict[str, Contender]
) -> dict[str, Any]:
    """Return the figures of plain decoding and of each tree, the best trees, and plain decoding against `transformers`,
    JSON-ready.
    """
    plain, reference = contenders[str(PLAIN)], contenders[TRANSFORMERS]
    plain_tokens = {batch: plain.runs[batch][0].tokens for batch in BATCHES}
    settings = [_setting_figures(contenders[str(tree)], tree, plain, plain_tokens) for tree in (PLAIN, *trees)]
    tree_settings = settings[1:]
    best = {f"batch_{batch}": _best(tree_settings, (batch,)) for batch in BATCHES}
    best["overall"] = _best(tree_settings, BATCHES)
    return {
        "what": "offline",
        "machine": machine_info(),
        "target": short_path(pair.target),
        "prompts": size.prompts,
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
        "repeats": size.repeats,
        "identical": all(setting["identical"] for setting in settings),
        "settings": settings,
        "best": best,
        "default": str(DEFAULT_TREE),
        "against_transformers": {
            f"batch_{batch}": {
                "tokens_per_second": plain.speed(batch),
                "transformers_tokens_per_second": reference.speed(batch),
                "ratio": plain.speedup_over(reference, batch),
                "same_texts": sum(
                    a == b for a, b in zip(plain_tokens[batch], reference.runs[batch][0].tokens, strict=True)
                ),
                "texts": len(plain_tokens[batch]),
            }
            for batch in BATCHES
        },
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the demo pair's goals for three figures: the best speedup, the share of time outside model forwards (of
    plain decoding and of the best tree), and the speed of plain decoding divided by the speed of `transformers`.
    """
    settings = {setting["name"]: setting for setting in result["settings"]}
    goal_list = []
    for batch in BATCHES:
        key, name = f"batch_{batch}", result["best"][f"batch_{batch}"]
        goal_list.append(
            Goal(f"best speedup at batch {batch}", settings[name][key]["speedup"], GOAL_SPEEDUP[batch], True)
        )
        transformers_ratio = result["against_transformers"][key]["ratio"]
        goal_list.append(
            Goal(f"plain over transformers at batch {batch}", transformers_ratio, GOAL_TRANSFORMERS[batch], True)
        )
    shares = {name: settings[name][f"batch_{BATCHES[-1]}"] for name in (str(PLAIN), result["best"]["overall"])}
    goal_list += [
        Goal(f"share outside forwards, {name}", s["outside_share"], GOAL_OUTSIDE_SHARE) for name, s in shares.items()
    ]
    return goal_list


def show(result: dict[str, Any]) -> str:
    """Return the figures and goals as tables."""
    batch = BATCHES[-1]
    settings = {setting["name"]: setting for setting in result["settings"]}
    rows = [
        (
            s["name"] + (" (default)" if s["name"] == result["default"] else ""),
            s["nodes"],
            s["accept_length"],
            *(s[f"batch_{b}"][key] for b in BATCHES for key in ("tokens_per_second", "speedup")),
            f"{s[f'batch_{batch}']['outside_share']:.1%}",
            s["identical"],
        )
        for s in result["settings"]
    ]
    speeds = [header for b in BATCHES for header in (f"tokens/s, batch {b}", "speedup")]
    headers = ["setting", "nodes", "accept length", *speeds, f"outside forwards, batch {batch}", "same tokens"]
    lines = [
        f"speculation: {result['prompts']} held-out prompts of {result['prompt_tokens']} tokens, "
        f"{result['new_tokens']} new, medians of {result['repeats']} repeats",
        table(headers, rows),
        "",
    ]
    for b in BATCHES:
        name = result["best"][f"batch_{b}"]
        lines.append(
            f"best at batch {b}: {name}, {settings[name][f'batch_{b}']['speedup']:.2f}x (goal {GOAL_SPEEDUP[b]}x)"
        )
    lines.append(f"best overall: {result['best']['overall']}; shipped default: {result['default']}")
    shares = ", ".join(
        f"{settings[name][f'batch_{batch}']['outside_share']:.1%} ({name})"
        for name in (str(PLAIN), result["best"]["overall"])
    )
    lines += [f"step time outside model forwards at batch {batch}: {shares} (goal under {GOAL_OUTSIDE_SHARE:.0%})", ""]
    rows = [
        (
            f"batch {b}",
            figures["tokens_per_second"],
            figures["transformers_tokens_per_second"],
            f"{figures['ratio']:.2f}x",
            f"{GOAL_TRANSFORMERS[b]:.0f}x",
            f"{figures['same_texts']} of {figures['texts']}",
        )
        for b in BATCHES
        for figures in (result["against_transformers"][f"batch_{b}"],)
    ]
    lines += [table(("plain decoding", "ours, tokens/s", "transformers", "ratio", "goal", "same texts"), rows)]
    return "\n".join(lines)


def _setting_figures(
    contender: Contender, tree: TreeChoice, plain: Contender, plain_tokens: dict[int, list[list[int]]]
) -> dict[str, Any]:
    runs = contender.runs
    runs_and_texts = [(run, plain_tokens[batch]) for batch in BATCHES for run in runs[batch]]
    first_differences = [
        first_difference(a, b) for run, texts in runs_and_texts for a, b in zip(run.tokens, texts, strict=True)
    ]
    first_run = runs[BATCHES[-1]][0]
    figures: dict[str, Any] = {
        "name": contender.name,
        "num_steps": tree.num_steps,
        "topk": tree.topk,
        "nodes": tree.nodes,
        "accept_length": first_run.accept_length,
        "identical": all(index is None for index in first_differences),
        "first_difference": min((index for index in first_differences if index is not None), default=None),
    }
    for batch in BATCHES:
        figures[f"batch_{batch}"] = {
            "tokens_per_second": contender.speed(batch),
            "speedup": contender.speedup_over(plain, batch),
            "outside_share": median([run.outside_forward_share for run in runs[batch]]),
        }
    return figures


def _best(settings: Sequence[dict[str, Any]], batches: Sequence[int]) -> str:
    """Return the name of the setting whose speedups at these batch sizes have the highest geometric mean."""
    best = max(settings, key=lambda setting: prod(setting[f"batch_{batch}"]["speedup"] for batch in batches))
    return str(best["name"])
