"""Measure steady steps of an engine: steps in which all requests decode and no prompt chunk runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.bench.report import mean
from cluster.engine import Engine
from cluster.request import Request

WARM = 3  # the first steady steps, which are not counted


class NotSteadyError(RuntimeError):
    """The requests ended before there were enough steady steps of the wanted kind, replayed or eager."""


@dataclass(slots=True)
class SteadySteps:
    """Steady steps of one engine. Each list has one number per step: `phases` seconds of the device, by phase
    (`StepStats.device_phases`); `walls` seconds by the host's clock; `contexts` the mean committed tokens of a request.
    `tokens` counts the tokens generated in all steady steps.
    """

    phases: dict[str, list[float]] = field(default_factory=dict)
    walls: list[float] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)
    tokens: int = 0


def steady(engine: Engine, requests: Sequence[Request], count: int, replayed: bool) -> SteadySteps:
    """Run the requests and return `count` steady steps; then abort the requests.

    If `replayed`, only steps replayed as a captured program count, otherwise only eager steps. The first `WARM` such
    steps are left out.

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
