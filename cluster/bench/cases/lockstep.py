"""`aerie bench lockstep`: the cost of lockstep for data-parallel ranks, and how much one rank slows the others down.

Two ranks run as processes over gloo on loopback, with one torch thread each and without Ray. Every case runs its own
gang. The cases take turns in every repeat, in reverse order in every other repeat. Figures are medians over the
repeats; a ratio is taken within a repeat.

Steps are captured by default, and a captured step is one phase. So two more gangs, which run every step eagerly,
measure the draft phase.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.bench.goals import Goal
from cluster.bench.pair import Pair, short_path
from cluster.bench.prefill_interference import Stalls, interference_goals, measured, show_stalls, stalled
from cluster.bench.ranks import QUICK, Case, RankProcesses, RankRequest, RankRun, Size, settings_of
from cluster.bench.report import Say, machine, median, medians, ratio, table
from cluster.observability.metrics import REPLAY

__all__ = ["QUICK", "Size", "measure", "show"]

ALONE = "dp1"
ALL_ALONE = "dp1, all requests"
IDLE = "dp2, one rank idle"
BUSY = "dp2, both busy"
REPLICATED = "dp2, both busy, replicated draft"
BUSY_LAUNCHED = "dp2, both busy, launched"
REPLICATED_LAUNCHED = "dp2, both busy, replicated draft, launched"
UNEVEN = "dp2, uneven, exact counts"
UNEVEN_PADDED = "dp2, uneven, padded"


@dataclass(frozen=True, slots=True)
class LockstepFigures:
    """The figures of one gang. `step_ms`, `draft_ms` and `agree_share` (the agreement's share of a step) are medians
    over steady steps: no rank runs prefill, and rank 0 decodes all its requests. `draft_ms` is None if steady steps
    were replayed, because the time of the draft phase is then unknown. `padded_share` is the share of padding among the
    rows of all steps.
    """

    step_ms: float
    draft_ms: float | None
    agree_share: float
    tokens_per_s: float
    padded_share: float


def measure(pair: Pair, size: Size, say: Say = print) -> dict[str, Any]:
    """Run all cases and return the figures, JSON-ready."""
    cases = _cases(pair, size)
    runs: dict[str, list[LockstepFigures]] = {name: [] for name in cases}
    texts: dict[str, dict[str, list[int]]] = {}
    stalls: list[Stalls] = []
    with RankProcesses(2) as ranks:
        for repeat in range(size.repeats):
            say(f"lockstep: repeat {repeat + 1} of {size.repeats}, {len(cases)} gangs, and those with a long prompt")
            stalls.append(measured(ranks, pair, size, bool(repeat % 2)))
            for name in list(cases)[:: -1 if repeat % 2 else 1]:
                lives = ranks.run(cases[name])
                runs[name].append(figures(lives))
                texts[name] = {job: tokens for life in lives for job, tokens in life.tokens.items()}
    return report(pair, size, runs, texts, stalls)


def figures(lives: Sequence[RankRun]) -> LockstepFigures:
    """Return the figures of a gang from the records of its ranks. Rank 0 has requests in every case."""
    steps = list(zip(*(life.steps for life in lives), strict=True))
    most = max(step[0].decodes for step in steps)
    steady = [step for step in steps if step[0].decodes == most and not any(s.prompt_rows for s in step)]
    drafts = [step[0].phases["draft"] for step in steady if REPLAY not in step[0].phases]
    padded, target = (sum(getattr(s, name) for step in steps for s in step) for name in ("padded_rows", "target_rows"))
    ended = max(times[-1] for life in lives for times in life.times.values())
    began = min(at for life in lives for at in life.submitted.values())
    return LockstepFigures(
        step_ms=1000 * median([step[0].seconds for step in steady]),
        draft_ms=None if any(REPLAY in step[0].phases for step in steady) else 1000 * median(drafts),
        # The rank that arrives last waits for no other rank, so its time is the cost of the agreement itself.
        agree_share=median([ratio(min(s.phases["agree"] for s in step), step[0].seconds) for step in steady]),
        tokens_per_s=sum(len(t) for life in lives for t in life.tokens.values()) / (ended - began),
        padded_share=ratio(padded, padded + target),
    )


def report(
    pair: Pair,
    size: Size,
    runs: dict[str, list[LockstepFigures]],
    texts: dict[str, dict[str, list[int]]],
    stalls: Sequence[Stalls],
) -> dict[str, Any]:
    """Return all comparisons, with ratios taken within a repeat."""

    def over(name: str, base: str, key: str = "step_ms") -> float:
        pairs = zip(runs[name], runs[base], strict=True)
        return median([ratio(getattr(a, key), getattr(b, key)) for a, b in pairs])

    same = [tokens == texts[ALL_ALONE][job] for text in texts.values() for job, tokens in text.items()]
    return {
        "what": "lockstep",
        "machine": machine(),
        "target": short_path(pair.target),
        "repeats": size.repeats,
        "requests_per_rank": size.requests,
        "long_tokens": size.long_tokens,
        "stall": stalled(stalls),
        "idle_rank_step_ratio": over(IDLE, ALONE),
        "both_busy_throughput_ratio": over(BUSY, ALL_ALONE, "tokens_per_s"),
        "both_busy_step_ratio": over(BUSY, ALL_ALONE),
        "agreement_share": median([f.agree_share for f in runs[BUSY]]),
        "padding": {
            "idle_rows_share": median([f.padded_share for f in runs[UNEVEN_PADDED]]),
            "step_ratio": over(UNEVEN_PADDED, UNEVEN),
        },
        "replicated_draft": {
            "step_ratio": over(REPLICATED, BUSY),
            "draft_phase_ratio": over(REPLICATED_LAUNCHED, BUSY_LAUNCHED, "draft_ms"),
        },
        "launched_step_ratio": over(BUSY_LAUNCHED, BUSY),
        "gangs": {name: medians(of) for name, of in runs.items()},
        "same_texts": sum(same),
        "texts": len(same),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals of prefill interference at the default `prefill_share`, and of equal tokens in every gang."""
    texts = Goal("texts that differ from one rank's", result["texts"] - result["same_texts"], 0, slack=1)
    return [*interference_goals(result["stall"]), texts]


def show(result: dict[str, Any]) -> str:
    """Return the figures as tables, prefill interference and ratios first."""
    gangs, padding, draft = (result[key] for key in ("gangs", "padding", "replicated_draft"))

    def ms(name: str, key: str = "step_ms") -> str:
        return f"{gangs[name][key]:.2f}"

    def pace(name: str) -> str:
        return f"{gangs[name]['tokens_per_s']:.1f}"

    drafts = [ms(name, "draft_ms") for name in (REPLICATED_LAUNCHED, BUSY_LAUNCHED)]
    ratios = [
        ("step, dp2 with one rank idle over dp1", result["idle_rank_step_ratio"], ms(IDLE), ms(ALONE), "ms"),
        ("step, dp2 both busy over dp1 with all", result["both_busy_step_ratio"], ms(BUSY), ms(ALL_ALONE), "ms"),
        ("tokens/s, the same", result["both_busy_throughput_ratio"], pace(BUSY), pace(ALL_ALONE), "tokens/s"),
        ("step, uneven ranks, padded over exact", padding["step_ratio"], ms(UNEVEN_PADDED), ms(UNEVEN), "ms"),
        ("step, replicated over sharded draft", draft["step_ratio"], ms(REPLICATED), ms(BUSY), "ms"),
        ("draft phase, the same, launched", draft["draft_phase_ratio"], *drafts, "ms"),
        ("step, launched over captured", result["launched_step_ratio"], ms(BUSY_LAUNCHED), ms(BUSY), "ms"),
    ]
    return "\n".join(
        [
            f"lockstep: two ranks over gloo on one machine, one torch thread each, {result['requests_per_rank']} "
            f"requests a rank, medians of {result['repeats']} repeats",
            show_stalls(result["stall"], result["long_tokens"]),
            "",
            table(("comparison", "ratio", "this", "against", "unit"), ratios),
            f"agreement: {result['agreement_share']:.1%} of a step with both ranks busy",
            f"padding: {padding['idle_rows_share']:.1%} of the rows are idle at {result['requests_per_rank']} and 1 "
            f"requests",
            f"same tokens as one rank with all requests: {result['same_texts']} of {result['texts']} texts",
        ]
    )


def _cases(pair: Pair, size: Size) -> dict[str, Case]:
    """Return every case except those of prefill interference. A request has the same prompt in all cases."""
    prompts = pair.prompts(2 * size.requests, size.prompt_tokens)

    def jobs(first: int, second: int = 0, ranks: int = 2) -> list[RankRequest]:
        on_first = [RankRequest(f"a{i}", 0, prompts[i], size.new_tokens) for i in range(first)]
        on_second = [
            RankRequest(f"b{i}", ranks - 1, prompts[size.requests + i], size.new_tokens) for i in range(second)
        ]
        return on_first + on_second

    own, total = size.requests, 2 * size.requests

    def two(**more: object) -> dict[str, Any]:
        return settings_of(pair, total, 2, **more)

    return {
        ALONE: Case(settings_of(pair, total, 1), jobs(own, ranks=1)),
        ALL_ALONE: Case(settings_of(pair, total, 1), jobs(own, own, ranks=1)),
        IDLE: Case(two(), jobs(own)),
        BUSY: Case(two(), jobs(own, own)),
        REPLICATED: Case(two(speculative_draft_parallel="replicated"), jobs(own, own)),
        BUSY_LAUNCHED: Case(two(capture="off"), jobs(own, own)),
        REPLICATED_LAUNCHED: Case(two(capture="off", speculative_draft_parallel="replicated"), jobs(own, own)),
        UNEVEN: Case(two(dp_padding="exact"), jobs(own, 1)),
        UNEVEN_PADDED: Case(two(dp_padding="padded"), jobs(own, 1)),
    }
