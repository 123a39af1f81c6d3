"""Prefill interference: how much the prefill of a long prompt slows down requests that decode, and how long the prompt
waits for its first token, for values of the setting `prefill_share` (the share of a step's time for prompts).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from cluster.bench.goals import Goal
from cluster.bench.pair import ModelPair
from cluster.bench.ranks import GangCase, RankProcesses, RankRequest, RankRun, Size, StepRecord, gang_settings
from cluster.bench.report import median, medians, p99, ratio, table

LONG_PROMPT = "long"
DEFAULT_SHARE = 0.5
GOAL_STEP, GOAL_FIRST = 2.2, 2.5  # most, at DEFAULT_SHARE, of `Interference.median_ratio` and `.first_ratio`
SHORT_PROMPT_TOKENS = 8  # prompt length of a decoding request; short, because decoding is measured
# On one rank, the long prompt is this many times shorter: other requests' contexts hardly grow during its prefill.
PROMPT_DIVISOR = 4
# On one rank, other requests generate this many times `steady_tokens` tokens: they last longer than the prefill.
OUTLAST_FACTOR = 5


@dataclass(frozen=True, slots=True)
class Interference:
    """The latencies of the requests that decode. A latency is the time between two outputs of a request, as a client
    sees it. An output is the tokens, at least one, that a step commits for a request.

    Two periods are compared. The prefill period goes from the long prompt's submission to its first token. The busy
    period is before the submission and, if requests follow the prompt, also after its first token. Then a drift of the
    machine's speed affects both periods equally. The fields `prefill_..` and `busy_..` are latencies in these periods.

    Three ratios divide a value of the prefill period by the same value of the busy period: `median_ratio` the median
    latency, `tail_ratio` the p99 latency, `cpu_ratio` the median CPU seconds of a step on the rank that needs more.
    `ratio` divides the prefill period's p99 by the busy period's median. On a shared machine, `ratio` and `tail_ratio`
    mostly show the load of other programs. `first_token_s` is the seconds of the prefill period, and `prompt_steps` its
    number of steps with prompt rows.
    `first_ratio` divides `first_token_s` by the time that the prompt takes without other requests; `first_cpu_ratio`
    does the same with CPU seconds.
    """

    ratio: float
    median_ratio: float
    tail_ratio: float
    cpu_ratio: float
    busy_median_ms: float
    busy_p99_ms: float
    prefill_median_ms: float
    prefill_p99_ms: float
    first_token_s: float
    prompt_steps: int
    first_ratio: float = 0.0
    first_cpu_ratio: float = 0.0


class FirstTokenCost(NamedTuple):
    """The cost of the long prompt's first token: wall seconds, and CPU seconds of the slower rank, summed by step."""

    seconds: float
    cpu_seconds: float


InterferenceByCase = dict[str, Interference]  # the interference figures of one repeat, by the name of the case


def compute_interference(rank_runs: Sequence[RankRun], isolated: FirstTokenCost) -> Interference:
    """Return the interference in one run of a gang (all ranks of a replica). Requests of the first rank are measured;
    the last rank takes the long prompt. In a gang of one rank, one rank does both. `isolated` is the cost of the same
    prompt without other requests.
    """
    first_rank, last_rank = rank_runs[0], rank_runs[-1]
    submitted_at, first_token_at = last_rank.submitted_at[LONG_PROMPT], last_rank.output_times[LONG_PROMPT][0]
    cost = first_token_cost(rank_runs)
    earlier_outputs = [
        last_rank.output_times[name]
        for name, request_at in last_rank.submitted_at.items()
        if name != LONG_PROMPT and request_at < submitted_at
    ]
    later_outputs = [
        last_rank.output_times[name]
        for name, request_at in last_rank.submitted_at.items()
        if name != LONG_PROMPT and request_at >= first_token_at
    ]
    # Busy: from the time when all requests of the last rank have an output, to the long prompt or the first end of one.
    windows = [
        (max(times[0] for times in earlier_outputs), min(submitted_at, *(times[-1] for times in earlier_outputs)))
    ]
    if later_outputs:
        windows.append((max(times[0] for times in later_outputs), min(times[-1] for times in later_outputs)))
    busy_intervals = [interval for window in windows for interval in output_intervals(first_rank, *window)]
    prefill_intervals, busy_median = output_intervals(first_rank, submitted_at, first_token_at), median(busy_intervals)
    steps = list(zip(first_rank.steps, last_rank.steps, strict=True))
    return Interference(
        ratio=ratio(p99(prefill_intervals), busy_median),
        median_ratio=ratio(median(prefill_intervals), busy_median),
        tail_ratio=ratio(p99(prefill_intervals), p99(busy_intervals)),
        cpu_ratio=ratio(
            _median_cpu_seconds(
                [s for s in steps if submitted_at <= s[1].started_at < first_token_at and s[1].prompt_rows]
            ),
            _median_cpu_seconds(
                [
                    s
                    for s in steps
                    if any(window_start <= s[1].started_at < window_end for window_start, window_end in windows)
                ]
            ),
        ),
        busy_median_ms=1000 * busy_median,
        busy_p99_ms=1000 * p99(busy_intervals),
        prefill_median_ms=1000 * median(prefill_intervals),
        prefill_p99_ms=1000 * p99(prefill_intervals),
        first_token_s=cost.seconds,
        prompt_steps=sum(s.prompt_rows > 0 for s in last_rank.steps if submitted_at <= s.started_at < first_token_at),
        first_ratio=ratio(cost.seconds, isolated.seconds),
        first_cpu_ratio=ratio(cost.cpu_seconds, isolated.cpu_seconds),
    )


def output_intervals(rank_run: RankRun, start: float, stop: float) -> list[float]:
    """Return the seconds between successive outputs of each request, for outputs between `start` and `stop`."""
    return [
        after - before
        for output_times in rank_run.output_times.values()
        for before, after in pairwise(output_times)
        if start <= before and after <= stop
    ]


def measure_interference(
    ranks: RankProcesses, pair: ModelPair, size: Size, reverse: bool = False
) -> InterferenceByCase:
    """Run one repeat and return its figures by case. On two ranks and then on one rank, the long prompt runs alone
    first. Then it runs with decoding requests, once for each `prefill_share` in `size.shares`, from the last to the
    first if `reverse`.
    """
    figures: InterferenceByCase = {}
    for rank_count in (2, 1):
        isolated_cost = first_token_cost(ranks.run(isolated_case(pair, size, rank_count)))
        for share in size.shares[:: -1 if reverse else 1]:
            figures[_case_name(rank_count, share)] = compute_interference(
                ranks.run(interference_case(pair, size, rank_count, share)), isolated_cost
            )
    return figures


def first_token_cost(rank_runs: Sequence[RankRun]) -> FirstTokenCost:
    """Return the cost of the long prompt, from its submission to its first token."""
    submitted_at, first_token_at = rank_runs[-1].submitted_at[LONG_PROMPT], rank_runs[-1].output_times[LONG_PROMPT][0]
    steps = zip(*(rank_run.steps for rank_run in rank_runs), strict=True)
    return FirstTokenCost(
        first_token_at - submitted_at,
        sum(
            max(step.cpu_seconds for step in rank_steps)
            for rank_steps in steps
            if submitted_at <= rank_steps[-1].started_at < first_token_at
        ),
    )


def isolated_case(pair: ModelPair, size: Size, rank_count: int) -> GangCase:
    """Return the case in which the long prompt runs alone, on the last rank; so its chunks have the full size."""
    long_prompt = _long_prompt(pair, size, rank_count)
    return GangCase(_settings(pair, size, rank_count), [RankRequest(LONG_PROMPT, rank_count - 1, long_prompt, 2)])


def interference_case(pair: ModelPair, size: Size, rank_count: int, share: float) -> GangCase:
    """Return the case of the long prompt with decoding requests.

    With two ranks, rank 0 decodes all the time: its requests are submitted again when they end. Rank 1 decodes, takes
    the prompt, then decodes again. With one rank, the prompt follows the end of one request. The other requests last
    longer than its prefill, because new requests would queue behind it. Steps get longer as contexts grow, so one more
    request follows the prompt, to measure the busy latency with the grown contexts.
    """
    prompts = pair.prompts(2 * size.requests, SHORT_PROMPT_TOKENS)
    long_prompt = _long_prompt(pair, size, rank_count)

    def steady_requests(
        name: str, dp_rank: int, resubmit: bool = False, wait_for_idle: bool = False
    ) -> list[RankRequest]:
        rank_prompts = prompts[size.requests * dp_rank :]
        return [
            RankRequest(
                f"{name}{number}",
                dp_rank,
                rank_prompts[number],
                size.steady_tokens,
                resubmit,
                wait_until_idle=wait_for_idle and not number,
            )
            for number in range(size.requests)
        ]

    settings = _settings(pair, size, rank_count, prefill_share=share)
    if rank_count == 1:
        lasting_requests = [
            RankRequest(f"a{number + 1}", 0, prompts[number], OUTLAST_FACTOR * size.steady_tokens)
            for number in range(size.requests)
        ]
        first_request = RankRequest("a0", 0, prompts[-1], size.steady_tokens)
        last_request = RankRequest("z", 0, prompts[-2], size.steady_tokens, after_request=LONG_PROMPT)
        return GangCase(
            settings,
            [
                first_request,
                *lasting_requests,
                RankRequest(LONG_PROMPT, 0, long_prompt, 2, after_request="a0"),
                last_request,
            ],
            last_request="z",
        )
    requests = steady_requests("a", 0, resubmit=True)
    requests += [
        *steady_requests("b", 1),
        RankRequest(LONG_PROMPT, 1, long_prompt, 2, wait_until_idle=True),
        *steady_requests("c", 1, wait_for_idle=True),
    ]
    return GangCase(settings, requests, last_request=f"c{size.requests - 1}")


def median_interference(repeats: Sequence[InterferenceByCase]) -> dict[str, dict[str, float]]:
    """Return the medians over the repeats, by case, JSON-ready."""
    return {name: medians([figures[name] for figures in repeats]) for name in repeats[0]}


def interference_goals(interferences: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Return the goals for `median_ratio` and `first_ratio` at the default share."""
    goal_list = []
    for name, figures in interferences.items():
        if name.endswith(f" {DEFAULT_SHARE}"):
            goal_list.append(Goal(f"step / usual, {name}", figures["median_ratio"], GOAL_STEP))
            goal_list.append(Goal(f"first token / alone, {name}", figures["first_ratio"], GOAL_FIRST))
    return goal_list


def show_interference(interferences: Mapping[str, Mapping[str, Any]], tokens: int) -> str:
    """Return the figures as a table, with the goals at the default share. `tokens` is the long prompt's length."""
    rows = []
    for name, figures in interferences.items():
        is_default = name.endswith(f" {DEFAULT_SHARE}")
        goals = (GOAL_STEP, GOAL_FIRST) if is_default else (None, None)
        rows.append(
            (
                name, figures["median_ratio"], goals[0], figures["first_ratio"], goals[1], figures["first_token_s"],
                round(figures["prompt_steps"]), figures["busy_median_ms"], figures["prefill_median_ms"],
                figures["busy_p99_ms"], figures["prefill_p99_ms"], figures["ratio"], figures["cpu_ratio"],
                figures["first_cpu_ratio"],
            )
        )  # fmt: skip
    headers = (
        "prefill_share", "step / usual", "goal", "first token / alone", "goal", "first token, s", "steps",
        "usual, ms", "prefill, ms", "usual p99", "prefill p99", "p99 / usual", "step, CPU", "first, CPU",
    )  # fmt: skip
    return "\n".join(
        [
            f"stall: requests decode during the prefill of a prompt of {tokens} tokens on the other rank, or of "
            f"{tokens // PROMPT_DIVISOR} on the same; usual: without the prompt; alone: the prompt without requests",
            table(headers, rows),
            "step: median time between two outputs of a request, as a client sees it",
        ]
    )


def _long_prompt(pair: ModelPair, size: Size, rank_count: int) -> list[int]:
    [tokens] = pair.prompts(1, size.long_tokens if rank_count > 1 else size.long_tokens // PROMPT_DIVISOR)
    return tokens


def _case_name(rank_count: int, share: float) -> str:
    return f"{'other rank' if rank_count > 1 else 'same rank'}, {share}"


def _settings(pair: ModelPair, size: Size, rank_count: int, **overrides: object) -> dict[str, Any]:
    capacity = {"max_total_tokens": size.long_tokens + size.requests * 2048 + 1024, "mixed_prefill_size": None}
    return gang_settings(pair, 2 * size.requests, rank_count, **capacity, **overrides)


def _median_cpu_seconds(steps: Sequence[tuple[StepRecord, StepRecord]]) -> float:
    return median([max(a.cpu_seconds, b.cpu_seconds) for a, b in steps])
