"""`python -m benchmarks overlap`: the host's work for a step, and how long the device waits for it.

The device is simulated and takes a fixed time for each step, so the figures do not depend on how fast the machine
computes. The gangs are one rank, and two ranks that agree over gloo on loopback. Each gang runs in two ways: the host
is one step ahead of the device (`overlap`, the default), or it waits for each step. Another contender is a device that
takes no time. It shows the host's work with warm caches; in the other runs the core sleeps between steps, and its
caches get cold. Contenders take turns in every repeat; figures are medians over the repeats.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks import simulated_device
from cluster.bench.goals import Goal
from cluster.bench.pair import ModelPair
from cluster.bench.ranks import GangCase, RankProcesses, RankRequest, RankRun, gang_settings
from cluster.bench.report import LogProgress, machine_info, mean, median, medians, ratio, table

WARMUP_STEPS = 3  # the first steady steps, which are not counted
GOAL_MS = 0.5
HOST_PHASES = ("schedule", "agree", "commit")
NO_TIME_MS = 1e-6
IDLE_SHARE_GOALS = {1: 0.02, 2: 0.05}


@dataclass(frozen=True, slots=True)
class Size:
    """The device's `step_ms`, the `requests` per rank, their `prompt_tokens` and `new_tokens`, and the repeats."""

    requests: int = 32
    step_ms: float = 5.0
    prompt_tokens: int = 64
    new_tokens: int = 600
    repeats: int = 5


QUICK = Size(requests=8, new_tokens=60, repeats=1)


@dataclass(frozen=True, slots=True)
class OverlapFigures:
    """Figures of one gang. `step_ms` is the time from one step to the next, as a mean over ranks; the other figures are
    maxima over ranks. `host_ms` is the time of a step without the waits for the device and for the agreement of several
    ranks. `parts_ms` is the time to schedule, assemble and commit a step; for a gang of one rank, it includes the phase
    `agree`. `gap_share` is the share of time in which the device is idle.
    """

    step_ms: float
    host_ms: float
    parts_ms: float
    gap_share: float


def measure(pair: ModelPair, size: Size, log_progress: LogProgress = print) -> dict[str, Any]:
    """Run all cases and return the figures, JSON-ready."""
    variants = [
        (1, True, NO_TIME_MS),
        *((rank_count, overlap_on, size.step_ms) for rank_count in (1, 2) for overlap_on in (True, False)),
    ]
    cases = {variant: _case(pair, size, *variant) for variant in variants}
    runs: dict[tuple[int, bool, float], list[OverlapFigures]] = {variant: [] for variant in cases}
    with RankProcesses(2, simulated_device.__name__) as ranks:
        for repeat in range(size.repeats):
            log_progress(f"overlap: repeat {repeat + 1} of {size.repeats}")
            for variant in list(cases)[:: -1 if repeat % 2 else 1]:
                runs[variant].append(figures(ranks.run(cases[variant]), size))
    rows = [
        {
            "ranks": rank_count,
            "overlap": overlap_on,
            "device_ms": round(device_ms, 3),
            "gap_goal": IDLE_SHARE_GOALS[rank_count] if overlap_on and device_ms > 1 else None,
            **medians(variant_figures),
        }
        for (rank_count, overlap_on, device_ms), variant_figures in runs.items()
    ]
    return {
        "what": "overlap",
        "machine": machine_info(),
        "repeats": size.repeats,
        "host_goal_ms": GOAL_MS,
        "rows": rows,
    } | {key: value for key, value in asdict(size).items() if key != "repeats"}


def figures(rank_runs: Sequence[RankRun], size: Size) -> OverlapFigures:
    """Return the figures of a gang's steady steps, in which every rank decodes all its requests and runs no prompt."""
    host_seconds, phase_seconds, idle_shares, mean_step_seconds = [], [], [], []
    for rank_run in rank_runs:
        steady_steps = [
            step for step in rank_run.steps if step.decode_requests == size.requests and not step.prompt_rows
        ][WARMUP_STEPS:]
        step_seconds = [after.started_at - before.started_at for before, after in pairwise(steady_steps)]
        agree_seconds = (
            [step.phase_seconds["agree"] for step in steady_steps] if len(rank_runs) > 1 else [0.0] * len(steady_steps)
        )
        idle_seconds, wait_seconds, assemble_seconds = (
            rank_run.extra_times[name][WARMUP_STEPS:] for name in ("idle_seconds", "wait_seconds", "assemble_seconds")
        )
        host_seconds.append(
            median([t - w - a for t, w, a in zip(step_seconds, wait_seconds, agree_seconds, strict=False)])
        )
        phase_sums = [
            sum(step.phase_seconds[phase] for phase in HOST_PHASES) - a
            for step, a in zip(steady_steps, agree_seconds, strict=True)
        ]
        phase_seconds.append(median(phase_sums) + median(assemble_seconds))
        idle_shares.append(ratio(mean(idle_seconds), mean(step_seconds)))
        mean_step_seconds.append(mean(step_seconds))
    return OverlapFigures(
        1000 * mean(mean_step_seconds), 1000 * max(host_seconds), 1000 * max(phase_seconds), max(idle_shares)
    )


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals for the host's work per step, in milliseconds, and for the device's idle share."""
    goal_list = []
    for row in result["rows"]:
        gang = f"{row['ranks']} ranks, device of {row['device_ms']:g} ms"
        if row["gap_goal"] is not None:
            goal_list.append(Goal(f"device idle, {gang}", row["gap_share"], row["gap_goal"]))
        elif row["overlap"]:  # the device that takes no time: the host's work alone
            goal_list.append(Goal(f"parts of the host's time, ms, {gang}", row["parts_ms"], result["host_goal_ms"]))
    return goal_list


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    machine = result["machine"]
    rows = [
        [
            row["ranks"],
            "on" if row["overlap"] else "off",
            f"{row['device_ms']:g}",
            f"{row['step_ms']:.2f}",
            f"{row['host_ms']:.2f}",
            f"{row['parts_ms']:.2f}",
            f"{100 * row['gap_share']:.1f}%",
            "" if row["gap_goal"] is None else f"{100 * row['gap_goal']:.0f}%",
        ]
        for row in result["rows"]
    ]
    title = (
        f"overlap: a simulated device, {result['requests']} requests per rank, {result['repeats']} repeats; the "
        f"parts of the host's time (schedule, agree, assemble, commit) take {result['host_goal_ms']} ms at most\n"
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']}"
    )
    headers = ["ranks", "overlap", "device ms", "step ms", "host ms", "its parts", "device idle", "goal"]
    return f"{title}\n{table(headers, rows)}"


def _case(pair: ModelPair, size: Size, rank_count: int, overlap_on: bool, device_ms: float) -> GangCase:
    prompts = pair.prompts(size.requests * rank_count, size.prompt_tokens)
    requests = [
        RankRequest(f"{rank}/{number}", rank, prompts[rank * size.requests + number], size.new_tokens)
        for rank in range(rank_count)
        for number in range(size.requests)
    ]
    settings = gang_settings(pair, size.requests, rank_count, overlap=overlap_on, disable_radix_cache=False)
    return GangCase(settings, requests, options={"device_ms": device_ms})
