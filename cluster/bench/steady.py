"""Measure steady steps of an engine: steps in which all requests decode and no prompt chunk runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.bench.report import mean
from cluster.engine import Engine
from cluster.request import Request

WARMUP_STEPS = 3  # number of first steady steps that are not counted


class NotSteadyError(RuntimeError):
    """The requests ended before there were enough steady steps of the required kind (replayed or eager)."""


@dataclass(slots=True)
class SteadySteps:
    """The counted steady steps of one engine. Each list has one number per step: `phase_seconds` the device's seconds
    by phase (`StepStats.device_phases`), `wall_seconds` the seconds by the host's clock, `context_tokens` the committed
    tokens of a request before the step, on average. `tokens` counts the tokens generated in all these steps.
    """

    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    wall_seconds: list[float] = field(default_factory=list)
    context_tokens: list[float] = field(default_factory=list)
    tokens: int = 0


def run_steady_steps(engine: Engine, requests: Sequence[Request], count: int, replayed: bool) -> SteadySteps:
    """Run the requests and return `count` steady steps; then abort the requests.

    If `replayed`, only steps that are replayed as a captured program count, otherwise only eager steps. The first
    `WARMUP_STEPS` such steps are left out.

    Raises:
        NotSteadyError: the requests ended before there were `count` such steps.
    """
    steady_steps, steady_count = SteadySteps(), 0
    committed_tokens = {request.request_id: len(request.prompt_token_ids) - 1 for request in requests}
    for request in requests:
        engine.submit(request)
    last_step_at = time.perf_counter()
    while len(steady_steps.wall_seconds) < count:
        if not engine.has_work:
            step_kind = "replayed" if replayed else "eager"
            raise NotSteadyError(
                f"requests ended after {len(steady_steps.wall_seconds)} steady {step_kind} steps; {count} were needed"
            )
        result = engine.step()
        now, stats = time.perf_counter(), result.stats
        if stats.decode_requests == len(requests) and not stats.prompt_rows and stats.replayed == replayed:
            steady_count += 1
            if steady_count > WARMUP_STEPS:
                for name, seconds in stats.device_phases.items():
                    steady_steps.phase_seconds.setdefault(name, []).append(seconds)
                steady_steps.wall_seconds.append(now - last_step_at)
                steady_steps.context_tokens.append(mean(list(committed_tokens.values())))
                steady_steps.tokens += sum(len(output.token_ids) for output in result.outputs)
        for output in result.outputs:
            committed_tokens[output.request_id] += len(output.token_ids)
        last_step_at = now
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    return steady_steps
