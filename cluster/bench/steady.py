"""Steady steps of an engine: all requests decode, no prompt rides."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.bench.report import mean
from cluster.engine import Engine
from cluster.request import Request

WARM = 3  # steady steps that are left out
PHASES = ("draft", "target", "extend")
REPLAY = "replay"


class NotSteadyError(RuntimeError):
    """There were too few steps of the kind that was asked for."""


@dataclass(slots=True)
class Steps:
    """Steady steps of one engine: seconds of each by phase and by the host's clock, contexts, tokens that they gave."""

    phases: dict[str, list[float]] = field(default_factory=dict)
    walls: list[float] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)
    tokens: int = 0


def steady(engine: Engine, requests: Sequence[Request], count: int, phase: str) -> Steps:
    """Steps in which all requests decode and no prompt is run, from when `WARM` of them are over; only those that have
    the `phase`. The requests are dropped afterwards.

    Raises:
        NotSteadyError: requests ended before there were so many.
    """
    found, warm = Steps(), 0
    committed = {request.request_id: len(request.prompt_token_ids) - 1 for request in requests}
    for request in requests:
        engine.submit(request)
    before = time.perf_counter()
    while len(found.walls) < count:
        if not engine.has_work:
            raise NotSteadyError(f"requests ended after {len(found.walls)} steady steps with a phase {phase!r}")
        result = engine.step()
        now, stats = time.perf_counter(), result.stats
        if stats.decode_requests == len(requests) and not stats.prompt_rows and phase in stats.phase_seconds:
            warm += 1
            if warm > WARM:
                for name in (REPLAY,) if phase == REPLAY else PHASES:
                    found.phases.setdefault(name, []).append(stats.phase_seconds[name])
                found.walls.append(now - before)
                found.contexts.append(mean(list(committed.values())))
                found.tokens += sum(len(output.token_ids) for output in result.outputs)
        for output in result.outputs:
            committed[output.request_id] += len(output.token_ids)
        before = now
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    return found
