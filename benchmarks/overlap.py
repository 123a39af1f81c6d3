"""`python -m benchmarks overlap`: the host's work for a step, and how long the device waits for it.

The device is simulated and takes a fixed time for each step, so the figures do not depend on how fast the machine
computes. The gangs are one rank, and two ranks that agree over gloo on loopback. Each gang runs with the host one step
ahead of the device (`overlap`, the default) and without. Another contender is a device that takes no time: it shows the
host's work with warm caches, because a core that sleeps between steps loses its caches. Contenders take turns in every
repeat; figures are medians over the repeats.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks import simulated_device
from cluster.bench.goals import Goal
from cluster.bench.pair import Pair
from cluster.bench.ranks import Case, RankProcesses, RankRequest, RankRun, settings_of
from cluster.bench.report import Say, machine, mean, median, medians, ratio, table

WARM = 3  # the first steady steps, which are not counted
GOAL_MS = 0.5
PARTS = ("schedule", "agree", "commit")
NO_TIME_MS = 1e-6
GOALS = {1: 0.02, 2: 0.05}


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
    ranks. `parts_ms` is the time to schedule, assemble and commit a step. `gap_share` is the share of time in which the
    device is idle.
    """

    step_ms: float
    host_ms: float
    parts_ms: float
    gap_share: float


def measure(pair: Pair, size: Size, say: Say = print) -> dict[str, Any]:
    """Run all cases and return the figures, JSON-ready."""
    names = [(1, True, NO_TIME_MS), *((world, ahead, size.step_ms) for world in (1, 2) for ahead in (True, False))]
    cases = {name: _case(pair, size, *name) for name in names}
    runs: dict[tuple[int, bool, float], list[OverlapFigures]] = {name: [] for name in cases}
    with RankProcesses(2, simulated_device.__name__) as ranks:
        for repeat in range(size.repeats):
            say(f"overlap: repeat {repeat + 1} of {size.repeats}")
            for name in list(cases)[:: -1 if repeat % 2 else 1]:
                runs[name].append(figures(ranks.run(cases[name]), size))
    rows = [
        {
            "ranks": world,
            "overlap": ahead,
            "device_ms": round(device_ms, 3),
            "gap_goal": GOALS[world] if ahead and device_ms > 1 else None,
            **medians(of),
        }
        for (world, ahead, device_ms), of in runs.items()
    ]
    return {"what": "overlap", "machine": machine(), "repeats": size.repeats, "host_goal_ms": GOAL_MS, "rows": rows} | {
        key: value for key, value in asdict(size).items() if key != "repeats"
    }


def figures(lives: Sequence[RankRun], size: Size) -> OverlapFigures:
    """Return the figures of a gang's steady steps, in which every rank decodes all its requests and runs no prompt."""
    hosts, parts, gaps, steps = [], [], [], []
    for life in lives:
        steady = [s for s in life.steps if s.decodes == size.requests and not s.prompt_rows][WARM:]
        took = [after.began - before.began for before, after in pairwise(steady)]
        idle = [s.phases["agree"] for s in steady] if len(lives) > 1 else [0.0] * len(steady)
        gap, waits, sends = (life.recorded[name][WARM:] for name in ("gaps", "waited", "sent"))
        hosts.append(median([t - w - a for t, w, a in zip(took, waits, idle, strict=False)]))
        own = [sum(s.phases[part] for part in PARTS) - a for s, a in zip(steady, idle, strict=True)]
        parts.append(median(own) + median(sends))
        gaps.append(ratio(mean(gap), mean(took)))
        steps.append(mean(took))
    return OverlapFigures(1000 * mean(steps), 1000 * max(hosts), 1000 * max(parts), max(gaps))


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals for the host's work per step, in milliseconds, and for the device's idle share."""
    found = []
    for row in result["rows"]:
        what = f"{row['ranks']} ranks, device of {row['device_ms']:g} ms"
        if row["gap_goal"] is not None:
            found.append(Goal(f"device idle, {what}", row["gap_share"], row["gap_goal"]))
        elif row["overlap"]:  # the device that takes no time: the host's work alone
            found.append(Goal(f"parts of the host's time, ms, {what}", row["parts_ms"], result["host_goal_ms"]))
    return found


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    where = result["machine"]
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
    head = (
        f"overlap: a simulated device, {result['requests']} requests per rank, {result['repeats']} repeats; the "
        f"parts of the host's time (schedule, agree, assemble, commit) take {result['host_goal_ms']} ms at most\n"
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']}"
    )
    names = ["ranks", "overlap", "device ms", "step ms", "host ms", "its parts", "device idle", "goal"]
    return f"{head}\n{table(names, rows)}"


def _case(pair: Pair, size: Size, world: int, ahead: bool, device_ms: float) -> Case:
    prompts = pair.prompts(size.requests * world, size.prompt_tokens)
    jobs = [
        RankRequest(f"{rank}/{number}", rank, prompts[rank * size.requests + number], size.new_tokens)
        for rank in range(world)
        for number in range(size.requests)
    ]
    settings = settings_of(pair, size.requests, world, overlap=ahead, disable_radix_cache=False)
    return Case(settings, jobs, options={"device_ms": device_ms})
