"""`aerie bench lockstep`: the cost of lockstep for data-parallel ranks, and how much one rank slows the others down.

Two ranks run as processes over gloo on loopback, with one torch thread each and without Ray. Every case runs its own
gang, which is one engine on one or two ranks. The cases take turns in every repeat, in reverse order in every other
repeat. Figures are medians over the repeats; a ratio is taken within a repeat.

By default, steps are captured and replayed as a whole, so the time of their draft phase is unknown. Two cases, whose
names end in "launched", run every step eagerly to measure the draft phase.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.pair import ModelPair, short_path
from cluster.bench.prefill_interference import (
    InterferenceByCase,
    interference_goals,
    measure_interference,
    median_interference,
    show_interference,
)
from cluster.bench.ranks import QUICK, GangCase, RankProcesses, RankRequest, RankRun, Size, gang_settings
from cluster.bench.report import LogProgress, machine_info, median, medians, ratio, table
from cluster.observability.step_stats import REPLAY

__all__ = ["QUICK", "Size", "measure", "show"]

ONE_RANK = "dp1"
ONE_RANK_ALL = "dp1, all requests"
ONE_IDLE = "dp2, one rank idle"
BOTH_BUSY = "dp2, both busy"
REPLICATED = "dp2, both busy, replicated draft"
BOTH_BUSY_EAGER = "dp2, both busy, launched"
REPLICATED_EAGER = "dp2, both busy, replicated draft, launched"
UNEVEN = "dp2, uneven, exact counts"
UNEVEN_PADDED = "dp2, uneven, padded"


@dataclass(frozen=True, slots=True)
class LockstepFigures:
    """The figures of one gang. `step_ms`, `draft_ms` and `agree_share` are medians over steady steps, in which no
    rank runs prefill and rank 0 decodes all its requests. `step_ms` and `draft_ms` are times of rank 0; `draft_ms` is
    None if a steady step was replayed, because the time of its draft phase is then unknown. `agree_share` is the share
    of a step's time that the ranks need to agree on what the step does, waiting excluded. `tokens_per_s` counts the
    tokens of all ranks. `padded_share` is the share of padding among the rows of all steps.
    """

    step_ms: float
    draft_ms: float | None
    agree_share: float
    tokens_per_s: float
    padded_share: float


def measure(pair: ModelPair, size: Size, log_progress: LogProgress = print) -> dict[str, Any]:
    """Run prefill interference and all cases in every repeat, and return the figures, JSON-ready."""
    cases = _cases(pair, size)
    runs: dict[str, list[LockstepFigures]] = {case_name: [] for case_name in cases}
    texts_by_case: dict[str, dict[str, list[int]]] = {}
    interferences: list[InterferenceByCase] = []
    with RankProcesses(2) as ranks:
        for repeat in range(size.repeats):
            log_progress(
                f"lockstep: repeat {repeat + 1} of {size.repeats}, {len(cases)} gangs, and those with a long prompt"
            )
            interferences.append(measure_interference(ranks, pair, size, bool(repeat % 2)))
            for case_name in list(cases)[:: -1 if repeat % 2 else 1]:
                rank_runs = ranks.run(cases[case_name])
                runs[case_name].append(figures(rank_runs))
                texts_by_case[case_name] = {
                    request_name: tokens for rank_run in rank_runs for request_name, tokens in rank_run.tokens.items()
                }
    return report(pair, size, runs, texts_by_case, interferences)


def figures(rank_runs: Sequence[RankRun]) -> LockstepFigures:
    """Return the figures of a gang from the records of its ranks. Rank 0 has requests in every case."""
    steps = list(zip(*(rank_run.steps for rank_run in rank_runs), strict=True))
    max_decodes = max(step[0].decode_requests for step in steps)
    steady_steps = [
        step for step in steps if step[0].decode_requests == max_decodes and not any(s.prompt_rows for s in step)
    ]
    draft_seconds = [step[0].phase_seconds["draft"] for step in steady_steps if REPLAY not in step[0].phase_seconds]
    padded_rows, target_rows = (
        sum(getattr(s, name) for step in steps for s in step) for name in ("padded_rows", "target_rows")
    )
    ended_at = max(times[-1] for rank_run in rank_runs for times in rank_run.output_times.values())
    started_at = min(submitted_at for rank_run in rank_runs for submitted_at in rank_run.submitted_at.values())
    return LockstepFigures(
        step_ms=1000 * median([step[0].seconds for step in steady_steps]),
        draft_ms=None
        if any(REPLAY in step[0].phase_seconds for step in steady_steps)
        else 1000 * median(draft_seconds),
        # The rank that arrives last waits for no other rank, so its time is the cost of the agreement itself.
        agree_share=median(
            [ratio(min(s.phase_seconds["agree"] for s in step), step[0].seconds) for step in steady_steps]
        ),
        tokens_per_s=sum(len(t) for rank_run in rank_runs for t in rank_run.tokens.values()) / (ended_at - started_at),
        padded_share=ratio(padded_rows, padded_rows + target_rows),
    )


def report(
    pair: ModelPair,
    size: Size,
    runs: dict[str, list[LockstepFigures]],
    texts_by_case: dict[str, dict[str, list[int]]],
    interferences: Sequence[InterferenceByCase],
) -> dict[str, Any]:
    """Return all comparisons, with ratios taken within a repeat."""

    def median_ratio(name: str, baseline: str, figure: str = "step_ms") -> float:
        pairs = zip(runs[name], runs[baseline], strict=True)
        return median([ratio(getattr(a, figure), getattr(b, figure)) for a, b in pairs])

    equal_texts = [
        tokens == texts_by_case[ONE_RANK_ALL][request_name]
        for text in texts_by_case.values()
        for request_name, tokens in text.items()
    ]
    return {
        "what": "lockstep",
        "machine": machine_info(),
        "target": short_path(pair.target),
        "repeats": size.repeats,
        "requests_per_rank": size.requests,
        "long_tokens": size.long_tokens,
        "stall": median_interference(interferences),
        "idle_rank_step_ratio": median_ratio(ONE_IDLE, ONE_RANK),
        "both_busy_throughput_ratio": median_ratio(BOTH_BUSY, ONE_RANK_ALL, "tokens_per_s"),
        "both_busy_step_ratio": median_ratio(BOTH_BUSY, ONE_RANK_ALL),
        "agreement_share": median([f.agree_share for f in runs[BOTH_BUSY]]),
        "padding": {
            "idle_rows_share": median([f.padded_share for f in runs[UNEVEN_PADDED]]),
            "step_ratio": median_ratio(UNEVEN_PADDED, UNEVEN),
        },
        "replicated_draft": {
            "step_ratio": median_ratio(REPLICATED, BOTH_BUSY),
            "draft_phase_ratio": median_ratio(REPLICATED_EAGER, BOTH_BUSY_EAGER, "draft_ms"),
        },
        "launched_step_ratio": median_ratio(BOTH_BUSY_EAGER, BOTH_BUSY),
        "gangs": {name: medians(gang_figures) for name, gang_figures in runs.items()},
        "same_texts": sum(equal_texts),
        "texts": len(equal_texts),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return two kinds of goals: bounds on prefill interference at the default `prefill_share`, and equal tokens in all
    gangs.
    """
    text_goal = Goal("texts that differ from one rank's", result["texts"] - result["same_texts"], 0, slack=1)
    return [*interference_goals(result["stall"]), text_goal]


def show(result: dict[str, Any]) -> str:
    """Return the figures as tables, prefill interference and ratios first."""
    gangs, padding, draft = (result[key] for key in ("gangs", "padding", "replicated_draft"))

    def ms(name: str, key: str = "step_ms") -> str:
        return f"{gangs[name][key]:.2f}"

    def throughput(name: str) -> str:
        return f"{gangs[name]['tokens_per_s']:.1f}"

    drafts = [ms(name, "draft_ms") for name in (REPLICATED_EAGER, BOTH_BUSY_EAGER)]
    ratios = [
        ("step, dp2 with one rank idle over dp1", result["idle_rank_step_ratio"], ms(ONE_IDLE), ms(ONE_RANK), "ms"),
        (
            "step, dp2 both busy over dp1 with all",
            result["both_busy_step_ratio"],
            ms(BOTH_BUSY),
            ms(ONE_RANK_ALL),
            "ms",
        ),
        (
            "tokens/s, the same",
            result["both_busy_throughput_ratio"],
            throughput(BOTH_BUSY),
            throughput(ONE_RANK_ALL),
            "tokens/s",
        ),
        ("step, uneven ranks, padded over exact", padding["step_ratio"], ms(UNEVEN_PADDED), ms(UNEVEN), "ms"),
        ("step, replicated over sharded draft", draft["step_ratio"], ms(REPLICATED), ms(BOTH_BUSY), "ms"),
        ("draft phase, the same, launched", draft["draft_phase_ratio"], *drafts, "ms"),
        ("step, launched over captured", result["launched_step_ratio"], ms(BOTH_BUSY_EAGER), ms(BOTH_BUSY), "ms"),
    ]
    return "\n".join(
        [
            f"lockstep: two ranks over gloo on one machine, one torch thread each, {result['requests_per_rank']} "
            f"requests a rank, medians of {result['repeats']} repeats",
            show_interference(result["stall"], result["long_tokens"]),
            "",
            table(("comparison", "ratio", "this", "against", "unit"), ratios),
            f"agreement: {result['agreement_share']:.1%} of a step with both ranks busy",
            f"padding: {padding['idle_rows_share']:.1%} of the rows are idle at {result['requests_per_rank']} and 1 "
            f"requests",
            f"same tokens as one rank with all requests: {result['same_texts']} of {result['texts']} texts",
        ]
    )


def _cases(pair: ModelPair, size: Size) -> dict[str, GangCase]:
    """Return all cases, except the cases of prefill interference. A request has the same prompt in all of them."""
    prompts = pair.prompts(2 * size.requests, size.prompt_tokens)

    def requests(first_count: int, second_count: int = 0, ranks: int = 2) -> list[RankRequest]:
        on_first = [RankRequest(f"a{i}", 0, prompts[i], size.new_tokens) for i in range(first_count)]
        on_second = [
            RankRequest(f"b{i}", ranks - 1, prompts[size.requests + i], size.new_tokens) for i in range(second_count)
        ]
        return on_first + on_second

    per_rank, both_ranks = size.requests, 2 * size.requests

    def two_rank_settings(**overrides: object) -> dict[str, Any]:
        return gang_settings(pair, both_ranks, 2, **overrides)

    return {
        ONE_RANK: GangCase(gang_settings(pair, both_ranks, 1), requests(per_rank, ranks=1)),
        ONE_RANK_ALL: GangCase(gang_settings(pair, both_ranks, 1), requests(per_rank, per_rank, ranks=1)),
        ONE_IDLE: GangCase(two_rank_settings(), requests(per_rank)),
        BOTH_BUSY: GangCase(two_rank_settings(), requests(per_rank, per_rank)),
        REPLICATED: GangCase(two_rank_settings(speculative_draft_parallel="replicated"), requests(per_rank, per_rank)),
        BOTH_BUSY_EAGER: GangCase(two_rank_settings(capture="off"), requests(per_rank, per_rank)),
        REPLICATED_EAGER: GangCase(
            two_rank_settings(capture="off", speculative_draft_parallel="replicated"), requests(per_rank, per_rank)
        ),
        UNEVEN: GangCase(two_rank_settings(dp_padding="exact"), requests(per_rank, 1)),
        UNEVEN_PADDED: GangCase(two_rank_settings(dp_padding="padded"), requests(per_rank, 1)),
    }
