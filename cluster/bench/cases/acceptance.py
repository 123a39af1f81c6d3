"""`aerie bench acceptance`: how many draft tokens the target accepts, on text that neither model was trained on.

It measures accept length at T=0 and T=0.8, and acceptance by depth of a chain at T=1. At T=1 the draft's tokens are
ranked with the target's Gumbel noise, and in a second run by probability only. Both are compared with sum(min(p, q)),
the bound of any coupling of the target's distribution p and the draft's distribution q.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.bench.goals import Goal
from cluster.bench.pair import PLAIN, Pair, TreeChoice, short_path
from cluster.bench.reference import Transformers
from cluster.bench.report import Say, columns, machine, mean, ratio, table
from cluster.bench.runs import EngineRun, Texts, params_of, run_together
from cluster.bench.watched import Reached, watched_engine
from cluster.engine import build_engine

CHAIN = TreeChoice(5)
GOALS = {CHAIN: {0.0: 2.8, 0.8: 2.4}, TreeChoice(5, 4, 24): {0.0: 3.3, 0.8: 3.0}}
GOAL_OF_BOUND = 0.85
SLACK = 1.25  # slack of a quick run: its few prompts measure accept lengths less exactly
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Size:
    """The number and length of held-out prompts, and the tokens to generate after each."""

    prompts: int = 40
    prompt_tokens: int = 64
    new_tokens: int = 128


QUICK = Size(prompts=8, new_tokens=32)


def measure(pair: Pair, size: Size = Size(), say: Say = print) -> dict[str, Any]:
    """Run all measurements and return the figures, JSON-ready."""
    goals = {str(shape): goal for shape, goal in GOALS.items()}
    lengths, identical = accept_lengths(pair, size, list(GOALS), say)
    say("acceptance: by depth at T=1")
    return {
        "what": "acceptance",
        "machine": machine(),
        "target": short_path(pair.target),
        **asdict(size),
        "identical": identical,
        "accept_lengths": [{**at, "goal": goals[at["name"]][at["temperature"]]} for at in lengths],
        **by_depth(pair, pair.prompts(size.prompts, size.prompt_tokens), size.new_tokens),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the demo pair's goals: accept lengths, and coupled acceptance as a share of its bound."""
    lengths = [
        Goal(f"accept length, {x['name']}, T={x['temperature']:g}", x["accept_length"], x["goal"], True, SLACK)
        for x in result["accept_lengths"]
    ]
    return [*lengths, Goal("coupled acceptance of the bound", result["of_bound"], GOAL_OF_BOUND, True, SLACK)]


def show(result: dict[str, Any]) -> str:
    """Return the figures and goals as tables."""
    rows = [(x["name"], x["temperature"], x["accept_length"], x["goal"]) for x in result["accept_lengths"]]
    depths = [d | {"depth": str(d["depth"]), "of_bound": f"{d['of_bound']:.0%}"} for d in result["by_depth"]]
    keys = {"depth": "depth", "reached": "reached", "coupled": "coupled", "by probability": "likeliest"}
    keys |= {"bound": "bound", "of bound": "of_bound"}
    keys |= {"top-4 coupled": "top4_coupled", "top-4 by prob.": "top4_likeliest"}
    return "\n".join(
        [
            heading("accept length", result),
            table(("setting", "T", "accept length", "goal"), rows),
            "",
            f"acceptance by depth, {CHAIN}, T=1 (bound: sum(min(p, q)) at the same contexts)",
            columns(depths, keys),
            f"coupled acceptance is {result['of_bound']:.1%} of the bound (goal {GOAL_OF_BOUND:.0%}); accept length "
            f"{result['accept_length_coupled']:.2f} coupled, {result['accept_length_likeliest']:.2f} by probability",
        ]
    )


def heading(what: str, result: dict[str, Any]) -> str:
    """Return the first line of a report: the prompts, and whether the tokens equal those of plain decoding."""
    return (
        f"{what}: {result['prompts']} held-out prompts of {result['prompt_tokens']} tokens, {result['new_tokens']} new,"
        f" EOS ignored; same tokens as plain decoding: {'yes' if result['identical'] else 'NO'}"
    )


def by_depth(pair: Pair, prompts: Texts, new_tokens: int) -> dict[str, Any]:
    """Measure acceptance by depth of a chain at T=1, ranked with noise and by probability only, and the bound."""
    coupled, reached, ids = _watch(pair, prompts, new_tokens, alone=False)
    likeliest, reached_alone, _ = _watch(pair, prompts, new_tokens, alone=True)
    texts = [[*prompt, *made] for prompt, made in zip(prompts, coupled.tokens, strict=True)]
    bounds = bounds_of(reached, texts, Transformers(pair.target, "float32", str(ids.device)), ids)
    depths = []
    for depth in range(1, CHAIN.num_steps + 1):
        here = [(r, bound) for r, bound in zip(reached, bounds, strict=True) if r.depth == depth]
        alone = [r for r in reached_alone if r.depth == depth]
        accepted = mean([r.proposed == r.token for r, _ in here])
        bound = mean([bound for _, bound in here])
        depths.append(
            {
                "depth": depth,
                "reached": len(here),
                "coupled": accepted,
                "likeliest": mean([r.proposed == r.token for r in alone]),
                "bound": bound,
                "of_bound": ratio(accepted, bound),
                "top4_coupled": mean([r.token in r.glance.coupled for r, _ in here]),
                "top4_likeliest": mean([r.token in r.glance.likely for r, _ in here]),
            }
        )
    return {
        "by_depth": depths,
        "of_bound": ratio(sum(r.proposed == r.token for r in reached), sum(bounds)),
        "accept_length_coupled": coupled.accept_length,
        "accept_length_likeliest": likeliest.accept_length,
    }


def bounds_of(reached: Sequence[Reached], texts: Texts, target: Transformers, ids: Tensor) -> list[float]:
    """Return sum(min(p, q)) for every reached context. A request's seed is the index of its text.

    q is zero outside the draft vocabulary `ids`, so only p at those ids counts.
    """
    p = [log_probabilities[:, ids].exp() for log_probabilities in target.log_probabilities(texts)]
    return [float(torch.minimum(p[r.seed][r.position - 1], r.glance.probabilities.float()).sum()) for r in reached]


def _watch(pair: Pair, prompts: Texts, new_tokens: int, alone: bool) -> tuple[EngineRun, list[Reached], Tensor]:
    """Run a recording draft at T=1. Return the run, the reached depths (`Reached`), and the ids of the draft
    vocabulary.
    """
    engine, draft = watched_engine(pair.config(CHAIN, len(prompts)), alone)
    run = run_together(engine, prompts, [params_of(new_tokens, 1.0, seed) for seed in range(len(prompts))])
    ends = [len(prompt) + new_tokens for prompt in prompts]
    return run, [r for r in draft.reached if r.position < ends[r.seed]], draft.ids


def accept_lengths(pair: Pair, size: Size, shapes: Sequence[TreeChoice], say: Say) -> tuple[list[dict[str, Any]], bool]:
    """Return, per tree and temperature, the accept length and the acceptance by depth; and whether all tokens equal
    those of plain decoding.
    """
    figures, same, prompts = [], True, pair.prompts(size.prompts, size.prompt_tokens)
    engines = {shape: build_engine(pair.config(shape, size.prompts)) for shape in (PLAIN, *shapes)}
    for temperature in TEMPERATURES:
        params = [params_of(size.new_tokens, temperature, seed) for seed in range(size.prompts)]
        truth: list[list[int]] = []
        for shape, engine in engines.items():
            say(f"acceptance: {shape} at T={temperature:g}")
            run = run_together(engine, prompts, params)
            truth = truth or run.tokens
            same = same and run.tokens == truth
            if shape != PLAIN:
                at = {"name": str(shape), "temperature": temperature}
                figures.append(at | {"accept_length": run.accept_length, "by_depth": run.by_depth(shape.num_steps)})
    return figures, same
