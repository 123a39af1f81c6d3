"""`aerie bench acceptance`: how many draft tokens the target accepts, on text that neither model was trained on.

It measures accept length at temperatures (T) 0 and 0.8, and acceptance by depth of a chain at T=1. At T=1 there are two
runs. In the run "coupled", the draft's tokens are ranked with the target's Gumbel noise; in "likeliest", by probability
only. The coupled acceptance is compared with sum(min(p, q)), the highest acceptance that any coupling of the target's
distribution p and the draft's distribution q can reach.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.bench.goals import Goal
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice, short_path
from cluster.bench.reference import Transformers
from cluster.bench.report import LogProgress, columns_table, machine_info, mean, ratio, table
from cluster.bench.runs import EngineRun, TokenLists, fixed_length_params, run_batch
from cluster.bench.watched import ReachedDepth, recording_engine
from cluster.engine import build_engine

CHAIN = TreeChoice(5)
GOALS = {CHAIN: {0.0: 2.8, 0.8: 2.4}, TreeChoice(5, 4, 24): {0.0: 3.3, 0.8: 3.0}}
GOAL_OF_BOUND = 0.85
GOAL_SLACK = 1.25  # factor by which the goals of a quick run are looser: few prompts measure less exactly
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Size:
    """The number and length of held-out prompts, and the tokens to generate after each."""

    prompts: int = 40
    prompt_tokens: int = 64
    new_tokens: int = 128


QUICK = Size(prompts=8, new_tokens=32)


def measure(pair: ModelPair, size: Size = Size(), log_progress: LogProgress = print) -> dict[str, Any]:
    """Run all measurements and return the figures, JSON-ready."""
    goals_by_tree = {str(tree): goal for tree, goal in GOALS.items()}
    length_rows, identical = accept_lengths(pair, size, list(GOALS), log_progress)
    log_progress("acceptance: by depth at T=1")
    return {
        "what": "acceptance",
        "machine": machine_info(),
        "target": short_path(pair.target),
        **asdict(size),
        "identical": identical,
        "accept_lengths": [{**row, "goal": goals_by_tree[row["name"]][row["temperature"]]} for row in length_rows],
        **acceptance_by_depth(pair, pair.prompts(size.prompts, size.prompt_tokens), size.new_tokens),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the demo pair's goals: accept lengths, and coupled acceptance as a share of its bound."""
    length_goals = [
        Goal(
            f"accept length, {row['name']}, T={row['temperature']:g}",
            row["accept_length"],
            row["goal"],
            True,
            GOAL_SLACK,
        )
        for row in result["accept_lengths"]
    ]
    return [*length_goals, Goal("coupled acceptance of the bound", result["of_bound"], GOAL_OF_BOUND, True, GOAL_SLACK)]


def show(result: dict[str, Any]) -> str:
    """Return the figures and goals as tables."""
    rows = [(row["name"], row["temperature"], row["accept_length"], row["goal"]) for row in result["accept_lengths"]]
    depths = [
        depth_row | {"depth": str(depth_row["depth"]), "of_bound": f"{depth_row['of_bound']:.0%}"}
        for depth_row in result["by_depth"]
    ]
    keys = {"depth": "depth", "reached": "reached", "coupled": "coupled", "by probability": "likeliest"}
    keys |= {"bound": "bound", "of bound": "of_bound"}
    keys |= {"top-4 coupled": "top4_coupled", "top-4 by prob.": "top4_likeliest"}
    return "\n".join(
        [
            heading("accept length", result),
            table(("setting", "T", "accept length", "goal"), rows),
            "",
            f"acceptance by depth, {CHAIN}, T=1 (bound: sum(min(p, q)) at the same contexts)",
            columns_table(depths, keys),
            f"coupled acceptance is {result['of_bound']:.1%} of the bound (goal {GOAL_OF_BOUND:.0%}); accept length "
            f"{result['accept_length_coupled']:.2f} coupled, {result['accept_length_likeliest']:.2f} by probability",
        ]
    )


def heading(title: str, result: dict[str, Any]) -> str:
    """Return the first line of a report: the size of the run, and whether tokens equal those of plain decoding."""
    return (
        f"{title}: {result['prompts']} held-out prompts of {result['prompt_tokens']} tokens, {result['new_tokens']} "
        f"new, EOS ignored; same tokens as plain decoding: {'yes' if result['identical'] else 'NO'}"
    )


def acceptance_by_depth(pair: ModelPair, prompts: TokenLists, new_tokens: int) -> dict[str, Any]:
    """Return the acceptance by depth and the accept length of a chain at T=1, from one run with each ranking. At the
    contexts of the coupled run, also return the bound, and how often the target's token is among the top 4 of each
    ranking.
    """
    coupled_run, reached, ids = _record_chain(pair, prompts, new_tokens, by_probability=False)
    likeliest_run, reached_by_probability, _ = _record_chain(pair, prompts, new_tokens, by_probability=True)
    texts = [[*prompt, *generated] for prompt, generated in zip(prompts, coupled_run.tokens, strict=True)]
    bounds = acceptance_bounds(reached, texts, Transformers(pair.target, "float32", str(ids.device)), ids)
    depths = []
    for depth in range(1, CHAIN.num_steps + 1):
        coupled_here = [(r, bound) for r, bound in zip(reached, bounds, strict=True) if r.depth == depth]
        likeliest_here = [r for r in reached_by_probability if r.depth == depth]
        accepted = mean([r.proposed == r.token for r, _ in coupled_here])
        bound = mean([bound for _, bound in coupled_here])
        depths.append(
            {
                "depth": depth,
                "reached": len(coupled_here),
                "coupled": accepted,
                "likeliest": mean([r.proposed == r.token for r in likeliest_here]),
                "bound": bound,
                "of_bound": ratio(accepted, bound),
                "top4_coupled": mean([r.token in r.distribution.top_coupled for r, _ in coupled_here]),
                "top4_likeliest": mean([r.token in r.distribution.top_by_probability for r, _ in coupled_here]),
            }
        )
    return {
        "by_depth": depths,
        "of_bound": ratio(sum(r.proposed == r.token for r in reached), sum(bounds)),
        "accept_length_coupled": coupled_run.accept_length,
        "accept_length_likeliest": likeliest_run.accept_length,
    }


def acceptance_bounds(
    reached: Sequence[ReachedDepth], texts: TokenLists, target: Transformers, ids: Tensor
) -> list[float]:
    """Return sum(min(p, q)) for every reached context; p is the target's distribution at T=1, q the draft's.

    A request's seed is the index of its text in `texts`. q is zero outside the draft vocabulary, whose target ids are
    `ids`, so only p at these ids counts.
    """
    target_probabilities = [log_probabilities[:, ids].exp() for log_probabilities in target.log_probabilities(texts)]
    return [
        float(torch.minimum(target_probabilities[r.seed][r.position - 1], r.distribution.probabilities.float()).sum())
        for r in reached
    ]


def _record_chain(
    pair: ModelPair, prompts: TokenLists, new_tokens: int, by_probability: bool
) -> tuple[EngineRun, list[ReachedDepth], Tensor]:
    """Run the chain at T=1 with a draft that records its distributions. Return the run, the depths that chains reached
    inside the texts, and the target ids of the draft vocabulary.
    """
    engine, draft = recording_engine(pair.config(CHAIN, len(prompts)), by_probability)
    run = run_batch(engine, prompts, [fixed_length_params(new_tokens, 1.0, seed) for seed in range(len(prompts))])
    text_ends = [len(prompt) + new_tokens for prompt in prompts]
    return run, [r for r in draft.reached if r.position < text_ends[r.seed]], draft.ids


def accept_lengths(
    pair: ModelPair, size: Size, trees: Sequence[TreeChoice], log_progress: LogProgress
) -> tuple[list[dict[str, Any]], bool]:
    """Return, per tree and temperature, the accept length and the acceptance by depth; and whether all tokens equal
    those of plain decoding.
    """
    figures, identical, prompts = [], True, pair.prompts(size.prompts, size.prompt_tokens)
    engines = {tree: build_engine(pair.config(tree, size.prompts)) for tree in (PLAIN, *trees)}
    for temperature in TEMPERATURES:
        params = [fixed_length_params(size.new_tokens, temperature, seed) for seed in range(size.prompts)]
        plain_tokens: list[list[int]] = []
        for tree, engine in engines.items():
            log_progress(f"acceptance: {tree} at T={temperature:g}")
            run = run_batch(engine, prompts, params)
            plain_tokens = plain_tokens or run.tokens
            identical = identical and run.tokens == plain_tokens
            if tree != PLAIN:
                setting = {"name": str(tree), "temperature": temperature}
                figures.append(
                    setting | {"accept_length": run.accept_length, "by_depth": run.acceptance_by_depth(tree.num_steps)}
                )
    return figures, identical
