"""Prefill interference: how much a long prompt slows decoding down, and its time to first token, by `prefill_share`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from cluster.bench.goals import Goal
from cluster.bench.pair import Pair
from cluster.bench.ranks import Case, RankProcesses, RankRequest, RankRun, Size, StepRecord, settings_of
from cluster.bench.report import median, medians, p99, ratio, table

LONG = "long"
DEFAULT_SHARE = 0.5
GOAL_STEP, GOAL_FIRST = 2.2, 2.5  # at DEFAULT_SHARE, for `Interference.median_ratio` and `Interference.first_ratio`
OPENING_TOKENS = 8  # prompt length of a decoding request; short, because decoding is measured
SHORTER = 4  # on one rank, the prompt is this many times shorter, so that other contexts hardly grow during its prefill
LASTING = 5  # on one rank, other requests generate `LASTING` x `steady_tokens` tokens, so that they outlast the prompt


@dataclass(frozen=True, slots=True)
class Interference:
    """Inter-token latency of the decoding requests: the time between two outputs of a request, as a client sees it.

    An output is the tokens, at least one, that a step commits for a request. *Prefill* is the time from the long
    prompt's submission to its first token. *Busy* is the time without the long prompt: before its submission and, if
    requests follow, after its first token, so that a drift of the machine's speed affects prefill and busy equally.

    Ratios are prefill over busy: `median_ratio` of the medians, `tail_ratio` of the p99s, `cpu_ratio` of the median CPU
    seconds of the slower rank's steps. `ratio` is prefill's p99 over the median of busy; on a shared machine, `ratio`
    and `tail_ratio` mostly show other load. `first_ratio` is the time to the prompt's first token, over the same time
    without other requests; `first_cpu_ratio` is the same in CPU seconds.
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


class First(NamedTuple):
    """The cost of the long prompt's first token: wall seconds, and the slower rank's CPU seconds summed over steps."""

    seconds: float
    cpu: float


Stalls = dict[str, Interference]  # the interference figures of one repeat, by the name of the case


def interference_of(lives: Sequence[RankRun], alone: First) -> Interference:
    """Return the interference in one run of a gang. The first rank decodes; the last rank takes the long prompt. In a
    gang of one rank, one rank does both. `alone` is the cost of the same prompt without other requests.
    """
    a, b = lives[0], lives[-1]
    submitted, first = b.submitted[LONG], b.times[LONG][0]
    took = first_of(lives)
    early = [b.times[name] for name, at in b.submitted.items() if name != LONG and at < submitted]
    late = [b.times[name] for name, at in b.submitted.items() if name != LONG and at >= first]
    # Busy: from the time when every request has an output until the long prompt is submitted or a request ends.
    windows = [(max(times[0] for times in early), min(submitted, *(times[-1] for times in early)))]
    if late:
        windows.append((max(times[0] for times in late), min(times[-1] for times in late)))
    busy = [gap for window in windows for gap in gaps(a, *window)]
    prefill, middle = gaps(a, submitted, first), median(busy)
    steps = list(zip(a.steps, b.steps, strict=True))
    return Interference(
        ratio=ratio(p99(prefill), middle),
        median_ratio=ratio(median(prefill), middle),
        tail_ratio=ratio(p99(prefill), p99(busy)),
        cpu_ratio=ratio(
            _cpu([s for s in steps if submitted <= s[1].began < first and s[1].prompt_rows]),
            _cpu([s for s in steps if any(began <= s[1].began < ended for began, ended in windows)]),
        ),
        busy_median_ms=1000 * middle,
        busy_p99_ms=1000 * p99(busy),
        prefill_median_ms=1000 * median(prefill),
        prefill_p99_ms=1000 * p99(prefill),
        first_token_s=took.seconds,
        prompt_steps=sum(s.prompt_rows > 0 for s in b.steps if submitted <= s.began < first),
        first_ratio=ratio(took.seconds, alone.seconds),
        first_cpu_ratio=ratio(took.cpu, alone.cpu),
    )


def gaps(life: RankRun, start: float, stop: float) -> list[float]:
    """Return the seconds between successive outputs of each request, for outputs between `start` and `stop`."""
    return [
        after - before
        for times in life.times.values()
        for before, after in pairwise(times)
        if start <= before and after <= stop
    ]


def measured(ranks: RankProcesses, pair: Pair, size: Size, backwards: bool = False) -> Stalls:
    """Run one repeat. On two ranks and on one rank, the prompt runs alone, and with decoding requests at each share."""
    stalls: Stalls = {}
    for world in (2, 1):
        alone = first_of(ranks.run(alone_case(pair, size, world)))
        for share in size.shares[:: -1 if backwards else 1]:
            stalls[_name(world, share)] = interference_of(ranks.run(interference_case(pair, size, world, share)), alone)
    return stalls


def first_of(lives: Sequence[RankRun]) -> First:
    """Return the wall and CPU seconds from the long prompt's submission to its first token."""
    submitted, first = lives[-1].submitted[LONG], lives[-1].times[LONG][0]
    steps = zip(*(life.steps for life in lives), strict=True)
    return First(first - submitted, sum(max(s.cpu for s in at) for at in steps if submitted <= at[-1].began < first))


def alone_case(pair: Pair, size: Size, world: int) -> Case:
    """Return the case in which the last rank runs only the long prompt, in full chunks."""
    long = _long(pair, size, world)
    return Case(_settings(pair, size, world), [RankRequest(LONG, world - 1, long, 2)])


def interference_case(pair: Pair, size: Size, world: int, share: float) -> Case:
    """Return the case of the long prompt with decoding requests.

    With two ranks, rank 0 decodes all the time and resubmits its requests when they end; rank 1 decodes, takes the
    prompt, then decodes again. With one rank, the other requests are long enough to outlast the prompt, because new
    requests would queue behind the prompt. Steps get longer as contexts grow, so one more request follows the prompt,
    to measure the busy latency at the grown contexts.
    """
    prompts = pair.prompts(2 * size.requests, OPENING_TOKENS)
    long = _long(pair, size, world)

    def steady(name: str, dp_rank: int, again: bool = False, after: bool = False) -> list[RankRequest]:
        mine = prompts[size.requests * dp_rank :]
        return [
            RankRequest(f"{name}{i}", dp_rank, mine[i], size.steady_tokens, again, alone=after and not i)
            for i in range(size.requests)
        ]

    settings = _settings(pair, size, world, prefill_share=share)
    if world == 1:
        lasting = [RankRequest(f"a{i + 1}", 0, prompts[i], LASTING * size.steady_tokens) for i in range(size.requests)]
        first = RankRequest("a0", 0, prompts[-1], size.steady_tokens)
        last = RankRequest("z", 0, prompts[-2], size.steady_tokens, after=LONG)
        return Case(settings, [first, *lasting, RankRequest(LONG, 0, long, 2, after="a0"), last], until="z")
    jobs = steady("a", 0, again=True)
    jobs += [*steady("b", 1), RankRequest(LONG, 1, long, 2, alone=True), *steady("c", 1, after=True)]
    return Case(settings, jobs, until=f"c{size.requests - 1}")


def stalled(repeats: Sequence[Stalls]) -> dict[str, dict[str, float]]:
    """Return the medians over the repeats, by case, JSON-ready."""
    return {name: medians([stalls[name] for stalls in repeats]) for name in repeats[0]}


def interference_goals(stalls: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Return the goals for `median_ratio` and `first_ratio` at the default share."""
    found = []
    for name, stall in stalls.items():
        if name.endswith(f" {DEFAULT_SHARE}"):
            found.append(Goal(f"step / usual, {name}", stall["median_ratio"], GOAL_STEP))
            found.append(Goal(f"first token / alone, {name}", stall["first_ratio"], GOAL_FIRST))
    return found


def show_stalls(stalls: Mapping[str, Mapping[str, Any]], tokens: int) -> str:
    """Return the figures as a table, with the goals at the default share."""
    rows = []
    for name, s in stalls.items():
        usual = name.endswith(f" {DEFAULT_SHARE}")
        goals = (GOAL_STEP, GOAL_FIRST) if usual else (None, None)
        rows.append(
            (
                name, s["median_ratio"], goals[0], s["first_ratio"], goals[1], s["first_token_s"],
                round(s["prompt_steps"]), s["busy_median_ms"], s["prefill_median_ms"], s["busy_p99_ms"],
                s["prefill_p99_ms"], s["ratio"], s["cpu_ratio"], s["first_cpu_ratio"],
            )
        )  # fmt: skip
    headers = (
        "prefill_share", "step / usual", "goal", "first token / alone", "goal", "first token, s", "steps",
        "usual, ms", "beside", "usual p99", "beside p99", "p99 / usual", "step, CPU", "first, CPU",
    )  # fmt: skip
    return "\n".join(
        [
            f"stall: requests decode while a prompt is taken, one of {tokens} tokens on the other rank, or of "
            f"{tokens // SHORTER} on theirs; usual is without it, alone is the prompt with nobody decoding",
            table(headers, rows),
            "step: median time between two outputs of a request, as its user sees it",
        ]
    )


def _long(pair: Pair, size: Size, world: int) -> list[int]:
    [tokens] = pair.prompts(1, size.long_tokens if world > 1 else size.long_tokens // SHORTER)
    return tokens


def _name(world: int, share: float) -> str:
    return f"{'other rank' if world > 1 else 'same rank'}, {share}"


def _settings(pair: Pair, size: Size, world: int, **more: object) -> dict[str, Any]:
    room = {"max_total_tokens": size.long_tokens + size.requests * 2048 + 1024, "mixed_prefill_size": None}
    return settings_of(pair, 2 * size.requests, world, **room, **more)


def _cpu(steps: Sequence[tuple[StepRecord, StepRecord]]) -> float:
    return median([max(a.cpu, b.cpu) for a, b in steps])
