"""Steady steps of an engine: all requests decode, no prompt rides."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.bench.report import mean
from cluster.engine import Engine
from cluster.request import Request

WARM = 3  # steady steps that are left out


class NotSteadyError(RuntimeError):
    """Too few steps were replayed, or launched, as the caller asked."""


@dataclass(slots=True)
class SteadySteps:
    """Steady steps of one engine. `phases` holds seconds of the device by phase (`StepStats.device_phases`), `walls`
    seconds by the host's clock, `contexts` the mean committed tokens of a request; one number per step each. `tokens`
    counts all generated tokens.
    """

    phases: dict[str, list[float]] = field(default_factory=dict)
    walls: list[float] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)
    tokens: int = 0


def steady(engine: Engine, requests: Sequence[Request], count: int, replayed: bool) -> SteadySteps:
    """Run the requests and return `count` steps in which all of them decode and no prompt is run.

    Only steps that were replayed as one captured program count, or, without `replayed`, only steps that were not. The
    first `WARM` of them are left out. The requests are aborted afterwards.

    Raises:
        NotSteadyError: the requests ended before there were `count` such steps.
    """
    found, warm = SteadySteps(), 0
    committed = {request.request_id: len(request.prompt_token_ids) - 1 for request in requests}
    for request in requests:
        engine.submit(request)
    before = time.perf_counter()
    while len(found.walls) < count:
        if not engine.has_work:
            kind = "replayed" if replayed else "launched"
            raise NotSteadyError(f"requests ended after {len(found.walls)} steady {kind} steps; {count} were needed")
        result = engine.step()
        now, stats = time.perf_counter(), result.stats
        if stats.decode_requests == len(requests) and not stats.prompt_rows and stats.replayed == replayed:
            warm += 1
            if warm > WARM:
                for name, seconds in stats.device_phases.items():
                    found.phases.setdefault(name, []).append(seconds)
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
